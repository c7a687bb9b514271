"""Manifests and a bundle that the byte vectors are made of; their graphs are placeholders."""

from __future__ import annotations

import msgspec

from edgefl.wire.blobs import describe
from edgefl.wire.bundle import manifest
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import (
    HELD_OUT,
    DataSpec,
    FrozenChunk,
    Graph,
    Input,
    Manifest,
    PhaseSpec,
    Port,
    Split,
)
from edgefl.wire.bundle.readers import TextSpec

GRAPHS = {name: f"graph bytes: {name}".encode() for name in ("start", "train", "finish", "pass", "adapt")}


def _port(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Port:
    role = msgspec.convert(name.partition(".")[0], manifest.Role)
    return Port(name=name, role=role, dtype=dtype, shape=shape)


def _graph(name: str, inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> Graph:
    return Graph(
        name=name, format="onnx", blob=describe(GRAPHS[name], 131072), inputs=inputs, outputs=outputs
    )


def example_manifest() -> Manifest:
    """A small manifest; its graphs are placeholders."""
    weight, state, update = (_port(f"{role}.head.weight", (2, 3)) for role in ("weights", "state", "update"))
    batch = (_port("batch.0.x", (4, 3)), _port("batch.0.y", (4,), "int64"))
    extras = (_port("noise.mask", (4, 3)), _port("hyper.lr", ()))
    return Manifest(
        model="tiny",
        program="sgd",
        tier="weak",
        parameters=6,
        data=DataSpec(shape=(3,), dtype="float32", classes=2, scale=0.00392156862745098, shift=-0.5),
        batch=4,
        prefix=(FrozenChunk(units=("stem",), graph="start"),),
        suffix=("head",),
        start="start",
        phases=(PhaseSpec(name="train", graph="train", steps=10),),
        finish="finish",
        evaluate="start",
        hyper={"lr": 0.1},
        graphs=(
            _graph("start", (weight,), (state,)),
            _graph("train", (state, *batch, *extras), (state, _port("metric.loss", ()))),
            _graph("finish", (state,), (update, _port("carry.head.weight", (2, 3)))),
        ),
        codec="dense",
        codec_version=1,
        draws="walk",
    )


def example_manifest_of_exchanges() -> Manifest:
    """Of a program of several exchanges: a phase over the data, a carry that is needed, server state among the weights."""
    first = example_manifest()
    weight, server_state = (_port(f"weights.{name}", (2, 3)) for name in ("head.weight", "m/head.weight"))
    state, carry = (_port(f"{role}.head.weight", (2, 3)) for role in ("state", "carry"))
    batch = (_port("batch.0.x", (4, 3)), _port("batch.0.y", (4,), "int64"))
    other = (_port("batch.1.x", (2, 3)), _port("batch.1.y", (2,), "int64"))
    mask, sent = (
        _port("batch.0.mask", (4,)),
        (_port("update.head.weight", (2, 3)), _port("update.m/head.weight", (2, 3))),
    )
    return msgspec.structs.replace(
        first,
        suffix=("head", "m/head"),
        phases=(
            PhaseSpec(name="all", graph="pass", steps=1, over_data=True),
            PhaseSpec(name="train", graph="train", steps=10),
        ),
        graphs=(
            _graph("start", (weight, server_state, carry), (state,)),
            _graph("pass", (state, *batch, mask), (state,)),
            _graph("train", (state, *batch, *other), (state, _port("metric.loss", ()))),
            _graph("finish", (state,), (*sent, carry)),
            _graph("adapt", (weight, *batch, _port("hyper.lr", ())), (weight,)),
        ),
        personalize="adapt",
        draws="draw",
        exchange="first",
        carry_exchanges=1,
        carry_needed=True,
        sources=describe(b"sources of the nodes", 131072),
    )


def example_manifest_of_texts() -> Manifest:
    """Of data whose classes have names, and that devices read from texts by a tokenizer in the bundle."""
    first = example_manifest()
    data = DataSpec(
        shape=(3,),
        dtype="int64",
        classes=2,
        below=300,
        others=(Input(name="attention_mask", shape=(3,), dtype="int64", below=2),),
        names=("bad", "good"),
        reader=TextSpec(tokenizer=describe(b"a tokenizer", 131072), mask="attention_mask", text="review"),
    )
    return msgspec.structs.replace(first, data=data)


def example_manifest_held_out() -> Manifest:
    """A manifest of a bundle that uses only the held-out rows."""
    split = Split(share=0.3, seed=(1 << 62) + 1, part="held-out")
    return msgspec.structs.replace(example_manifest(), v=HELD_OUT, split=split)


def example_manifest_executorch() -> Manifest:
    """One whose graphs are ExecuTorch programs, which say what they need and what they may write in place."""
    first = example_manifest()
    named = {"start": (1 << 20, ()), "train": (73400320, ("state.head.weight",)), "finish": (0, ())}
    graphs = tuple(
        msgspec.structs.replace(
            graph, format="executorch", planned_bytes=named[graph.name][0], in_place=named[graph.name][1]
        )
        for graph in first.graphs
    )
    return msgspec.structs.replace(first, graphs=graphs)


def example_bundle() -> BundleArchive:
    listed = example_manifest()
    return BundleArchive(listed, {graph.blob.sha256: GRAPHS[graph.name] for graph in listed.graphs})
