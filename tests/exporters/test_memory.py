"""The timeline of live bytes, on graphs small enough to count by hand. A float32 vector of 10 is 40 bytes."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from exporters.memory import is_pointwise, size, timeline
from exporters.ordering import AFTER

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
def test_a_view_costs_nothing_and_keeps_what_it_shows(
    target: Callable[..., object], rest: tuple[object, ...]
) -> None:
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
