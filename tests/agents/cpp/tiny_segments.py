"""A bundle by hand whose step is two artifacts with a value on the disk between them, large enough to be a page.

::

    start:    w = head                      finish:  update = w
    step, 1:  page = x @ w,  loss = mean(page^2)
    step, 2:  w = w - lr x^T page, in place
"""

from __future__ import annotations

import msgspec

from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.graphs import Segment, join
from edgefl.wire.bundle.manifest import SEGMENTED, PhaseSpec
from tests.device_runtime import tiny
from tests.device_runtime.tiny import CHUNK, LOSS, LR, WIDTH, X, graph_of, node, onnx_bytes, port

COLUMNS = 6000
HEAD = port("weights.head.w", (WIDTH, COLUMNS))
W = port("state.weights.head.w", (WIDTH, COLUMNS))
PAGE = port("page.h", (tiny.BATCH, COLUMNS))
UPDATE = port("update.head.w", (WIDTH, COLUMNS))


def make_bundle(steps: int = 3) -> BundleArchive:
    first = onnx_bytes(
        [
            node("MatMul", f"{X.name} {W.name}", f"out.{PAGE.name}"),
            node("Mul", f"out.{PAGE.name} out.{PAGE.name}", "squares"),
            node("ReduceMean", "squares", f"out.{LOSS.name}", keepdims=0),
        ],
        (W, X),
        (PAGE, LOSS),
    )
    second = onnx_bytes(
        [
            node("Transpose", X.name, "xt", perm=[1, 0]),
            node("MatMul", f"xt {PAGE.name}", "g"),
            node("Mul", f"g {LR.name}", "move"),
            node("Sub", f"{W.name} move", f"out.{W.name}"),
        ],
        (W, X, PAGE, LR),
        (W,),
    )
    segments = (
        Segment(inputs=(W, X), outputs=(PAGE, LOSS)),
        Segment(inputs=(W, X, PAGE, LR), outputs=(W,), in_place=(W.name,)),
    )
    blob = join([first, second])
    train = msgspec.structs.replace(
        graph_of("train", blob, (W, X, LR), (W, LOSS)), segments=segments, in_place=(W.name,)
    )
    start = onnx_bytes([node("Identity", HEAD.name, f"out.{W.name}")], (HEAD,), (W,))
    finish = onnx_bytes([node("Identity", W.name, f"out.{UPDATE.name}")], (W,), (UPDATE,))
    made = [
        (graph_of("start", start, (HEAD,), (W,)), start),
        (train, blob),
        (graph_of("finish", finish, (W,), (UPDATE,)), finish),
    ]
    manifest = msgspec.structs.replace(
        tiny.make_bundle(()).manifest,
        v=SEGMENTED,
        phases=(PhaseSpec(name="p", graph="train", steps=steps),),
        graphs=tuple(graph for graph, _ in made),
    )
    return BundleArchive(manifest, {describe(data, CHUNK).sha256: data for _, data in made})
