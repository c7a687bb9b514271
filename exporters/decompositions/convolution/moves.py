"""How the kernel of a convolution moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Moves:
    """How the kernel of a convolution moves, by axis of space, and its groups of channels."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @classmethod
    def of(cls, rank: int, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Moves:
        """As the trace gives it."""
        return cls(per_axis(stride, rank), per_axis(padding, rank), per_axis(dilation, rank), groups)


def per_axis(values: Sequence[int], rank: int) -> list[int]:
    """One value per axis; the trace gives a single one for all alike."""
    return list(values) * rank if len(values) == 1 else list(values)
