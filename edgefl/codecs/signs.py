"""One bit per entry, binarized after training: the sign family (fedbat.md, section 3). Code 1 is +, code 0 is -.

All norms are of one tensor (fedbat.md 8.8). ``sign0`` says what an entry that did not change becomes, since one bit has no
zero (fedbat.md 8.7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from edgefl.codecs.coder import Change, Coded
from edgefl.wire.update.form import SIGNS, Codes

Sign0 = Literal["random", "plus"]


@dataclass(frozen=True)
class FixedSign:
    """SignSGD: ``alpha * sign(m)``, the same ``alpha`` for all, so that nothing but the bits is sent."""

    alpha: float = 0.001
    sign0: Sign0 = "random"

    @property
    def encoding(self) -> Codes:
        return Codes(1, SIGNS, self.alpha)

    @property
    def random(self) -> bool:
        return self.sign0 == "random"

    def code(self, change: Change) -> Coded:
        return _coded(signs(change, self.sign0))


@dataclass(frozen=True)
class ScaledSign:
    """``mean|m| * sign(m)``: EF-SignSGD's compressor, which with feedback is given the change and the residual."""

    sign0: Sign0 = "random"
    encoding = Codes(1, SIGNS)

    @property
    def random(self) -> bool:
        return self.sign0 == "random"

    def code(self, change: Change) -> Coded:
        return _coded(signs(change, self.sign0), change.mean_size())


@dataclass(frozen=True)
class NoisySign:
    """Noisy-SignSGD: ``alpha * sign(m + xi)``, xi normal of deviation ``sigma``.

    It is + with probability Phi(m / sigma), which one uniform number decides.
    """

    alpha: float = 0.01
    sigma: float = 0.01
    random = True

    @property
    def encoding(self) -> Codes:
        return Codes(1, SIGNS, self.alpha)

    def code(self, change: Change) -> Coded:
        chance = 0.5 * (1 + torch.erf(change.value / (self.sigma * math.sqrt(2))))
        return _coded(_happens(change.draws(), chance))


@dataclass(frozen=True)
class StochasticSign:
    """Stoc-SignSGD: ``alpha * sign(m + xi)``, xi uniform in +-norm_inf(m): + with probability 1/2 + m / (2 norm_inf)."""

    alpha: float = 0.01
    random = True

    @property
    def encoding(self) -> Codes:
        return Codes(1, SIGNS, self.alpha)

    def code(self, change: Change) -> Coded:
        largest = change.spread(above_zero(change.largest()))
        return _coded(_happens(change.draws(), 0.5 + change.value / (2 * largest)))


@dataclass(frozen=True)
class MeanSign:
    """BiFL's upload: sign(W) and mean|W| of the weights themselves; sign(0) is +, as in its forward pass."""

    encoding = Codes(1, SIGNS)
    random = False

    def code(self, change: Change) -> Coded:
        return _coded((change.value >= 0).to(torch.float32), change.mean_size())


def signs(change: Change, sign0: Sign0) -> Tensor:
    """1 where the value is positive, 0 where it is negative; at 0 by chance, or 1."""
    value = change.value
    positive = value > 0 if sign0 == "random" else value >= 0
    if sign0 == "random":
        positive = positive | ((value == 0) & (change.draws() < 0.5))
    return positive.to(torch.float32)


def above_zero(scale: Tensor) -> Tensor:
    """``scale``, or 1 where it is 0 and there is nothing to divide."""
    return torch.where(scale > 0, scale, torch.ones(()))


def _coded(codes: Tensor, scale: Tensor | None = None) -> Coded:
    return Coded(codes, 2 * codes - 1, scale)


def _happens(uniform: Tensor, chance: Tensor) -> Tensor:
    return (uniform < chance).to(torch.float32)
