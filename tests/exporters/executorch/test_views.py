"""Views are not run on XNNPACK until something needs their shape: whatever reads one must still meet what torch meets."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from exporters.capture.trace import capture
from exporters.executorch.check.programs import verify
from exporters.executorch.graph import lowered
from exporters.executorch.program import partition
from exporters.executorch.program.partition import steps_of
from exporters.executorch.program.write import to_executorch
from exporters.executorch.xnnpack.builder import Builder
from tests.exporters.executorch.test_ops import Case, function


def _two_views(x: Tensor) -> Tensor:
    y = x * 2
    return y.view(8, 4) * y.view(2, 4, 4).view(8, 4) + y.view(8, 4)


def _of_a_layer(x: Tensor, y: Tensor) -> Tensor:
    grad = (x * 2).view(512, 4)
    return torch.mm(grad.t(), y) + grad.sum(0).view(-1, 1)


def _in_three_shapes(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y.view(2, 3, 5).sum(0) + y.view(6, 5)[:3] + y.view(3, 2, 5)[:, 0]


COMBINED: dict[str, Case] = {
    "a column times a row of as many": (lambda x: (x * 2).view(4, 1) * (x + 1), ((4,),)),
    "one for each row of a square": (lambda x: (x * 2) * (x + 1).sum(1, keepdim=True), ((4, 4),)),
    "a middle axis of as many as the rows": (
        lambda x, y: (x * 2).view(2, 4, 2) * (y + 1),
        ((4, 4), (1, 4, 1)),
    ),
    "two views of one value": (_two_views, ((32,),)),
    "means with their axes, channels first": (
        lambda x: (x * 2).mean([1, 2], keepdim=True).permute(0, 3, 1, 2) * 3,
        ((4, 8, 8, 6),),
    ),
    "rows of a square, summed and turned": (
        lambda x: (x * 2).permute(0, 1).sum(0) + (x * 2).t().sum(0),
        ((256, 256),),
    ),
    "rows summed beside the gradient of a weight": (_of_a_layer, ((2, 256, 4), (512, 3))),
    "a wide layer for few samples": (
        lambda x, w, b: torch.addmm(b, x, w.t()) * 2,
        ((2, 512), (2048, 512), (2048,)),
    ),
    "a product that is read in three shapes": (_in_three_shapes, ((2, 3, 4), (4, 5))),
    "padding on two axes": (lambda x: F.pad(x * 2, (1, 2, 0, 3), value=0.5) * 2, ((2, 3, 4),)),
    "padding on none": (lambda x: F.pad(x * 2, (0, 0)) + 1, ((2, 3, 4),)),
    "a block of padding that no constant holds": (lambda x: F.pad(x * 2, (0, 0, 70, 0)) * 2, ((3, 5, 64),)),
}


@pytest.mark.parametrize("name", COMBINED)
def test_what_reads_a_view_meets_what_torch_meets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "LEAST", 0.0)
    fn, shapes = COMBINED[name]
    example = function(fn, *shapes)
    captured = capture(example)

    assert all(step.delegated for step in steps_of(lowered(captured)))
    assert verify(example, to_executorch(captured).model, 1).worst < 1e-5


@st.composite
def _readings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What is stored, a view of it, and what meets that view: some of its axes, the others 1."""
    factors = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=4))
    stored, view = (_joined(factors, draw(st.sets(st.integers(1, len(factors) - 1)))) for _ in range(2))
    kept = draw(st.lists(st.booleans(), min_size=len(view), max_size=len(view)))
    other = tuple(size if keep else 1 for size, keep in zip(view, kept, strict=True))
    return stored, view, other[draw(st.integers(0, len(other) - 1)) :]


def _joined(factors: list[int], cuts: set[int]) -> tuple[int, ...]:
    edges = [0, *sorted(cuts), len(factors)]
    return tuple(math.prod(factors[first:last]) for first, last in pairwise(edges))


@settings(max_examples=40, deadline=None)
@given(_readings(), st.booleans())
def test_arithmetic_on_any_view_is_that_of_torch(
    reading: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], turned: bool
) -> None:
    stored, view, other = reading

    def fn(x: Tensor, y: Tensor) -> Tensor:
        value, small = (x * 2).view(view), y.view(-1).mul(3).view(other)
        return (small - value if turned else value * small).view(-1) + x.view(-1)

    example = function(fn, stored, (math.prod(other),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "LEAST", 0.0)
        assert verify(example, to_executorch(capture(example)).model, 1).worst < 1e-5


@pytest.mark.parametrize("count", [5, 6, 9, 25, 26, 31])
def test_any_number_of_parts_is_joined_in_order(count: int) -> None:
    example = function(lambda x: torch.cat([x * k for k in range(count)]) * 2, (2, 3))

    assert verify(example, to_executorch(capture(example)).model, 1).worst < 1e-6


def _nodes(
    fn: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    found: list[str] = []
    finish = Builder.finish

    def watched(self: Builder, *rest: object) -> object:
        found.extend(type(node.xnode_union).__name__ for node in self.nodes)
        return finish(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(partition, "LEAST", 0.0)
    monkeypatch.setattr(Builder, "finish", watched)
    to_executorch(capture(function(fn, *shapes)))
    return found


def test_products_and_arithmetic_of_views_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = (torch.mm((x * 2).view(-1, 4), w) + b).relu().view(2, 3, 5)
        return (y - y.sum(2, keepdim=True)).view(6, 5)

    found = _nodes(layer, ((2, 3, 4), (4, 5), (5,)), monkeypatch)

    assert xnn.XNNFullyConnected.__name__ in found
    assert found.count(xnn.XNNStaticReshape.__name__) == 1  # the output, which has the shape of its port
