"""Updates of large state in fewer passes, on the blocked layout: the same numbers, in one memory and in two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
import pytest
import torch

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import BundleError
from edgefl.wire.bundle.graphs import rows_in
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_export.compiler.compiler import target_of
from edgefl_export.onnx.blocked.updates import summed
from edgefl_export.onnx.rows import by_rows
from edgefl_export.onnx.values import LAYOUT
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import entry_of

SIDE, LONG, BATCH, STEPS = 256, 1024, 4, 3
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
def written(name: str) -> tuple[Function, Graph, bytes]:
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

    ported = {**inputs, "batch.0.x": TensorSpec((BATCH, shape[1])), "hyper.lr": TensorSpec(())}
    whole = Function("train", function, ported)
    form = target_of("onnx")
    lowered = form.capture(whole)
    artifact = form.emit(lowered)
    entry = entry_of(lowered, artifact)
    return whole, entry, artifact.model


def passes(model: bytes | None) -> int:
    nodes = onnx.load_from_string(model).graph.node if model else ()
    return sum(node.domain == LAYOUT and node.op_type == "Conv" for node in nodes)


def trained(name: str, model: bytes, in_place: tuple[str, ...]) -> Arrays:
    """What is left after a few steps in the device's engine."""
    function, graph, _ = written(name)
    engine = OnnxEngine()
    loaded = engine.load(msgspec.structs.replace(graph, in_place=in_place), model)
    given = {port: value.numpy() for port, value in function.example(0).items()}
    state = engine.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    for _ in range(STEPS):
        state = {**state, **loaded.run(given, state).state}
    return {port: array.copy() for port, array in engine.read_state(state).items()}


def formed(name: str) -> tuple[bytes, ...]:
    """Of the whole graph, and of its form by rows where there is one."""
    model = written(name)[2]
    found = (model, by_rows(model))
    return tuple(form for each in found if each and (form := summed(each)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_it_is_there_where_it_takes_fewer_passes(name: str) -> None:
    assert passes(summed(written(name)[2])) == CASES[name].passes


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.passes])
def test_steps_leave_the_same_state_in_one_memory_and_in_two(name: str) -> None:
    _, graph, model = written(name)
    expected = trained(name, model, ())

    for form in formed(name):
        for in_place in ((), graph.in_place):
            found = trained(name, form, in_place)
            for port, array in expected.items():
                np.testing.assert_allclose(found[port], array, rtol=1e-5, atol=1e-6, err_msg=port)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.passes])
def test_it_computes_what_torch_does(name: str) -> None:
    function, graph, _ = written(name)

    for form in formed(name):
        assert verify(function, form, 1, graph.in_place).worst < 1e-5


def test_blocks_of_rows_are_ports_in_another_shape() -> None:
    form = summed(by_rows(written("by rows of many columns")[2]) or b"")
    assert form is not None
    graph = onnx.load_from_string(form).graph

    shapes = {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
        if rows_in(value.name)
    }
    assert {len(shape) for name, shape in shapes.items() if name.startswith("state.w")} == {4}
    assert not [node for node in graph.node if node.op_type == "Reshape" and node.output[0] in shapes]


def test_rows_of_another_size_are_refused() -> None:
    _, graph, model = written("momentum and decay")
    proto = onnx.load_from_string(summed(model) or b"")
    port = next(value for value in proto.graph.input if value.name == f"state.m[0:{SIDE}]")
    port.type.tensor_type.shape.dim[-1].dim_value *= 2

    with pytest.raises(BundleError, match=r"state\.m\[0"):
        OnnxEngine().load(graph, proto.SerializeToString())
