"""Updates of large state in blocks of rows: the same numbers, in the memory of the whole."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edgefl.algorithms import catalog
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import BundleError
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_export.artifact import Artifact
from edgefl_export.compiler.compiler import target_of
from edgefl_export.onnx import rows
from edgefl_export.onnx.rows import by_rows
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import entry_of

WIDE, BATCH, STEPS = 1024, 4, 3
LARGE = "state.weights.body.0.weight"
ALGORITHMS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "weight_decay": 1e-3}, "adamw": {}}


@functools.cache
def written(name: str) -> tuple[Algorithm, Artifact, Graph]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU())
        net = nn.Sequential(OrderedDict(body=body, head=nn.Linear(WIDE, 4)))
        spec = split(net, sample=TensorSpec((WIDE,)), classes=4)
    algorithm = catalog.build(name, Objective(spec.module, spec.sample), batch=BATCH, **ALGORITHMS[name])
    form = target_of("onnx")
    lowered = form.capture(algorithm.phases[0].function)
    artifact = form.emit(lowered)
    graph = entry_of(lowered, artifact)
    return algorithm, artifact, graph


def divided(name: str) -> bytes:
    other = by_rows(written(name)[1].model)
    assert other is not None
    return other


def trained(name: str, model: bytes) -> tuple[Arrays, list[Array]]:
    """The state after a few steps in the device's engine, and their losses."""
    algorithm, _, graph = written(name)
    engine = OnnxEngine()
    loaded = engine.load(graph, model)
    example = {port: value.numpy() for port, value in algorithm.phases[0].function.example(0).items()}
    state = engine.write_state({port: array for port, array in example.items() if port.startswith("state.")})
    losses = []
    for _ in range(STEPS):
        outputs = loaded.run(example, state)
        state = {**state, **outputs.state}
        losses.append(outputs.arrays["metric.loss"])
    return {port: array.copy() for port, array in engine.read_state(state).items()}, losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_leave_the_same_state_as_the_whole_graph(name: str) -> None:
    expected, losses = trained(name, written(name)[1].model)
    found, others = trained(name, divided(name))

    np.testing.assert_allclose(others, losses, rtol=1e-6)
    for port, array in expected.items():
        np.testing.assert_allclose(found[port], array, rtol=1e-5, atol=1e-7, err_msg=port)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_computes_what_torch_does(name: str) -> None:
    algorithm, artifact, _ = written(name)

    assert verify(algorithm.phases[0].function, divided(name), 1, artifact.in_place).worst < 1e-4


def test_the_gradient_is_never_there_as_a_whole() -> None:
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(divided("sgd"))).graph
    whole = WIDE * WIDE

    made = {name for node in graph.node for name in node.output}
    large = [
        value.name
        for value in graph.value_info
        if value.name in made
        and np.prod([dim.dim_value for dim in value.type.tensor_type.shape.dim]) >= whole
    ]
    blocks = [value.name for value in graph.output if value.name.startswith(f"{LARGE}.next[")]
    assert not large
    assert len(blocks) == -(-4 * whole // rows.BLOCK_BYTES)


def test_what_is_small_or_has_no_product_stays_as_it_is() -> None:
    graph = onnx.load_from_string(divided("sgd")).graph

    assert "state.weights.head.weight" in {value.name for value in graph.input}
    assert by_rows(divided("sgd")) is None


def damaged(change: Callable[[onnx.GraphProto], None]) -> bytes:
    proto = onnx.load_from_string(divided("sgd"))
    change(proto.graph)
    return bytes(proto.SerializeToString())


def renamed(graph: onnx.GraphProto, old: str, new: str) -> None:
    for value in (*graph.input, *graph.output):
        value.name = new if value.name == old else value.name
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]


FIRST = f"[0:{rows.BLOCK_BYTES // 4 // WIDE}]"


def shapeless(graph: onnx.GraphProto) -> None:
    """Rows behind the end, of which the graph does not say how large they are."""
    name = f"{LARGE}[0:{4 * WIDE}]"
    renamed(graph, f"{LARGE}{FIRST}", name)
    for value in graph.input:
        if value.name == name:
            value.type.tensor_type.ClearField("shape")


DAMAGES: dict[str, tuple[Callable[[onnx.GraphProto], None], str]] = {
    "rows behind the end": (
        lambda graph: renamed(graph, f"{LARGE}{FIRST}", f"{LARGE}[{WIDE}:{WIDE + 128}]"),
        re.escape(f"{LARGE}[{WIDE}:{WIDE + 128}]"),
    ),
    "rows of unknown size": (shapeless, re.escape(f"{LARGE}[0:{4 * WIDE}]")),
    "a missing block": (
        lambda graph: graph.output.remove(next(v for v in graph.output if v.name == f"{LARGE}.next{FIRST}")),
        "rows that are not all of it",
    ),
    "rows of what is no state": (
        lambda graph: renamed(graph, "batch.0.x", f"batch.0.x[0:{BATCH}]"),
        re.escape("batch.0.x[0:4]"),
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_rows_that_do_not_fit_the_manifest_are_refused(kind: str) -> None:
    change, message = DAMAGES[kind]

    with pytest.raises(BundleError, match=message):
        OnnxEngine().load(written("sgd")[2], damaged(change))


def test_state_of_another_shape_is_refused_before_its_memory_is_read() -> None:
    algorithm, _, graph = written("sgd")
    engine = OnnxEngine()
    loaded = engine.load(graph, divided("sgd"))
    example = {port: value.numpy() for port, value in algorithm.phases[0].function.example(0).items()}
    example[LARGE] = example[LARGE][:2]
    state = engine.write_state({port: array for port, array in example.items() if port.startswith("state.")})

    with pytest.raises(BundleError, match=re.escape(f"state {LARGE!r} should be float32")):
        loaded.run(example, state)
