"""Order of equal entries, medians, and logarithms of sums over many magnitudes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.exporters.engines import ENGINES, agree

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
