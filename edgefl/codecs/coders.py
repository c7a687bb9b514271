"""Coders of single entries: signs (one bit) and even levels (a few bits), applied after training (fedbat.md, section 3).

Below, m is the change of a tensor. Sign codes are 1 for + and 0 for -. All norms are of one tensor (fedbat.md 8.8).
``sign0`` decides the sign of an unchanged entry, since one bit cannot represent 0 (fedbat.md 8.7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from edgefl.codecs.codec import Change, CodedChange
from edgefl.errors import ConfigError
from edgefl.wire.update.form import SIGNS, CodeEncoding

Sign0 = Literal["random", "plus"]


@dataclass(frozen=True)
class FixedSign:
    """Coder of SignSGD: ``alpha * sign(m)`` for a change m of the weights.

    All tensors have the same ``alpha``, so only the bits are sent. ``sign0``: code of a zero.
    """

    alpha: float = 0.001
    sign0: Sign0 = "random"

    @property
    def encoding(self) -> CodeEncoding:
        return CodeEncoding(1, SIGNS, self.alpha)

    @property
    def random(self) -> bool:
        return self.sign0 == "random"

    def code(self, change: Change) -> CodedChange:
        return _from_signs(code_signs(change, self.sign0))


@dataclass(frozen=True)
class ScaledSignCoder:
    """Coder of EF-SignSGD: ``mean|m| * sign(m)`` for a change m of the weights.

    With feedback, m includes the residual of earlier rounds.

    ``sign0``: code of a zero.
    """

    sign0: Sign0 = "random"
    encoding = CodeEncoding(1, SIGNS)

    @property
    def random(self) -> bool:
        return self.sign0 == "random"

    def code(self, change: Change) -> CodedChange:
        return _from_signs(code_signs(change, self.sign0), change.mean_size())


@dataclass(frozen=True)
class NoisySign:
    """Coder of Noisy-SignSGD: ``alpha * sign(m + xi)`` for a change m, with xi normal of standard deviation ``sigma``.

    The sign is + with probability Phi(m / sigma), so one uniform number decides it.
    """

    alpha: float = 0.01
    sigma: float = 0.01
    random = True

    @property
    def encoding(self) -> CodeEncoding:
        return CodeEncoding(1, SIGNS, self.alpha)

    def code(self, change: Change) -> CodedChange:
        chance = 0.5 * (1 + torch.erf(change.value / (self.sigma * math.sqrt(2))))
        return _from_signs(_draw_codes(change.draws(), chance))


@dataclass(frozen=True)
class StochasticSign:
    """Coder of Stoc-SignSGD: ``alpha * sign(m + xi)`` for a change m, with xi uniform in +-norm_inf(m).

    The sign is + with probability 1/2 + m / (2 norm_inf(m)).
    """

    alpha: float = 0.01
    random = True

    @property
    def encoding(self) -> CodeEncoding:
        return CodeEncoding(1, SIGNS, self.alpha)

    def code(self, change: Change) -> CodedChange:
        largest = change.spread(replace_zero(change.largest()))
        return _from_signs(_draw_codes(change.draws(), 0.5 + change.value / (2 * largest)))


@dataclass(frozen=True)
class MeanSign:
    """Coder of BiFL: sign(W) and mean|W| of the weights themselves, not of a change. sign(0) is +, as in BiFL's forward
    pass.
    """

    encoding = CodeEncoding(1, SIGNS)
    random = False

    def code(self, change: Change) -> CodedChange:
        return _from_signs((change.value >= 0).to(torch.float32), change.mean_size())


def code_signs(change: Change, sign0: Sign0) -> Tensor:
    """Return 1 for positive entries and 0 for negative ones, float32. A zero becomes 1, or either number at random.

    Args:
        change: Change, with uniform numbers if ``sign0`` is "random".
        sign0: Code of a zero: "plus" or "random".
    """
    value = change.value
    positive = value > 0 if sign0 == "random" else value >= 0
    if sign0 == "random":
        positive = positive | ((value == 0) & (change.draws() < 0.5))
    return positive.to(torch.float32)


def replace_zero(scale: Tensor) -> Tensor:
    """Return ``scale`` with 0 replaced by 1, for a safe division."""
    return torch.where(scale > 0, scale, torch.ones(()))


def _from_signs(codes: Tensor, scale: Tensor | None = None) -> CodedChange:
    return CodedChange(codes, 2 * codes - 1, scale)


def _draw_codes(uniform: Tensor, chance: Tensor) -> Tensor:
    """Return 1 where ``uniform`` is below ``chance``, else 0, float32."""
    return (uniform < chance).to(torch.float32)


def even_levels(bits: int) -> CodeEncoding:
    """Return the encoding with 2 q + 1 even levels from -1 to 1, q = 2**(bits - 1) - 1: code c denotes (c - q) / q.

    The last of the 2**bits codes is unused; it denotes 1.

    Raises:
        ConfigError: ``bits`` is outside 2 .. 8.
    """
    if not 2 <= bits <= 8:
        raise ConfigError(
            f"levels take 2 to 8 bits, found {bits}; for one bit choose a sign codec", bits=bits
        )
    q = 2 ** (bits - 1) - 1
    return CodeEncoding(bits, (*((code - q) / q for code in range(2 * q + 1)), 1.0))


@dataclass(frozen=True)
class StochasticLevels:
    """Coder of FedPAQ, which rounds a change m at random to one of q levels per sign.

    The result is ``A * sign(m) * (floor(y) + Bernoulli(y - floor(y))) / q`` with y = |m| / A * q and A = norm_inf(m).
    It is unbiased, with a variance of at most A^2 / (4 q^2) per entry.
    """

    bits: int = 4
    random = True

    @property
    def encoding(self) -> CodeEncoding:
        return even_levels(self.bits)

    def code(self, change: Change) -> CodedChange:
        q, largest = _steps(self.bits), change.largest()
        y = change.value.abs() / change.spread(replace_zero(largest)) * q
        low = torch.floor(y)
        level = low + (change.draws() < y - low).to(torch.float32)
        return _from_levels(torch.where(change.value < 0, -level, level), q, largest)


@dataclass(frozen=True)
class NearestLevels:
    """Coder that rounds m / norm_inf(m), for a change m, to the nearest of even levels.

    ``same_sign``: base plus the decoded change never has the opposite sign of base plus the change. A moving variance
    must stay above zero, so the next level towards the change is used instead.
    """

    bits: int = 8
    same_sign: bool = False
    random = False

    @property
    def encoding(self) -> CodeEncoding:
        return even_levels(self.bits)

    def code(self, change: Change) -> CodedChange:
        q, largest = _steps(self.bits), change.largest()
        level = torch.round(change.value / change.spread(replace_zero(largest)) * q)
        if self.same_sign:
            goal = change.base + change.value
            outcome = change.base + level * change.spread(largest / q)
            level = torch.where((goal >= 0) & (outcome < 0), level + 1, level)
            level = torch.where((goal <= 0) & (outcome > 0), level - 1, level)
        return _from_levels(level.clamp(-q, q), q, largest)


def _from_levels(level: Tensor, q: float, largest: Tensor) -> CodedChange:
    return CodedChange(q + level, level / q, largest)


def _steps(bits: int) -> float:
    return float(2 ** (bits - 1) - 1)
