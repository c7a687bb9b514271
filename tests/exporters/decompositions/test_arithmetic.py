"""Operands of two types, and selections between booleans, as torch has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.exporters.engines import ENGINES, agree

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


@pytest.mark.sample(24)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_a_number_and_a_tensor_of_another_type(name: str, engine: str, dtype: torch.dtype) -> None:
    agree(engine, MIXED[name], WHOLE.to(dtype))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SELECTED)
def test_selections_between_booleans(name: str, engine: str) -> None:
    agree(engine, SELECTED[name], WHOLE)
