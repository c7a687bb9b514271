"""Order of equal entries, medians, and logarithms of sums over many magnitudes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import load
from tests.exporters.engines import ENGINES, agree
from tests.exporters.examples import pointwise

EQUALS = torch.tensor([[1.0, 3, 3, 2, -4], [0, 0, 0, 0, 0], [5, 1, 5, 5, 1], [-1, -1, -2, -1, -2]])
WIDE = torch.tensor([[-60.0, 60, 0], [100, -100, 50], [-100, -99, -98], [1e-3, 2e-3, 3e-3], [88, 89, 90]])
SMALL = torch.tensor([-1e-3, -1e-7, 3e-8, 1e-5, 0.5, 60.0])

ORDERED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "places": lambda x, dim: x.argsort(dim),
    "places, descending": lambda x, dim: x.argsort(dim, descending=True),
    "places, stable": lambda x, dim: torch.argsort(x, dim=dim, stable=True),
    "places, stable and descending": lambda x, dim: torch.sort(x, dim=dim, stable=True, descending=True)[1],
    "median": lambda x, dim: x.median(dim)[0],
    "median, axis kept": lambda x, dim: x.median(dim, keepdim=True)[0],
    "second smallest": lambda x, dim: x.kthvalue(2, dim)[0],
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ORDERED)
def test_entries_in_order_as_in_torch(name: str, engine: str) -> None:
    order = ORDERED[name]
    for dim in (0, 1):
        for dtype in (torch.float32, torch.int64):
            agree(engine, lambda x, dim=dim: order(x, dim), EQUALS.to(dtype))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_reach_the_entries_that_torch_chose(engine: str) -> None:
    agree(engine, lambda x: x.sort(1)[0], EQUALS, gradients=True)
    agree(engine, lambda x: x.median(), EQUALS, gradients=True)
    agree(engine, lambda x: x.median(1)[0], WIDE, gradients=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dim", (0, 1, -1))
def test_running_log_sums_at_any_spread(dim: int, engine: str) -> None:
    agree(engine, lambda x: x.logcumsumexp(dim), WIDE, gradients=True)
    masked = torch.where(WIDE < 0, -torch.inf, WIDE)
    agree(engine, lambda x: x.logcumsumexp(dim), masked)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("function", (torch.log1p, torch.expm1), ids=("log1p", "expm1"))
def test_small_numbers_keep_their_digits(function: Callable[[Tensor], Tensor], engine: str) -> None:
    agree(engine, lambda x: function(x) / x, SMALL)
    agree(engine, function, torch.tensor([0.0, -0.9, 10.0]), gradients=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16])
def test_booleans_and_narrow_integers_in_order(dtype: torch.dtype, engine: str) -> None:
    agree(engine, lambda x: (x > 0).to(dtype).argsort(1, descending=True), EQUALS)
    agree(engine, lambda x: torch.sort((x > 0).to(dtype), dim=0)[0].float(), EQUALS)


TAILS = torch.tensor([-30.0, -5, -1, -1e-4, 0, 1e-6, 0.3, 1, 2.5, 4, 6, 9, 40])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_tail_of_the_normal_distribution(engine: str) -> None:
    agree(engine, torch.erfc, TAILS, gradients=True)
    agree(engine, lambda x: torch.special.erfc(x).clamp_min(1e-37).log(), TAILS[:-2], gradients=True)


PLACES = torch.tensor([[0, 3, 1, 3], [2, 2, 0, 3]])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduce", ["amax", "amin", "sum", "mean"])
def test_entries_reduced_by_place(reduce: str, engine: str) -> None:
    for include_self in (True, False):

        def reduced(x: Tensor, source: Tensor, keep: bool = include_self) -> Tensor:
            rows = x.scatter_reduce(1, PLACES, source, reduce, include_self=keep)
            return rows + x.t().scatter_reduce(0, PLACES.t(), source.t(), reduce, include_self=keep).t()

        agree(engine, reduced, EQUALS * 1.3, EQUALS[:2, 1:].flip(1) + 0.1, gradients=True)
        agree(engine, reduced, EQUALS * 1.3, EQUALS[1:].flip(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_entries_added_and_written_by_place(engine: str) -> None:
    agree(engine, lambda x, y: x.scatter_add(1, PLACES, y), EQUALS, EQUALS)
    agree(engine, lambda x, y: x.scatter(0, PLACES[:, :1], y), EQUALS, EQUALS.flip(0))


# -- operands of two types ---------------------------------------------------------------------------------


WHOLE = torch.tensor([-3, -2, -1, 0, 1, 2, 3, 7])

MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "number - x": lambda x: 1.5 - x,
    "1 - x": lambda x: 1 - x,
    "number - 2 x": lambda x: torch.rsub(x, 1.5, alpha=2),
    "sub": lambda x: torch.sub(1.5, x, alpha=2),
    "x - number": lambda x: x - 0.5,
    "x + 2 number": lambda x: torch.add(x, 0.5, alpha=2),
    "number * x": lambda x: 2.5 * x,
    "number / x": lambda x: 1.0 / (x + 0.25),
    "number ** x": lambda x: 0.5**x,
    "mask": lambda x: (1.0 - (x > 0).long()) * -1e4,
    "x log(number)": lambda x: torch.xlogy(x, 2.5),
    "number log(x)": lambda x: torch.xlogy(0.5, x.abs() + 1),
}
SELECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(x > 0, x > 2, x < -1),
    "broadcast": lambda x: torch.where((x > 0)[:, None], x > 2, x[:1] < -1),
    "masked_fill with true": lambda x: (x > 2).masked_fill(x < 0, True),
    "masked_fill with false": lambda x: (x > -2).masked_fill(x > 1, False),
    "where with a number": lambda x: torch.where(x > 0, x > 2, True),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_a_number_and_a_tensor_of_another_type(name: str, engine: str, dtype: torch.dtype) -> None:
    agree(engine, MIXED[name], WHOLE.to(dtype))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SELECTED)
def test_selections_between_booleans(name: str, engine: str) -> None:
    agree(engine, SELECTED[name], WHOLE)


# -- remainders, quotients and shifts of negative and of large numbers -------------------------------------


DIVISION_WHOLE = torch.tensor([-1000, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 999, 1000])
DIVISORS = torch.tensor([3, -3, 2, -2, 5, -5, 4, -4, 3, -3, 2, -2, 7, -7, 1, -7, -7, 7])
LARGE = torch.tensor([2**40 + 1, -(2**40) - 1, 2**60 + 7, -(2**60) - 7, 2**53 + 1, -(2**53) - 1])

TWO: dict[str, Callable[..., Tensor]] = {
    "remainder": torch.remainder,
    "operator %": lambda x, y: x % y,
    "fmod": torch.fmod,
    "floor_divide": torch.floor_divide,
    "operator //": lambda x, y: x // y,
    "rounded down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "rounded to zero": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
SHIFTS: dict[str, Callable[..., Tensor]] = {
    "left": lambda x, bits: x << bits,
    "right": lambda x, bits: x >> bits,
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TWO)
def test_whole_numbers_have_torchs_sign_and_all_digits(name: str, engine: str) -> None:
    divide = TWO[name]
    for dtype in (torch.int64, torch.int32):
        agree(engine, divide, DIVISION_WHOLE.to(dtype), DIVISORS.to(dtype))
        agree(engine, lambda x: torch.stack([divide(x, 3), divide(x, -4)]), DIVISION_WHOLE.to(dtype))
    agree(engine, lambda x: torch.stack([divide(x, 7), divide(x, -1000)]), LARGE)


@pytest.mark.sample(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TWO)
def test_floats_are_divided_as_in_torch(name: str, engine: str) -> None:
    divide = TWO[name]
    halves = DIVISION_WHOLE / 2
    agree(engine, divide, halves, DIVISORS.float())
    agree(engine, lambda x: torch.stack([divide(x, 0.7), divide(x, -3)]), halves)
    agree(engine, divide, DIVISION_WHOLE, DIVISORS / 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_remainder_of_a_number_by_a_tensor(engine: str) -> None:
    agree(engine, lambda y: torch.stack([17 % y, -17 % y, 17 // y, -17 // y]), DIVISORS)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_remainder_of_floats_made_whole(engine: str) -> None:
    agree(engine, lambda x: (x * 3).long() % 3, DIVISION_WHOLE / 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_keep_the_sign(name: str, engine: str) -> None:
    shift = SHIFTS[name]
    agree(engine, lambda x: torch.stack([shift(x, 1), shift(x, 3)]), DIVISION_WHOLE)
    agree(engine, lambda x, y: shift(x, y.abs()), DIVISION_WHOLE, DIVISORS)
    agree(engine, lambda x: shift(x // 8, 2), LARGE)


# -- softmax of rows that may be masked --------------------------------------------------------------------


SEEN = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
"""The last row may look at nothing."""


def attended(t: Tensors) -> Tensors:
    """Attention under a mask, and the gradient of its sum."""
    q = t["batch.q"].detach().requires_grad_()
    out = F.scaled_dot_product_attention(q, t["batch.k"], t["batch.k"], attn_mask=SEEN)
    (grad,) = torch.autograd.grad((out * out).sum(), q)
    return {"metric.out": out.detach(), "metric.grad": grad}


def test_a_row_without_anything_to_look_at_is_zero() -> None:
    function = pointwise(attended, batch__q=(2, 3, 4), batch__k=(2, 3, 4))
    model, example = to_onnx(capture(function)), function.example(1)

    found = load(function, model, ())({name: value.numpy() for name, value in example.items()})

    expected = function(example)
    assert not expected["metric.out"][:, -1].any() and not expected["metric.grad"].isnan().any()
    for mine, value in zip(found, expected.values(), strict=True):
        np.testing.assert_allclose(mine, value.numpy(), rtol=1e-5, atol=1e-6)
