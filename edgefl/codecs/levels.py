"""A few bits per entry: FedPAQ's stochastic levels, and the nearest ones (int8, and moving statistics)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.codecs.coder import Change, Coded
from edgefl.codecs.signs import above_zero
from edgefl.errors import ConfigError
from edgefl.wire.update.form import Codes


def even_levels(bits: int) -> Codes:
    """2 q + 1 even levels from -1 to 1, q = 2**(bits - 1) - 1: code c is (c - q) / q. The last code is unused, and 1."""
    if not 2 <= bits <= 8:
        raise ConfigError(
            f"levels take 2 to 8 bits, found {bits}; for one bit choose a sign codec", bits=bits
        )
    q = 2 ** (bits - 1) - 1
    return Codes(bits, (*((code - q) / q for code in range(2 * q + 1)), 1.0))


@dataclass(frozen=True)
class StochasticLevels:
    """FedPAQ: ``A * sign(m) * (floor(y) + Bernoulli(y - floor(y))) / q`` with y = |m| / A * q and A = norm_inf(m).

    Unbiased, with a variance of at most A^2 / (4 q^2) per entry.
    """

    bits: int = 4
    random = True

    @property
    def encoding(self) -> Codes:
        return even_levels(self.bits)

    def code(self, change: Change) -> Coded:
        q, largest = _steps(self.bits), change.largest()
        y = change.value.abs() / change.spread(above_zero(largest)) * q
        low = torch.floor(y)
        level = low + (change.draws() < y - low).to(torch.float32)
        return _coded(torch.where(change.value < 0, -level, level), q, largest)


@dataclass(frozen=True)
class NearestLevels:
    """The level next to m / norm_inf(m). ``same_sign``: never one that leads to the other side of zero than the change.

    A moving variance is above zero and must stay so: where base plus the nearest level would have another sign than base
    plus the change, the next level towards the change is taken.
    """

    bits: int = 8
    same_sign: bool = False
    random = False

    @property
    def encoding(self) -> Codes:
        return even_levels(self.bits)

    def code(self, change: Change) -> Coded:
        q, largest = _steps(self.bits), change.largest()
        level = torch.round(change.value / change.spread(above_zero(largest)) * q)
        if self.same_sign:
            goal = change.base + change.value
            outcome = change.base + level * change.spread(largest / q)
            level = torch.where((goal >= 0) & (outcome < 0), level + 1, level)
            level = torch.where((goal <= 0) & (outcome > 0), level - 1, level)
        return _coded(level.clamp(-q, q), q, largest)


def _coded(level: Tensor, q: float, largest: Tensor) -> Coded:
    return Coded(q + level, level / q, largest)


def _steps(bits: int) -> float:
    return float(2 ** (bits - 1) - 1)
