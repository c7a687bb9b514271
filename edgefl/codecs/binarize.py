"""FedBAT's operator S, its derivatives, and its step sizes (fedbat.md 2.2 to 2.4), shared by training and upload.

A step size alpha > 0 belongs to a group of tensors. If all entries of a group are 0, alpha and S are 0 (fedbat.md 8.6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from edgefl.codecs.coders import replace_zero
from edgefl.codecs.packing import pack_codes

Granularity = Literal["tensor", "module", "global"]

EPS = 1e-8
"""Least alpha' (fedbat.md 8.6)."""
LIMIT = 20.0
"""Bound of |rho * alpha_e|, so that its exponential stays finite (fedbat.md 8.20)."""
_NEAR = 1e-4


def draw(m: Tensor, alpha: Tensor, zeta: Tensor) -> Tensor:
    """Return the random sign of FedBAT's binarization S(m, alpha) = alpha * sign: +1.0 or -1.0, m's shape and dtype (eq.
    6, 7).

    The sign is + if ``zeta < (alpha + m) / (2 alpha)``. Beyond +-alpha the threshold leaves [0, 1], so the sign is
    certain. At x = +-alpha every rounding gives +-1 (fedbat.md 2.2).

    Args:
        m: Change of the weights.
        alpha: Step size, () or m's shape, at least 0.
        zeta: Uniform numbers in [0, 1), m's shape.
    """
    chance = (alpha + m) / (2 * replace_zero(alpha))
    return torch.where(zeta < chance, 1.0, -1.0).to(m.dtype)


def is_inside(m: Tensor, alpha: Tensor) -> Tensor:
    """Return the derivative dS/dm of :func:`draw`'s S as bool, in m's shape: True if |m| <= alpha, False if m is clipped
    (eq. 8).
    """
    return m.abs() <= alpha


def slope(m: Tensor, alpha: Tensor, sign: Tensor) -> Tensor:
    """Return the derivative dS/dalpha of :func:`draw`'s S, straight-through, in m's shape.

    It is ``sign - m / alpha`` if |m| <= alpha, and sign(m) if m is clipped (eq. 9).

    Args:
        m: Change of the weights.
        alpha: Step size, () or m's shape.
        sign: Result of :func:`draw` in the forward pass. For a clipped entry it is sign(m).
    """
    return torch.where(is_inside(m, alpha), sign - m / replace_zero(alpha), sign)


@dataclass(frozen=True)
class StepSizeGroups:
    """Assignment of tensors to groups that share a step size. ``numbers`` has the group, 0 .. count - 1, of each tensor
    by name.
    """

    numbers: Mapping[str, int]

    @classmethod
    def of(cls, names: Sequence[str], granularity: Granularity) -> StepSizeGroups:
        """Return groups of the tensors ``names``: one per tensor, one per module (the name before the last dot), or one
        for all.
        """
        places: dict[Granularity, Callable[[str], str]] = {
            "tensor": lambda name: name,
            "module": _module,
            "global": lambda _name: "",
        }
        place = places[granularity]
        numbers = {each: number for number, each in enumerate(dict.fromkeys(map(place, names)))}
        return cls({name: numbers[place(name)] for name in names})

    @property
    def count(self) -> int:
        return len(set(self.numbers.values()))

    def sums(self, each: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of each group's scalars, [count]. ``each`` has one scalar per tensor, by name."""
        return torch.stack([reduce(torch.add, members) for members in self._members(each)])

    def largest(self, each: Mapping[str, Tensor]) -> Tensor:
        """Return the largest of each group's scalars, [count]. ``each`` has one scalar per tensor, by name."""
        return torch.stack([reduce(torch.maximum, members) for members in self._members(each)])

    def spread(self, values: Tensor) -> dict[str, Tensor]:
        """Return the scalar of each tensor's group, by tensor name. ``values`` is [count]."""
        parts = values.unbind()
        return {name: parts[number] for name, number in self.numbers.items()}

    def _members(self, each: Mapping[str, Tensor]) -> list[list[Tensor]]:
        return [[each[n] for n, number in self.numbers.items() if number == g] for g in range(self.count)]


@dataclass(frozen=True)
class StepSize:
    """Learned step size alpha = alpha' * exp(rho * alpha_e) of each group (eq. 10, 13). Training moves alpha_e.

    All tensors of the methods are [groups]. Bounds are an addition to the paper. They prevent the runaway that
    :meth:`growth` detects.

    Attributes:
        rho: Factor of the exponent, a number or ().
        bounds: Smallest and largest alpha, or None.
    """

    rho: float | Tensor
    bounds: tuple[float, float] | None = None

    def of(self, scale: Tensor, log_scale: Tensor) -> Tensor:
        """Return the step size alpha of each group, [groups], clamped to ``bounds`` if they are set.

        Args:
            scale: alpha', [groups], replaced by ``EPS`` if it is smaller.
            log_scale: alpha_e, [groups].
        """
        alpha = scale.clamp(min=EPS) * torch.exp((self.rho * log_scale).clamp(-LIMIT, LIMIT))
        return alpha if self.bounds is None else alpha.clamp(*self.bounds)

    def descend(
        self, scale: Tensor, log_scale: Tensor, alpha: Tensor, pull: Tensor, lr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (alpha_e after a step [groups], number () of groups whose exponent is then at a limit).

        alpha_e <- alpha_e - lr * rho * alpha * pull (eq. 9), clamped at the limit, so that later steps can move it
        back at once. Groups without any change, whose alpha is 0, do not count.

        Args:
            scale: alpha', [groups].
            log_scale: alpha_e, [groups].
            alpha: Step sizes, [groups].
            pull: dF/dalpha = sum g * dS/dalpha, [groups].
            lr: Learning rate, ().
        """
        moved = log_scale - lr * (self.rho * alpha * pull)
        wanted = self.rho * moved
        least, most = torch.full((), -LIMIT), torch.full((), LIMIT)
        if self.bounds is not None:
            least, most = (
                torch.log(bound / scale.clamp(min=EPS)).clamp(-LIMIT, LIMIT) for bound in self.bounds
            )
        allowed = torch.maximum(torch.minimum(wanted, most), least)
        # To the last bits: alpha_e is what the limit is divided by rho.
        at = (allowed >= most - _NEAR) | (allowed <= least + _NEAR)
        rho = torch.as_tensor(self.rho, dtype=scale.dtype)
        moved = torch.where((wanted != allowed) & (rho > 0), allowed / replace_zero(rho), moved)
        return moved, (at & (alpha > 0)).to(scale.dtype).sum()

    def growth(self, scale: Tensor, alpha: Tensor) -> Tensor:
        """Return the largest factor between a group's alpha and its initial value, exp(max |log(alpha / initial)|), ().

        1 means that no step size has moved. Shrinking counts like growing, because a runaway step size overshoots to
        either limit. Groups without any change, whose alpha is 0, do not count.

        Args:
            scale: alpha', [groups].
            alpha: Step sizes, [groups].
        """
        ratio = alpha / self.of(scale, torch.zeros_like(scale))
        return torch.where(alpha > 0, torch.maximum(ratio, 1 / replace_zero(ratio)), torch.ones(())).max()


def pack_signs(signs: Sequence[Tensor]) -> Tensor:
    """Return packed signs, uint8: bit 1 for +1.0, bit 0 for -1.0 and 0.0. Each tensor starts at a new byte."""
    return pack_codes([sign_codes(sign) for sign in signs], 1)


def sign_codes(sign: Tensor) -> Tensor:
    """Return 1.0 where ``sign`` is positive, else 0.0, in its shape as float32: the code of a sign."""
    return (sign > 0).to(torch.float32)


def unpack_signs(packed: Tensor, start: int, entries: int) -> Tensor:
    """Return the bits of one tensor in a result of :func:`pack_signs`, float32 [entries].

    Args:
        packed: Packed signs, uint8.
        start: Byte at which the tensor starts.
        entries: Number of entries of the tensor.
    """
    powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    rows = packed[start : start + -(-entries // 8), None] & powers
    return (rows != 0).reshape(-1)[:entries].to(torch.float32)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
