"""Views are not run on XNNPACK until something needs their shape: whatever reads one must still meet what torch meets."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_device.engine import open_engine
from edgefl_export.capture.trace import capture
from edgefl_export.executorch.check.programs import load, verify
from edgefl_export.executorch.graph import to_kernel_ops
from edgefl_export.executorch.program import partition
from edgefl_export.executorch.program.partition import steps_of
from edgefl_export.executorch.program.write import to_executorch
from edgefl_export.executorch.target import ExecuTorchTarget
from edgefl_export.executorch.xnnpack.builder import Builder
from tests.exporters.executorch.test_ops import Case, function
from tests.parity.forms import made


def _two_views(x: Tensor) -> Tensor:
    y = x * 2
    return y.view(8, 4) * y.view(2, 4, 4).view(8, 4) + y.view(8, 4)


def _of_a_layer(x: Tensor, y: Tensor) -> Tensor:
    grad = (x * 2).view(512, 4)
    return torch.mm(grad.t(), y) + grad.sum(0).view(-1, 1)


def _in_three_shapes(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return y.view(2, 3, 5).sum(0) + y.view(6, 5)[:3] + y.view(3, 2, 5)[:, 0]


def _of_layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda w: (F.layer_norm(x, (6,), w) * x).sum())(w)


def _two_zeros(x: Tensor) -> Tensor:
    up, down = (1 / (x.abs() * zero) for zero in (0.0, -0.0))
    return up.clamp(-1, 1) + down.clamp(-1, 1) * 0.5


COMBINED: dict[str, Case] = {
    "two zeros that are not one": (_two_zeros, ((6,),)),
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


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", COMBINED)
def test_what_reads_a_view_meets_what_torch_meets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "LEAST", 0.0)
    fn, shapes = COMBINED[name]
    example = function(fn, *shapes)
    lowered = ExecuTorchTarget().capture(example)

    assert all(step.delegated for step in steps_of(to_kernel_ops(lowered)))
    assert verify(example, to_executorch(lowered).model, 1).worst < 1e-5


GRADIENTS: dict[str, Case] = {
    "a norm of a single row": (_of_layer_norm, ((6,), (6,))),
    "GELU far out": (lambda x: torch.func.grad(lambda x: F.gelu(x).sum())(x * 1e20), ((4, 6),)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_at_the_edges_are_those_of_torch(name: str) -> None:
    fn, shapes = GRADIENTS[name]
    example = function(fn, *shapes)

    assert verify(example, to_executorch(ExecuTorchTarget().capture(example)).model, 1).worst < 1e-5


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


NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum of one": lambda s: s.sum(0),
    "a mean of one": lambda s: s.mean(0),
    "no padding": lambda s: F.pad(s, (0, 0)).view(4),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_computes_nothing_is_read_before_the_state_is_rewritten(name: str) -> None:
    def step(t: Tensors) -> Tensors:
        old = NOTHING[name](t["state.s"])
        new = t["state.s"] * 0.5
        return {"metric.y": (old * old * new.view(4)).sum(), "state.s": new}

    engine, exported = (
        open_engine("executorch"),
        made("executorch", Function("step", step, {"state.s": TensorSpec((1, 4))})),
    )
    state = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)

    ran = engine.load(exported.graph, exported.model).run({}, engine.write_state({"state.s": state}))

    assert ran.arrays["metric.y"] == pytest.approx(0.5 * (state**3).sum())


@pytest.mark.parametrize("count", [768, 1000, 1024])
def test_many_terms_of_a_row_are_added_by_partial_sums(count: int) -> None:
    """One after another they would be off by the last three digits of a row that lies far from zero."""
    x = 1000 + torch.randn(64, count, generator=torch.Generator().manual_seed(0))
    example = function(lambda x: (x * 1.0).sum(1), (64, count))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "LEAST", 0.0)
        found = load(example, to_executorch(capture(example)).model)({"batch.0.0": x.numpy()})[0]

    exact = x.double().sum(1)
    assert ((torch.from_numpy(found) - exact) / exact).abs().max() < 5e-7


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
