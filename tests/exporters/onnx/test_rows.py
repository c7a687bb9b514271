"""Updates of large state in blocks of rows: the same numbers, in the memory of the whole."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edgefl.algorithms import catalog
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.graphs import parse_rows
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_export.artifact import Artifact
from edgefl_export.compiler.compiler import target_of
from edgefl_export.onnx import rows
from edgefl_export.onnx.blocked.updates import write_sums
from edgefl_export.onnx.rows import by_rows
from edgefl_export.onnx.values import LAYOUT
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import entry_of
from tests.support.errors import BundleError, refuses

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

    with refuses(BundleError, port="state.weights.body.0.weight"):
        loaded.run(example, state)


# -- updates of large state in fewer passes, on the blocked layout -----------------------------------------


SIDE, LONG, UPDATES_BATCH, UPDATES_STEPS = 256, 1024, 4, 3
Step = Callable[[Tensors, torch.Tensor], Tensors]


class Case(NamedTuple):
    """How state follows from a gradient; the passes that are ops on the layout, none: there is no such form."""

    step: Step
    state: tuple[str, ...]
    passes: int
    shape: tuple[int, ...] = (SIDE, SIDE)
    others: tuple[str, ...] = ()


def doubled(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x + x
    return x


def many(t: Tensors) -> torch.Tensor:
    """Gradients of a weight that is read many times."""
    x = t["batch.0.x"]
    total = x.T @ x
    for number in range(1, 9):
        total = total + torch.tanh(x * number).T @ x
    return total


def sgd(t: Tensors, g: torch.Tensor) -> Tensors:
    momentum = 0.9 * t["state.m"] + (g + 0.01 * t["state.w"])
    return {"state.m": momentum, "state.w": t["state.w"] - t["hyper.lr"] * momentum}


CASES = {
    "momentum and decay": Case(sgd, ("m",), 2),
    "by rows of many columns": Case(sgd, ("m",), 2, (LONG, LONG)),
    "of five axes": Case(sgd, ("m",), 2, (SIDE, SIDE, 1, 1, 1)),
    "without momentum": Case(lambda t, g: {"state.w": t["state.w"] - t["hyper.lr"] * g}, (), 1),
    "averages, of what was before too": Case(
        lambda t, g: {
            "state.m": g + 0.9 * t["state.m"] + 0.1 * t["state.v"] - 0.2 * t["state.w"],
            "state.v": t["state.v"] + 0.1 * t["state.m"],
            "state.w": t["state.w"] - 0.1 * g,
        },
        ("m", "v"),
        4,
    ),
    "taken from a gradient": Case(
        lambda t, g: {"state.w": t["state.w"] - 0.1 * g, "state.m": g - 0.5 * t["state.m"] - (g * 0.25 - t["state.w"])},
        ("m",),
        2,
    ),
    "onto a product of its own": Case(lambda t, g: {"state.w": t["state.w"] + 0.1 * t["state.w"]}, (), 1),
    "what is no state": Case(
        lambda t, g: {"state.w": t["state.w"] - 0.1 * t["batch.1.x"]}, (), 1, others=("batch.1.x",)
    ),
    "a sum of products, of which one would be there at a time": Case(
        lambda t, g: {"state.m": 0.9 * t["state.m"] + (0.1 * t["state.w"] + many(t))},
        ("m",),
        0,
    ),
    "twice of itself": Case(
        lambda t, g: {"state.w": t["state.w"] - 0.1 * (g + g), "state.m": 0.9 * t["state.m"] + doubled(g, 12)}, ("m",), 1
    ),
    "what is read again": Case(
        lambda t, g: {"state.w": (w := t["state.w"] - 0.1 * g), "state.m": torch.tanh(w) + t["state.m"]}, ("m",), 0
    ),
    "a factor for each row": Case(
        lambda t, g: {"state.w": t["state.w"] - t["batch.0.x"].mean(0)[:, None] * g}, (), 0
    ),
}  # fmt: skip


@functools.cache
def updates_written(name: str) -> tuple[Function, Graph, bytes]:
    case = CASES[name]
    inputs = {f"state.{each}": TensorSpec(case.shape) for each in ("w", *case.state)}
    inputs |= {each: TensorSpec(case.shape) for each in case.others}
    shape = case.shape

    def function(t: Tensors) -> Tensors:
        w = t["state.w"] if len(shape) == 2 else t["state.w"].reshape(shape[:2])
        y = t["batch.0.x"] @ w.T
        gradient = (2 * y / y.numel()).T @ t["batch.0.x"]
        return {
            "metric.loss": (y**2).mean(),
            **case.step(t, gradient if w is t["state.w"] else gradient.reshape(shape)),
        }

    ported = {**inputs, "batch.0.x": TensorSpec((UPDATES_BATCH, shape[1])), "hyper.lr": TensorSpec(())}
    whole = Function("train", function, ported)
    form = target_of("onnx")
    lowered = form.capture(whole)
    artifact = form.emit(lowered)
    entry = entry_of(lowered, artifact)
    return whole, entry, artifact.model


def passes(model: bytes | None) -> int:
    nodes = onnx.load_from_string(model).graph.node if model else ()
    return sum(node.domain == LAYOUT and node.op_type == "Conv" for node in nodes)


def updates_trained(name: str, model: bytes, in_place: tuple[str, ...]) -> Arrays:
    """What is left after a few steps in the device's engine."""
    function, graph, _ = updates_written(name)
    engine = OnnxEngine()
    loaded = engine.load(msgspec.structs.replace(graph, in_place=in_place), model)
    given = {port: value.numpy() for port, value in function.example(0).items()}
    state = engine.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    for _ in range(UPDATES_STEPS):
        state = {**state, **loaded.run(given, state).state}
    return {port: array.copy() for port, array in engine.read_state(state).items()}


def formed(name: str) -> tuple[bytes, ...]:
    """Of the whole graph, and of its form by rows where there is one."""
    model = updates_written(name)[2]
    found = (model, by_rows(model))
    return tuple(form for each in found if each and (form := write_sums(each)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_it_is_there_where_it_takes_fewer_passes(name: str) -> None:
    assert passes(write_sums(updates_written(name)[2])) == CASES[name].passes


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.passes])
def test_steps_leave_the_same_state_in_one_memory_and_in_two(name: str) -> None:
    _, graph, model = updates_written(name)
    expected = updates_trained(name, model, ())

    for form in formed(name):
        for in_place in ((), graph.in_place):
            found = updates_trained(name, form, in_place)
            for port, array in expected.items():
                np.testing.assert_allclose(found[port], array, rtol=1e-5, atol=1e-6, err_msg=port)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.passes])
def test_it_updates_as_torch_does(name: str) -> None:
    function, graph, _ = updates_written(name)

    for form in formed(name):
        assert verify(function, form, 1, graph.in_place).worst < 1e-5


def test_blocks_of_rows_are_ports_in_another_shape() -> None:
    form = write_sums(by_rows(updates_written("by rows of many columns")[2]) or b"")
    assert form is not None
    graph = onnx.load_from_string(form).graph

    shapes = {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
        if parse_rows(value.name)
    }
    assert {len(shape) for name, shape in shapes.items() if name.startswith("state.w")} == {4}
    assert not [node for node in graph.node if node.op_type == "Reshape" and node.output[0] in shapes]


def test_rows_of_another_size_are_refused() -> None:
    _, graph, model = updates_written("momentum and decay")
    proto = onnx.load_from_string(write_sums(model) or b"")
    port = next(value for value in proto.graph.input if value.name == f"state.m[0:{SIDE}]")
    port.type.tensor_type.shape.dim[-1].dim_value *= 2

    with pytest.raises(BundleError, match=r"state\.m\[0"):
        OnnxEngine().load(graph, proto.SerializeToString())
