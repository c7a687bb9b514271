"""Moving tensors along an axis by slices, zero padding and joins: what XNNPACK does at the speed of a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_aten = torch.ops.aten


def pad(x: Tensor, axis: int, before: int, behind: int) -> Tensor:
    """Add ``before`` and ``behind`` zeros along ``axis``; a negative number drops entries instead."""
    size = x.shape[axis]
    if before < 0 or behind < 0:
        x = cut(x, axis, max(-before, 0), size - max(-behind, 0))
    before, behind = max(before, 0), max(behind, 0)
    if not before and not behind:
        return x
    padded: Tensor = _aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - axis) + [before, behind], 0.0)
    return padded


def cut(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """Return x[start:stop] along ``axis``."""
    return x if (start, stop) == (0, x.shape[axis]) else _aten.slice.Tensor(x, axis, start, stop)


def window(x: Tensor, axis: int, start: int, size: int) -> Tensor | None:
    """Return entries start .. start + size along ``axis``, with zeros outside of x; None if all are outside."""
    first, last = max(start, 0), min(start + size, x.shape[axis])
    if last <= first:
        return None
    return pad(cut(x, axis, first, last), axis, first - start, start + size - last)


def shifts(x: Tensor, axis: int, starts: Sequence[int], size: int) -> list[Tensor]:
    """Return for each of ``starts`` the entries start .. start + size along ``axis``, with zeros outside of x."""
    before = max(0, -min(starts))
    behind = max(0, max(starts) + size - x.shape[axis])
    padded = pad(x, axis, before, behind)
    whole = x.shape[axis] == size
    return [
        x if whole and not start else cut(padded, axis, before + start, before + start + size)
        for start in starts
    ]


def taps(
    x: Tensor, axis: int, kernel: int, count: int, stride: int, padding: int, dilation: int
) -> list[Tensor]:
    """Return for each kernel position i the entries p * stride + i * dilation - padding, p < count, with zeros outside.

    With a stride s the axis becomes [size / s, s]: each tap is a slice of one of s phases.
    """
    reach = [i * dilation for i in range(kernel)]
    if stride == 1:
        return shifts(x, axis, [r - padding for r in reach], count)
    blocks = count + reach[-1] // stride
    padded = pad(x, axis, padding, blocks * stride - padding - x.shape[axis])
    split = padded.view(*x.shape[:axis], blocks, stride, *x.shape[axis + 1 :])
    phases = {
        phase: cut(split, axis + 1, phase, phase + 1).view(*x.shape[:axis], blocks, *x.shape[axis + 1 :])
        for phase in sorted({r % stride for r in reach})
    }
    return [cut(phases[r % stride], axis, r // stride, r // stride + count) for r in reach]


def join(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate ``parts`` along ``axis``; a single part is returned itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


MOST_OF_CHAIN = 2**18
"""Numbers of an operand of a chain of arithmetic that a part of it takes: they lie in a processor's own cache to its end."""


def in_parts(chain: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply the element-wise function ``chain`` to blocks of rows of ``tensors``, and return the joined results.

    All tensors have one shape. Intermediate values are then as small as a block. Each entry of a result of ``chain`` may
    depend only on the same entry of each tensor.
    """
    first = tensors[0]
    count = min(len(first), -(-first.numel() // MOST_OF_CHAIN)) if first.dim() else 1
    if count < 2 or any(each.shape != first.shape for each in tensors):
        return chain(*tensors)
    rows = -(-len(first) // count)
    ends = [(start, min(start + rows, len(first))) for start in range(0, len(first), rows)]
    return join([chain(*(cut(each, 0, *end) for each in tensors)) for end in ends], 0)


def total(parts: Sequence[Tensor | None], shape: Sequence[int]) -> Tensor:
    """Return the sum of the parts that are not None, or zeros of ``shape`` if all are None."""
    terms = [part for part in parts if part is not None]
    if not terms:
        return torch.zeros(tuple(shape))
    result = terms[0]
    for part in terms[1:]:
        result = result + part
    return result


def interleave(parts: Sequence[Tensor | None], axis: int, size: int) -> Tensor | None:
    """Return [a0, b0, a1, b1, ..] along ``axis`` of channels-last parts a, b, .. of one shape, cut to ``size``.

    A part of None counts as zeros; the result is None if all parts are.
    """
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    shape = list(tensors[0].shape)
    last = max(index for index, part in enumerate(parts) if part is not None) + 1
    filled = [torch.zeros(shape) if part is None else part for part in parts[:last]]
    joined = pad(join(filled, axis + 1), axis + 1, 0, (len(parts) - last) * shape[axis + 1])
    shape[axis] *= len(parts)
    return cut(joined.view(shape), axis, 0, size)


def place(
    parts: Sequence[Sequence[Tensor]], size: Sequence[int], met: Sequence[Sequence[Sequence[tuple[int, int]]]]
) -> Tensor:
    """Add gradients to the positions of the input that each kernel position (i, j) read, and return the sum [N, *size, C].

    It is the adjoint of reading the input by two-dimensional taps.

    Args:
        parts: ``parts[i][j]`` [N, H', W', C] is added to the inputs that kernel position (i, j) read.
        size: rows and columns of the result.
        met: ``met[axis][phase]`` lists (kernel position, first output) for inputs phase, phase + stride, ..; see
            :meth:`edgefl_export.executorch.rules.convolution.KernelArgs.met`.
    """
    first = parts[0][0]
    height, width = (-(-n // len(phases)) for n, phases in zip(size, met, strict=True))
    lines = []
    for down in met[0]:
        line: list[Tensor | None] = []
        for across in met[1]:
            moved: list[Tensor | None] = []
            for i, top in down:
                inside = [window(parts[i][j], 2, left, width) for j, left in across]
                moved += [None if part is None else window(part, 1, top, height) for part in inside]
            line.append(total(moved, ()) if any(part is not None for part in moved) else None)
        lines.append(interleave(line, 2, size[1]))
    whole = interleave(lines, 1, size[0])
    return torch.zeros((first.shape[0], *size, first.shape[3])) if whole is None else whole
