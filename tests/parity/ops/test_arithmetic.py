"""Functions of numbers, one by one, and reductions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.ops.case import Case, Family, Mask, agrees, every

ROWS = (4, 6)
BLOCK = (3, 4, 5)


def positive(x: Tensor) -> Tensor:
    return x * x + 0.5


def scattered(x: Tensor, y: Tensor, include_self: bool) -> Tensor:
    """Means with three places that several entries meet, and some that none does."""
    index = torch.tensor([[0, 1, 0, 2, 2], [0, 1, 2, 2, 2]])
    return x.scatter_reduce(0, index, y, "mean", include_self=include_self)


CASES: Family = {
    "add, sub, mul, div": {
        "sub": Case(lambda x, y: torch.sub(x, y, alpha=2), ROWS, (6,)),
        "reversed sub": Case(lambda x: 1 - x, ROWS),
        "mul": Case(lambda x, y: x * y, ROWS, (4, 1)),
        "div": Case(lambda x, y: x / positive(y), ROWS, ROWS),
        "reciprocal": Case(lambda x: 1 / positive(x), ROWS),
        "addcmul": Case(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), ROWS, ROWS, ROWS),
        "addcdiv": Case(lambda x, y, z: torch.addcdiv(x, y, positive(z), value=0.5), ROWS, ROWS, ROWS),
        "lerp": Case(lambda x, y: torch.lerp(x, y, 0.3), ROWS, ROWS),
        "remainder": Case(lambda x: torch.remainder(x, 0.7), ROWS),
        "floor division": Case(lambda x: x * torch.floor(x), ROWS),
    },
    "exp, log": {
        "exp": Case(torch.exp, ROWS),
        "expm1": Case(torch.expm1, ROWS),
        "log": Case(lambda x: torch.log(positive(x)), ROWS),
        "log1p": Case(lambda x: torch.log1p(x * x), ROWS),
        "log2": Case(lambda x: torch.log2(positive(x)), ROWS),
        "logaddexp": Case(torch.logaddexp, ROWS, ROWS),
    },
    "sqrt, pow": {
        "sqrt": Case(lambda x: torch.sqrt(positive(x)), ROWS),
        "rsqrt": Case(lambda x: torch.rsqrt(positive(x)), ROWS),
        "square": Case(torch.square, ROWS),
        "integer power": Case(lambda x: x**3, ROWS),
        "fractional power": Case(lambda x: positive(x) ** 1.5, ROWS),
        "power of a tensor": Case(lambda x, y: positive(x) ** y, ROWS, ROWS),
        "number to a tensor": Case(lambda x: 2.0**x, ROWS),
    },
    "sin, cos, erf": {
        "sin": Case(torch.sin, ROWS),
        "cos": Case(torch.cos, ROWS),
        "tan": Case(lambda x: torch.tan(0.3 * x), ROWS),
        "atan": Case(torch.atan, ROWS),
        "erf": Case(torch.erf, ROWS),
        "sinh, cosh": Case(lambda x: torch.sinh(x) * torch.cosh(x), ROWS),
    },
    "abs, sign": {
        "abs": Case(torch.abs, ROWS),
        "sign": Case(lambda x: x * torch.sign(x), ROWS),
        "round": Case(lambda x: x * torch.round(x), ROWS),
        "floor, ceil": Case(lambda x: x * (torch.floor(x) + torch.ceil(x)), ROWS),
    },
    "clamp": {
        "both": Case(lambda x: x.clamp(-0.5, 0.8), ROWS),
        "below": Case(lambda x: x.clamp(min=0.1), ROWS),
        "above": Case(lambda x: x.clamp_max(0.1), ROWS),
        "by tensors": Case(lambda x, y: torch.clamp(x, min=y), ROWS, (6,)),
    },
    "maximum, minimum": {
        "maximum": Case(torch.maximum, ROWS, ROWS),
        "minimum": Case(torch.minimum, ROWS, (6,)),
    },
    "where": {
        "mask": Case(lambda x, y, m: torch.where(m, x, y), ROWS, ROWS, Mask(ROWS)),
        "comparison": Case(lambda x, y: torch.where(x > y, x, y * 2), ROWS, ROWS),
        "number": Case(lambda x: torch.where(x > 0.3, x, -1.0), ROWS),
    },
    "sum": {
        "all": Case(lambda x: x.sum(), BLOCK),
        "axis": Case(lambda x: x.sum(1), BLOCK),
        "axes, kept": Case(lambda x: x.sum((0, 2), keepdim=True), BLOCK),
    },
    "mean": {"all": Case(lambda x: x.mean(), BLOCK), "axes": Case(lambda x: x.mean((1, -1)), BLOCK)},
    "max, min": {
        "all": Case(lambda x: x.max(), BLOCK),
        "axis, with positions": Case(lambda x: x.max(1), BLOCK),
        "minimum, with positions": Case(lambda x: x.min(-1), BLOCK),
        "amax": Case(lambda x: x.amax((1, 2)), BLOCK),
        "amin": Case(lambda x: x.amin(1, keepdim=True), BLOCK),
        "amax with ties": Case(lambda x: x.relu().amax(1), BLOCK),
        "argmax": Case(lambda x: (x, x.argmax(1)), BLOCK),
    },
    "var, std": {
        "var": Case(lambda x: x.var(1), BLOCK),
        "var, biased": Case(lambda x: x.var((1, 2), unbiased=False, keepdim=True), BLOCK),
        "var_mean": Case(lambda x: torch.var_mean(x, 2), BLOCK),
        "std": Case(lambda x: x.std(1), BLOCK),
        "std of all": Case(lambda x: x.std(), BLOCK),
    },
    "norm": {
        "l2": Case(lambda x: torch.linalg.vector_norm(x, dim=1), BLOCK),
        "l1": Case(lambda x: torch.linalg.vector_norm(x, 1, dim=1), BLOCK),
        "of a matrix": Case(lambda x: x.norm(), ROWS),
    },
    "prod": {"axis": Case(lambda x: positive(x).prod(1), ROWS)},
    "largest, smallest of booleans": {
        "with positions": Case(lambda x: (x, *(x > 0).max(1), *(x > 0).min(1)), BLOCK),
        "amax, amin": Case(lambda x: (x, (x > 0).amax(1), (x > 0).amin((0, 2))), BLOCK),
    },
    "cumprod": {
        "last axis": Case(lambda x: x.cumprod(-1), ROWS),
        "with zeros": Case(lambda x: x.relu().cumprod(0), ROWS),
    },
    "scatter_reduce": {
        "mean": Case(lambda x, y: scattered(x, y, include_self=True), (3, 5), (2, 5)),
        "mean of what comes in": Case(lambda x, y: scattered(x, y, include_self=False), (3, 5), (2, 5)),
    },
    "cumsum": {
        "last axis": Case(lambda x: x.cumsum(-1), BLOCK),
        "first axis": Case(lambda x: x.cumsum(0), BLOCK),
    },
}


MORE = (
    "add, sub, mul, div, remainder",
    "maximum, minimum, minimum",
    "max, min, axis, with positions",
    "max, min, amax with ties",
    "max, min, argmax",
    "var, std, var_mean",
    "norm, l1",
    "cumprod, with zeros",
    "scatter_reduce, mean of what comes in",
    "sqrt, pow, number to a tensor",
    "cumsum, first axis",
    "clamp, by tensors",
    "largest, smallest of booleans, with positions",
)


@pytest.mark.sample(10)
@every(CASES, MORE)
def test_arithmetic_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
