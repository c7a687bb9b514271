"""Remainders, quotients and shifts of negative and of large numbers, as torch has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.exporters.engines import ENGINES, agree

WHOLE = torch.tensor([-1000, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 999, 1000])
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
        agree(engine, divide, WHOLE.to(dtype), DIVISORS.to(dtype))
        agree(engine, lambda x: torch.stack([divide(x, 3), divide(x, -4)]), WHOLE.to(dtype))
    agree(engine, lambda x: torch.stack([divide(x, 7), divide(x, -1000)]), LARGE)


@pytest.mark.sample(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TWO)
def test_floats_are_divided_as_in_torch(name: str, engine: str) -> None:
    divide = TWO[name]
    halves = WHOLE / 2
    agree(engine, divide, halves, DIVISORS.float())
    agree(engine, lambda x: torch.stack([divide(x, 0.7), divide(x, -3)]), halves)
    agree(engine, divide, WHOLE, DIVISORS / 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_remainder_of_a_number_by_a_tensor(engine: str) -> None:
    agree(engine, lambda y: torch.stack([17 % y, -17 % y, 17 // y, -17 // y]), DIVISORS)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_remainder_of_floats_made_whole(engine: str) -> None:
    agree(engine, lambda x: (x * 3).long() % 3, WHOLE / 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_keep_the_sign(name: str, engine: str) -> None:
    shift = SHIFTS[name]
    agree(engine, lambda x: torch.stack([shift(x, 1), shift(x, 3)]), WHOLE)
    agree(engine, lambda x, y: shift(x, y.abs()), WHOLE, DIVISORS)
    agree(engine, lambda x: shift(x // 8, 2), LARGE)
