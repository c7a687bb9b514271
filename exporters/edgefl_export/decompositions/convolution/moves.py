"""Stride, padding and dilation of a convolution's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConvolutionArgs:
    """Arguments of a convolution that say how its kernel moves, by axis of space, and its groups of channels."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @classmethod
    def of(
        cls,
        rank: int,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
    ) -> ConvolutionArgs:
        """Return the moves over ``rank`` axes, from what the op takes behind the bias."""
        stride, padding, dilation = (per_axis(values, rank) for values in (stride, padding, dilation))
        return cls(stride, padding, dilation, transposed, per_axis(output_padding, rank), groups)


def per_axis(values: Sequence[int], rank: int) -> list[int]:
    """Return one value per axis; the trace gives a single one for all alike."""
    return list(values) * rank if len(values) == 1 else list(values)
