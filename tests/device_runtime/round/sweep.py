"""A tiny bundle with a phase over all local rows, small enough to follow in plain numpy.

::

    sweep:  v = v + x^T (mask (x w - y)) + noise / 100        (noisy-sgd of tiny.py follows or goes before)
            swept = sum(mask (x w - y)^2)
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from onnx import TensorProto

from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Graph, PhaseSpec
from edgefl.wire.tensors import Array
from edgefl_device.data import samples as local_data
from edgefl_device.data.samples import Batches
from edgefl_device.round.job import Job
from tests.device_runtime import tiny
from tests.device_runtime.tiny import BATCH, NOISE, WIDTH, V, W, World, Y, graph_of, node, onnx_bytes, port

ROWS_OF_SWEEP = 3
X = port("batch.0.x", (ROWS_OF_SWEEP, WIDTH))
SHORT_Y = port("batch.0.y", (ROWS_OF_SWEEP,), Y.dtype)
MASK = port("batch.0.mask", (ROWS_OF_SWEEP,))
SWEPT = port("metric.swept", ())


def sweep_graph() -> tuple[Graph, bytes]:
    inputs, outputs = (W, V, X, SHORT_Y, MASK, NOISE), (V, SWEPT)
    nodes = [
        node("MatMul", f"batch.0.x {W.name}", "guess"),
        node("Cast", "batch.0.y", "labels", to=TensorProto.FLOAT),
        node("Unsqueeze", "labels axis", "target"),
        node("Sub", "guess target", "error"),
        node("Unsqueeze", "batch.0.mask axis", "column"),
        node("Mul", "error column", "held"),
        node("Transpose", "batch.0.x", "xt", perm=[1, 0]),
        node("MatMul", "xt held", "g"),
        node("Mul", "noise.g hundredth", "dither"),
        node("Add", "g dither", "dithered"),
        node("Add", f"{V.name} dithered", f"out.{V.name}"),
        node("Mul", "held held", "squares"),
        node("ReduceSum", "squares", "out.metric.swept", keepdims=0),
    ]
    data = onnx_bytes(nodes, inputs, outputs, ["axis", "hundredth"])
    return graph_of("sweep", data, inputs, outputs), data


def sweeping(prefix: Sequence[str] = (), phases: Sequence[int | None] = (None, 4)) -> BundleArchive:
    """A bundle whose ``phases`` are numbers of training steps, or None for a pass over the data."""
    bundle, (graph, data) = tiny.make_bundle(prefix), sweep_graph()
    listed = [
        PhaseSpec(name=f"sweep{place}", graph="sweep", steps=1, over_data=True)
        if steps is None
        else PhaseSpec(name=f"train{place}", graph="train", steps=steps)
        for place, steps in enumerate(phases)
    ]
    manifest = msgspec.structs.replace(
        bundle.manifest, phases=tuple(listed), graphs=(*bundle.manifest.graphs, graph)
    )
    return BundleArchive(manifest, bundle.blobs | {graph.blob.sha256: data})


def expected(world: World, job: Job, rows: int) -> tuple[Array, Array, dict[str, float], int]:
    """(update, carry, metrics, steps) of a round in plain numpy, float32."""
    data = tiny.local(rows).fitted(tiny.DATA).first(job.samples)
    n, x, y = len(data), data.rows(np.arange(len(data))), data.y[:, None].astype(np.float32)
    for chunk in world.bundle.manifest.prefix:
        x = np.maximum(x @ world.units[chunk.units[0]][f"{chunk.units[0]}.w"], 0)
    w, step = world.units["head"]["head.w"], 0
    v, losses, swept = np.zeros_like(w), [], []
    batches = Batches(job.seed, n, BATCH)
    for phase in world.bundle.manifest.phases:
        for first in range(0, n, ROWS_OF_SWEEP) if phase.over_data else range(phase.steps):
            dither = local_data.noise(job.seed, step, 0, NOISE.shape, "float32") / 100
            if phase.over_data:
                error = x[first : first + ROWS_OF_SWEEP] @ w - y[first : first + ROWS_OF_SWEEP]
                v = v + x[first : first + ROWS_OF_SWEEP].T @ error + dither
                swept.append(float((error**2).sum()))
            else:
                at = batches.indices(0, step)
                error = x[at] @ w - y[at]
                v = v / 2 + x[at].T @ error / BATCH + dither
                w = w - np.float32(0.1) * v
                losses.append(float((error**2).mean()))
            step += 1
    means = {"loss": losses, "swept": swept}
    return w, v, {name: sum(all_) / len(all_) for name, all_ in means.items() if all_}, step
