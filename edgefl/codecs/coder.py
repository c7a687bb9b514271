"""How changes become codes: the interface of what :mod:`edgefl.codecs.apply` puts into ``finish``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from edgefl.wire.update.form import Encoding


@dataclass(frozen=True)
class Change:
    """What training did to a tensor, or, for codecs of weights, what it left.

    ``value`` float32 of the tensor's shape, 0 outside of ``held`` (bool, None: all is held). ``uniform`` in [0, 1) of
    the same shape for coders that draw. ``base`` is what the round began with.

    With ``sizes`` it is several tensors, each of them flat, one after the other: a graph takes as long for a hundred
    small operations as for one large one. A number per tensor is then [tensors], and () otherwise.
    """

    value: Tensor
    base: Tensor
    held: Tensor | None = None
    uniform: Tensor | None = None
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        values: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        held: Mapping[str, Tensor] | None = None,
        uniform: Mapping[str, Tensor] | None = None,
    ) -> Change:
        """Those of ``names``, in this order; a tensor without a mask in ``held`` is held whole."""
        masks = {name: mask for name, mask in (held or {}).items() if name in names}
        whole = (
            {n: masks.get(n, torch.ones(values[n].shape, dtype=torch.bool)) for n in names} if masks else None
        )
        return cls(
            flat(values[name] for name in names),
            flat(base[name] for name in names),
            None if whole is None else flat(whole.values()),
            None if uniform is None else flat(uniform[name] for name in names),
            tuple(values[name].numel() for name in names),
        )

    @property
    def entries(self) -> Tensor:
        """How many entries are held, float32."""
        if self.held is not None:
            return self.sums(self.held.to(torch.float32))
        return torch.tensor([float(n) for n in self.sizes] if self.sizes else float(self.value.numel()))

    def mean_size(self) -> Tensor:
        """norm_1 / d over the held entries."""
        return self.sums(self.value.abs()) / self.entries.clamp(min=1.0)

    def largest(self) -> Tensor:
        """norm_inf. Not finite if any entry is not, which the server must see: some engines' maximum passes over NaN."""
        size = self.value.abs()
        most = (
            torch.cat([x.amax(0, keepdim=True) for x in split(size, self.sizes)])
            if self.sizes
            else size.max()
        )
        return most + 0.0 * self.sums(self.value)

    def zeros(self) -> Tensor:
        """() how many held entries did not change."""
        return self.entries.sum() - (self.value != 0).to(self.value.dtype).sum()

    def sums(self, each: Tensor) -> Tensor:
        """The sum over each tensor of ``each``, which is of the shape of ``value``."""
        if not self.sizes:
            return each.sum()
        return torch.cat([part.sum(0, keepdim=True) for part in split(each, self.sizes)])

    def spread(self, numbers: Tensor) -> Tensor:
        """The number of each tensor for all of its entries, in a shape that goes with ``value``."""
        return spread(split(numbers, 1), self.sizes) if self.sizes else numbers

    def draws(self) -> Tensor:
        assert self.uniform is not None, "a coder that draws is given uniform numbers"
        return self.uniform


@dataclass(frozen=True)
class Coded:
    """Whole numbers of the change's shape, as float32, and what they stand for: ``scale * levels``.

    ``scale`` is a number per tensor that travels; None where both sides know it.
    """

    codes: Tensor
    levels: Tensor
    scale: Tensor | None = None


@runtime_checkable
class Coder(Protocol):
    """Codes single entries by one scale for a tensor."""

    @property
    def encoding(self) -> Encoding: ...

    @property
    def random(self) -> bool:
        """Whether :meth:`code` reads ``Change.uniform``."""

    def code(self, change: Change) -> Coded: ...


def spread(numbers: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Each of ``numbers`` () or [1] as often as its size says, one after the other."""
    return flat(number.expand(size) for number, size in zip(numbers, sizes, strict=True))


def split(joined: Tensor, sizes: Sequence[int] | int) -> tuple[Tensor, ...]:
    """A flat tensor in parts of these sizes, or of one size."""
    parts: tuple[Tensor, ...] = joined.split(sizes)
    return parts


def flat(parts: Iterable[Tensor]) -> Tensor:
    """One flat tensor of all entries; a single part is not copied."""
    rows = [shaped(part, (part.numel(),)) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshaped where it is not yet: an operation that does nothing takes its time, too."""
    return tensor if tuple(tensor.shape) == shape else tensor.reshape(shape)


def parted(joined: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`flat`: tensors in the shapes of ``like``, under its names."""
    parts = split(joined, [tensor.numel() for tensor in like.values()])
    return {name: shaped(part, tuple(like[name].shape)) for name, part in zip(like, parts, strict=True)}
