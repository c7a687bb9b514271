"""The tiny bundle whose step comes in several forms, of which one is right."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.variants import compress
from tests.device_runtime import tiny


def forms() -> dict[str, bytes]:
    """The step of the tiny bundle: with an op more, with another constant, with an op that nobody has, and damaged."""
    own = tiny.train()[1]
    same, wrong, unknown = (onnx.load_from_string(own) for _ in range(3))
    same.graph.node[-1].input[0] = "squares_again"
    same.graph.node.insert(
        len(same.graph.node) - 1, helper.make_node("Identity", ["squares"], ["squares_again"])
    )
    [half] = [each for each in wrong.graph.initializer if each.name == "rows"]
    half.CopyFrom(numpy_helper.from_array(np.array(5, np.float32), "rows"))
    unknown.graph.node[0].domain = "nobody.has.it"
    unknown.opset_import.append(helper.make_opsetid("nobody.has.it", 1))
    made = {"same": same, "wrong": wrong, "unknown": unknown}
    return {name: bytes(each.SerializeToString()) for name, each in made.items()} | {"damaged": own[:50]}


def with_forms(bundle: BundleArchive) -> BundleArchive:
    """``bundle``, said to need a byte, with the forms of its step."""
    own, blobs, variants = tiny.train()[1], dict(bundle.blobs), []
    for name, model in forms().items():
        variant, frame = compress(name, model, tiny.CHUNK, base=own)
        variants.append(variant)
        blobs[variant.blob.sha256] = frame
    graphs = tuple(
        msgspec.structs.replace(each, variants=tuple(variants), planned_bytes=1)
        if each.name == "train"
        else each
        for each in bundle.manifest.graphs
    )
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, graphs=graphs), blobs=blobs)
