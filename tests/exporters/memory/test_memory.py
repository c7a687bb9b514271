"""The timeline of live bytes, on graphs small enough to count by hand. A float32 vector of 10 is 40 bytes."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from edgefl.algorithms import catalog
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.compiler import target_of
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.recompute import delay_updates, lean
from edgefl_export.memory.usage import is_pointwise, rewritable, size, timeline
from edgefl_export.operators import AFTER
from tests.exporters.examples import entry_of

aten = torch.ops.aten


class Builder:
    """Nodes with example values, as a capture leaves them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.zeros(shape, dtype=dtype)
        return node

    def call(self, target: Callable[..., object], *args: object) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
        return node

    def live(self, *outputs: fx.Node) -> tuple[int, ...]:
        self.graph.output(tuple(outputs))
        return timeline(fx.GraphModule(torch.nn.Module(), self.graph)).live


def test_a_value_lives_from_its_node_to_its_last_reader() -> None:
    b = Builder()
    x = b.input(10)
    first = b.call(aten.cumsum.default, x, 0)  # 40 more until the third call
    second = b.call(aten.cumsum.default, first, 0)
    third = b.call(aten.stack.default, [first, second])  # 80 more
    last = b.call(aten.sum.default, third)  # 4 more

    assert b.live(last) == (40, 80, 120, 200, 124, 44)


def test_an_output_lives_to_the_end() -> None:
    b = Builder()
    x = b.input(10)
    kept = b.call(aten.cumsum.default, x, 0)
    other = b.call(aten.sum.default, x)

    assert b.live(kept, other) == (40, 80, 84, 84)


def test_inputs_are_held_all_the_time() -> None:
    b = Builder()
    x, y = b.input(10), b.input(5)
    one = b.call(aten.sum.default, x)
    two = b.call(aten.sum.default, y)

    assert b.live(one, two) == (60, 60, 64, 68, 68)


def test_what_nobody_reads_lives_while_its_node_runs() -> None:
    b = Builder()
    x = b.input(10)
    b.call(aten.cumsum.default, x, 0)
    last = b.call(aten.sum.default, x)

    assert b.live(last) == (40, 80, 44, 44)


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        (aten.view.default, ([2, 5],)),
        (aten._unsafe_view.default, ([5, 2],)),
        (aten.reshape.default, ([5, 2],)),
        (aten.unsqueeze.default, (0,)),
        (aten.squeeze.dim, (0,)),
    ],
)
def test_a_view_keeps_what_it_shows(target: Callable[..., object], rest: tuple[object, ...]) -> None:
    b = Builder()
    x = b.input(10)
    made = b.call(aten.cumsum.default, x, 0)
    seen = b.call(target, made, *rest)
    total = b.call(aten.sum.default, x)  # meanwhile the view, so the value, waits
    last = b.call(aten.sum.default, seen)

    assert b.live(total, last) == (40, 80, 80, 84, 88, 48)


def test_a_wait_costs_nothing() -> None:
    b = Builder()
    x = b.input(10)
    made = b.call(aten.cumsum.default, x, 0)
    trigger = b.call(aten.sum.default, x)
    held = b.call(AFTER, made, trigger)
    last = b.call(aten.sum.default, held)

    assert b.live(last) == (40, 80, 84, 84, 84, 44)


def test_results_of_one_op_end_each_by_itself() -> None:
    b = Builder()
    x = b.input(10)
    both = b.call(aten.topk.default, x, 5)  # 20 bytes of values, 40 of places
    values = b.call(operator.getitem, both, 0)
    b.call(operator.getitem, both, 1)  # nobody reads the places
    late = b.call(aten.cumsum.default, values, 0)  # 20 more

    assert b.live(late) == (40, 100, 60, 100, 80, 60)


def test_a_pointwise_node_writes_over_a_value_that_it_reads_last() -> None:
    b = Builder()
    x = b.input(10)
    made = b.call(aten.cumsum.default, x, 0)
    positive = b.call(aten.relu.default, made)

    assert b.live(positive) == (40, 80, 80, 80)


@pytest.mark.parametrize("why", ["input", "read later", "other size", "not pointwise"])
def test_it_takes_memory_of_its_own_otherwise(why: str) -> None:
    b = Builder()
    x = b.input(10)
    made = x if why == "input" else b.call(aten.cumsum.default, x, 0)
    target = aten.cumsum.default if why == "not pointwise" else aten.relu.default
    before = 40 if why == "input" else 80
    if why == "other size":
        grown = b.call(aten.add.Tensor, made, b.input(3, 10))  # 120 bytes of inputs, 120 of the result
        assert b.live(grown)[-2] == 40 + 120 + 40 + 120
        return
    positive = b.call(target, made, *([0] if why == "not pointwise" else []))
    index = len(b.graph.nodes) - 1
    outputs = [positive, made] if why == "read later" else [positive]

    assert b.live(*outputs)[index] == before + 40


def test_sizes_follow_the_dtype() -> None:
    b = Builder()

    assert [size(b.input(3, dtype=d)) for d in (torch.float64, torch.int64, torch.bool)] == [24, 24, 3]


def test_owner_reads_and_peak_are_those_of_the_memory() -> None:
    b = Builder()
    x = b.input(10)
    made = b.call(aten.cumsum.default, x, 0)
    seen = b.call(aten.view.default, made, [2, 5])
    last = b.call(aten.sum.default, seen)
    b.graph.output((last,))

    line = timeline(fx.GraphModule(torch.nn.Module(), b.graph))

    nodes = {node.name: node for node in line.nodes}
    assert line.owner[nodes[seen.name]] is nodes[made.name]
    assert line.reads[nodes[made.name]] == [2, 3] and line.reads[nodes[seen.name]] == []
    assert line.peak == max(line.live) == 84


def test_pointwise_is_what_torch_says() -> None:
    b = Builder()
    x = b.input(2, 2)

    assert is_pointwise(b.call(aten.relu.default, x)) and is_pointwise(b.call(aten.mul.Tensor, x, x))
    assert not is_pointwise(b.call(aten.mm.default, x, x)) and not is_pointwise(x)
    assert isinstance(b.call(aten.mm.default, x, x).meta["val"], Tensor)


def rewritten_by(fn: Callable[[Tensors], Tensors]) -> tuple[str, ...]:
    square = TensorSpec((4, 4))
    return rewritable(capture(Function("f", fn, {"state.m": square, "state.w": square, "batch.0.x": square})))


def test_state_read_by_its_new_value_only_is_written_over() -> None:
    def momentum(t: Tensors) -> Tensors:
        m = t["state.m"] * 0.9 + t["batch.0.x"]
        return {"state.m": m, "state.w": t["state.w"] - m}

    assert rewritten_by(momentum) == ("state.m", "state.w")


def test_state_that_something_else_is_computed_from_keeps_its_memory() -> None:
    """The loss may be computed after the update, by a product that reads the weights through a transpose."""

    def step(t: Tensors) -> Tensors:
        loss = (t["batch.0.x"] @ t["state.w"].T).sum()
        return {"state.m": t["state.m"] + t["batch.0.x"], "state.w": t["state.w"] - 0.1, "metric.loss": loss}

    assert rewritten_by(step) == ("state.m",)


def test_state_that_is_not_made_element_by_element_keeps_its_memory() -> None:
    def mixed(t: Tensors) -> Tensors:
        return {"state.m": t["state.m"] @ t["batch.0.x"], "state.w": t["state.m"] + t["batch.0.x"]}

    assert rewritten_by(mixed) == ()


def test_weights_that_decay_are_written_over() -> None:
    """The momentum is made of the old weights and leads to the new ones; to give it out reads nothing again."""

    def step(t: Tensors) -> Tensors:
        m = t["state.m"] * 0.9 + t["state.w"] * 1e-4 + t["batch.0.x"]
        return {"state.m": m, "state.w": t["state.w"] - 0.1 * m}

    assert rewritten_by(step) == ("state.m", "state.w")


def test_weights_of_a_product_are_written_over() -> None:
    """The loss is made of the product, which has memory of its own, and may be computed after the update."""

    def step(t: Tensors) -> Tensors:
        logits = t["batch.0.x"] @ t["state.w"].T
        gradient = torch.softmax(logits, 1).T @ t["batch.0.x"]
        return {
            "state.m": t["state.m"] * 0.9,
            "state.w": t["state.w"] - gradient,
            "metric.loss": logits.sum(),
        }

    assert rewritten_by(step) == ("state.m", "state.w")


def test_state_that_is_given_out_as_it_was_keeps_its_memory() -> None:
    def step(t: Tensors) -> Tensors:
        return {"state.m": t["state.w"], "state.w": t["state.w"] + t["batch.0.x"]}

    assert rewritten_by(step) == ()


def test_state_that_is_given_out_in_another_shape_keeps_its_memory() -> None:
    def step(t: Tensors) -> Tensors:
        rows = t["state.w"].reshape(16)
        return {"state.w": rows.reshape(4, 4) + t["batch.0.x"], "metric.rows": rows}

    assert rewritten_by(step) == ()


# -- large new state waits for what reads the old one ------------------------------------------------------


WIDE, BATCH, STEPS = 1024, 4, 3
LARGE = "state.weights.body.0.weight"
ALGORITHMS = {"sgd": {"momentum": 0.9, "weight_decay": 1e-3}, "adamw": {}, "fedprox": {}}


@functools.cache
def lowered(name: str) -> tuple[LoweredGraph, LoweredGraph]:
    """As it is for onnxruntime, and as it is written."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stem, body = nn.Linear(16, WIDE), nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU())
        net = nn.Sequential(OrderedDict(stem=stem, body=body, head=nn.Linear(WIDE, 4)))
        spec = split(net, sample=TensorSpec((16,)), classes=4)
    algorithm = catalog.build(name, Objective(spec.module, spec.sample), batch=BATCH, **ALGORITHMS[name])
    function = algorithm.phases[0].function
    plain = target_of("onnx").capture(function)
    return plain, lean(plain)


@functools.cache
def forms(name: str) -> tuple[Graph, dict[str, bytes]]:
    form, graph = target_of("onnx"), lowered(name)[0]
    artifact = form.emit(graph)
    verified = form.verify(graph.function, artifact.model, 0, artifact.in_place)
    entry = entry_of(graph, artifact)
    return entry, {"": artifact.model, **form.variants(graph, artifact, verified)}


def trained(name: str, graph: Graph, model: bytes) -> Arrays:
    """The state after a few steps in the device's engine."""
    engine = OnnxEngine()
    loaded = engine.load(graph, model)
    given = {port: value.numpy() for port, value in lowered(name)[1].function.example(0).items()}
    state = engine.write_state({port: array for port, array in given.items() if port.startswith("state.")})
    for _ in range(STEPS):
        state = {**state, **loaded.run(given, state).state}
    return {port: array.copy() for port, array in engine.read_state(state).items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_in_one_memory_leave_the_bits_of_steps_in_two(name: str) -> None:
    graph, models = forms(name)
    assert LARGE in graph.in_place
    assert LARGE not in rewritable(lowered(name)[0])

    for form, model in models.items():
        found = trained(name, graph, model)
        expected = trained(name, msgspec.structs.replace(graph, in_place=()), model)
        for port, array in expected.items():
            np.testing.assert_array_equal(found[port], array, err_msg=f"{form}: {port}")


def test_a_step_needs_less_memory() -> None:
    plain, late = lowered("sgd")

    assert predicted_peak(late) < predicted_peak(plain) - 2 * WIDE * WIDE


def one_layer(t: Tensors) -> Tensors:
    y = t["batch.0.x"] @ t["state.w"].T
    grad = y.T @ t["batch.0.x"]
    return {"metric.loss": y.mean(), "state.w": t["state.w"] - t["hyper.lr"] * grad}


def seen_outside(t: Tensors) -> Tensors:
    """The old state is read for a metric, to which no update leads."""
    return {**one_layer(t), "metric.norm": t["state.w"].norm()}


@pytest.mark.parametrize("function", [one_layer, seen_outside])
def test_what_has_nothing_to_wait_for_stays_as_it_is(function: object) -> None:
    specs = {
        "state.w": TensorSpec((WIDE, WIDE)),
        "batch.0.x": TensorSpec((BATCH, WIDE)),
        "hyper.lr": TensorSpec(()),
    }
    graph = capture(Function("train", function, specs))  # type: ignore[arg-type]

    assert delay_updates(graph, 1 << 40)[0] is graph


def test_small_state_stays_as_it_is() -> None:
    specs = {"state.w": TensorSpec((8, 8)), "batch.0.x": TensorSpec((BATCH, 8)), "hyper.lr": TensorSpec(())}
    graph = capture(Function("train", one_layer, specs))

    assert delay_updates(graph, 1 << 40)[0] is graph
