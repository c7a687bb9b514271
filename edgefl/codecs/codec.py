"""Codecs: the encoding of each part of an update, and the interface of the coders.

:mod:`edgefl.codecs.apply` traces coders into the function ``finish``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from edgefl.wire.update.form import VERSION, Encoding, FloatEncoding, SparseEncoding


@dataclass(frozen=True)
class Change:
    """Change of one or several tensors in a round, or their values if the codec sends weights.

    With ``sizes`` it holds several tensors, flat, one after the other, because a graph takes as long for a hundred
    small operations as for a large one. A result per tensor is then [tensors], and () otherwise. Entries are held if
    they are part of the device's submodel.

    Attributes:
        value: Float32 of the tensor's shape, 0 outside of ``held``.
        base: Initial value of the round, in the same shape.
        held: True for held entries, in the same shape. None: all are held.
        uniform: Uniform numbers in [0, 1) of the same shape, for random coders; else None.
        sizes: Number of entries of each tensor. Empty: ``value`` is one tensor in its own shape.
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
        """Return the change of the tensors ``names``, flat, in this order.

        Args:
            names: Names of the tensors.
            values: Their changes or values, by name.
            base: Their values at the start of the round, by name.
            held: Masks of held entries (entries of the device's submodel), by name. A tensor without a mask is
                held whole.
            uniform: Uniform numbers by name, if the coder is random.
        """
        masks = {name: mask for name, mask in (held or {}).items() if name in names}
        whole = (
            {n: masks.get(n, torch.ones(values[n].shape, dtype=torch.bool)) for n in names} if masks else None
        )
        return cls(
            flatten(values[name] for name in names),
            flatten(base[name] for name in names),
            None if whole is None else flatten(whole.values()),
            None if uniform is None else flatten(uniform[name] for name in names),
            tuple(values[name].numel() for name in names),
        )

    @property
    def entries(self) -> Tensor:
        """Number of held entries of each tensor, float32."""
        if self.held is not None:
            return self.sums(self.held.to(torch.float32))
        return torch.tensor([float(n) for n in self.sizes] if self.sizes else float(self.value.numel()))

    def mean_size(self) -> Tensor:
        """Return the mean magnitude of each tensor's held entries, norm_1 / d. A tensor without held entries gives 0."""
        return self.sums(self.value.abs()) / self.entries.clamp(min=1.0)

    def largest(self) -> Tensor:
        """Return the largest magnitude of each tensor, norm_inf.

        It is not finite if any entry is not. Some engines' maximum ignores NaN, and the server must detect it.
        """
        size = self.value.abs()
        most = (
            torch.cat([x.amax(0, keepdim=True) for x in split(size, self.sizes)])
            if self.sizes
            else size.max()
        )
        return most + 0.0 * self.sums(self.value)

    def zeros(self) -> Tensor:
        """Return the number () of held entries whose change is 0, over all tensors."""
        return self.entries.sum() - (self.value != 0).to(self.value.dtype).sum()

    def sums(self, each: Tensor) -> Tensor:
        """Return the sum of each tensor's entries of ``each``, which has the shape of ``value``: [tensors], or () for
        one tensor.
        """
        if not self.sizes:
            return each.sum()
        return torch.cat([part.sum(0, keepdim=True) for part in split(each, self.sizes)])

    def spread(self, numbers: Tensor) -> Tensor:
        """Return ``numbers``, one per tensor, repeated for each entry of its tensor, in a shape that broadcasts with
        ``value``.
        """
        return spread(split(numbers, 1), self.sizes) if self.sizes else numbers

    def draws(self) -> Tensor:
        """Return the uniform numbers. Raise AssertionError if there are none, that is, if the coder is not random."""
        assert self.uniform is not None, "a coder that draws is given uniform numbers"
        return self.uniform


@dataclass(frozen=True)
class CodedChange:
    """Result of a coder: codes, and the values ``scale * levels`` that they denote.

    Attributes:
        codes: Whole numbers in the change's shape, as float32.
        levels: Value of each code before scaling, in the same shape.
        scale: Transmitted scale of each tensor. None: the encoding fixes the scale.
    """

    codes: Tensor
    levels: Tensor
    scale: Tensor | None = None


@runtime_checkable
class Coder(Protocol):
    """Interface of coders. A coder codes each entry by itself, with at most one scale per tensor.

    ``encoding`` describes the bits of a code and the value it denotes. ``code`` returns the codes of a change.
    """

    @property
    def encoding(self) -> Encoding: ...

    @property
    def random(self) -> bool:
        """True if :meth:`code` reads ``Change.uniform``."""

    def code(self, change: Change) -> CodedChange: ...


def spread(numbers: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Repeat each of ``numbers`` () or [1] as often as its size in ``sizes``, and return all as one flat tensor."""
    return flatten(number.expand(size) for number, size in zip(numbers, sizes, strict=True))


def split(joined: Tensor, sizes: Sequence[int] | int) -> tuple[Tensor, ...]:
    """Split the flat tensor ``joined`` into consecutive parts of these sizes. A single number is the size of all parts."""
    parts: tuple[Tensor, ...] = joined.split(sizes)
    return parts


def flatten(parts: Iterable[Tensor]) -> Tensor:
    """Return one flat tensor with the entries of all ``parts``. A single part is not copied."""
    rows = [reshape(part, (part.numel(),)) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``tensor`` in ``shape``.

    A tensor that has it already is returned itself, because a reshape takes time in a graph.
    """
    return tensor if tuple(tensor.shape) == shape else tensor.reshape(shape)


def unflatten(joined: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split flat ``joined`` into tensors with the names and shapes of ``like``: the inverse of :func:`flatten`."""
    parts = split(joined, [tensor.numel() for tensor in like.values()])
    return {name: reshape(part, tuple(like[name].shape)) for name, part in zip(like, parts, strict=True)}


STATISTICS_BITS = 6
"""Bits of a moving statistic.

Statistics are 1 % of a ResNet's entries, but would be a fifth of a one-bit update as float32.
"""


@dataclass(frozen=True)
class CodecTraining:
    """Training algorithm that a codec requires, by name, and its options."""

    algorithm: str
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Codec:
    """Encoding of an update.

    Attributes:
        trained: Coder of the trained tensors, or their encoding as smaller floats or as their largest entries. None: no
            codec applies, they are sent as float32.
        change: True: code the change of the round. False: code the weights.
        feedback: True: the device keeps the coding error (``carry.residual.*``) and adds it to its next change.
        statistics: Bits per entry of the moving statistics of batch norm and other tensors that are not parameters. 32
            sends them as float32 (fedbat.md 8.4).
        binarize_1d: True: code biases and norms like kernels. False: send them as float32 (fedbat.md 2.7).
        kernels_only: True: send all tensors but kernels as float32.
        training: Required algorithm, or None. If it codes the update itself, ``trained`` is None.
        version: Version of the update's bytes.
    """

    name: str
    trained: Coder | FloatEncoding | SparseEncoding | None = None
    change: bool = True
    feedback: bool = False
    statistics: int = STATISTICS_BITS
    binarize_1d: bool = True
    kernels_only: bool = False
    training: CodecTraining | None = None
    version: int = VERSION
