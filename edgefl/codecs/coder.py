"""How one tensor's change becomes codes: the interface of what :mod:`edgefl.codecs.apply` puts into ``finish``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from edgefl.codecs.form import Encoding


@dataclass(frozen=True)
class Change:
    """What training did to one tensor, or, for codecs of weights, what it left.

    ``value`` float32 of the tensor's shape, 0 outside of ``held`` (bool, None: all is held). ``uniform`` in [0, 1) of
    the same shape for coders that draw. ``base`` is what the round began with.
    """

    value: Tensor
    base: Tensor
    held: Tensor | None = None
    uniform: Tensor | None = None

    @property
    def entries(self) -> Tensor:
        """How many are held, float32 ()."""
        if self.held is None:
            return torch.full((), float(self.value.numel()))
        return self.held.sum().to(torch.float32)

    def mean_size(self) -> Tensor:
        """norm_1 / d over the held entries, ()."""
        return self.value.abs().sum() / self.entries.clamp(min=1.0)

    def largest(self) -> Tensor:
        """norm_inf, (). Not finite if any entry is not, which the server must see: some engines' maximum passes over NaN."""
        return self.value.abs().max() + 0.0 * self.value.sum()

    def draws(self) -> Tensor:
        assert self.uniform is not None, "a coder that draws is given uniform numbers"
        return self.uniform


@dataclass(frozen=True)
class Coded:
    """Whole numbers of the tensor's shape, as float32, and the scale () that travels with them; None if none does."""

    codes: Tensor
    scale: Tensor | None = None


@runtime_checkable
class Coder(Protocol):
    """Codes single entries by one scale for a tensor."""

    @property
    def encoding(self) -> Encoding: ...

    @property
    def random(self) -> bool:
        """Whether :meth:`code` reads ``Change.uniform``."""
        ...

    def code(self, change: Change) -> Coded: ...
