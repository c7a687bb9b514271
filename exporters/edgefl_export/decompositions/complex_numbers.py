"""Ops on complex numbers, computed with pairs of reals: :mod:`edgefl_export.capture.complex_pairs` puts a pair for each
tensor.

Each rule has the arguments of its op, with a :class:`ComplexPair` for a complex tensor. It returns NotImplemented for a case
without a form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from edgefl_export.operators import aten_ops

_aten = torch.ops.aten


@dataclass(frozen=True)
class ComplexPair:
    """Complex tensor as a real one: ``parts`` has the shape of the tensor and a last axis of real and imaginary part."""

    parts: Tensor


_LONGEST = 2048
"""Entries of a Fourier transform: it is a product with a matrix of as many rows and columns."""

Operand = ComplexPair | Tensor | complex
Real = Tensor | float


def halves(x: Operand) -> tuple[Real, Real]:
    """Return (real part, imaginary part); the imaginary part of a real tensor is the number 0.0."""
    if isinstance(x, ComplexPair):
        return x.parts.select(-1, 0), x.parts.select(-1, 1)
    return (x, 0.0) if isinstance(x, Tensor) else (complex(x).real, complex(x).imag)


def join_parts(real: Real, imaginary: Real) -> ComplexPair:
    """Return the complex tensor with these parts as a pair. At least one part is a tensor."""
    like = real if isinstance(real, Tensor) else cast(Tensor, imaginary)
    both = (each if isinstance(each, Tensor) else torch.full_like(like, each) for each in (real, imaginary))
    return ComplexPair(torch.stack(torch.broadcast_tensors(*both), -1))


def as_pair(x: Tensor) -> ComplexPair:
    return join_parts(x, 0.0)


def _add(x: Operand, y: Operand, *, alpha: complex = 1) -> ComplexPair:
    y = y if alpha == 1 else _multiply(y, alpha)
    if isinstance(x, ComplexPair) and isinstance(y, ComplexPair):
        return ComplexPair(x.parts + y.parts)
    (a, b), (c, d) = halves(x), halves(y)
    return join_parts(a + c, b + d)


def _scale(x: Operand, factor: Real) -> Operand:
    """Compute x times a real factor."""
    if isinstance(x, ComplexPair):
        return ComplexPair(x.parts * (factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor))
    return x * factor


def _multiply(x: Operand, y: Operand) -> Any:
    """Compute (a + bi)(c + di) = (a c - b d) + (a d + b c)i."""
    for first, second in ((x, y), (y, x)):
        if isinstance(second, Tensor):
            if isinstance(first, ComplexPair):
                return _scale(first, second)
        elif not isinstance(second, ComplexPair) and not complex(second).imag:
            return _scale(first, complex(second).real)
    (a, b), (c, d) = halves(x), halves(y)
    if not isinstance(x, ComplexPair) or not isinstance(y, ComplexPair):
        real, other = (x, y) if isinstance(x, Tensor) else (y, x)
        if isinstance(real, Tensor):  # times a complex number
            a, b = halves(other)
            return join_parts(real * a, real * b)
    return join_parts(a * c - b * d, a * d + b * c)


def _conjugate(x: Operand) -> Any:
    if not isinstance(x, ComplexPair):
        return x.conjugate() if isinstance(x, complex) else x
    real, imaginary = halves(x)
    return join_parts(real, -imaginary)


def _reciprocal(x: ComplexPair) -> ComplexPair:
    """Compute conj(x) / |x|^2; x is first divided by its larger part, so that no square overflows."""
    largest = _largest(x)
    small = ComplexPair(x.parts / largest)
    squares = (small.parts * small.parts).sum(-1, keepdim=True)
    return ComplexPair(_conjugate(small).parts / squares / largest)


def _divide(x: Operand, y: Operand) -> Any:
    if isinstance(y, ComplexPair):
        return _multiply(x, _reciprocal(y))
    if isinstance(y, Tensor):
        return _scale(x, 1.0 / y)
    return _multiply(x, 1.0 / y)


def _largest(x: ComplexPair) -> Tensor:
    """Return the larger part of each entry, with a last axis of length 1; 1 where x is 0."""
    largest = x.parts.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, torch.ones_like(largest), largest)


def _magnitude(x: ComplexPair) -> Tensor:
    largest = _largest(x)
    small = x.parts / largest
    return ((small * small).sum(-1, keepdim=True).sqrt() * largest).squeeze(-1)


def _sign(x: ComplexPair) -> ComplexPair:
    """Compute x / |x|, and 0 where x is 0."""
    small = x.parts / _largest(x)
    length = (small * small).sum(-1, keepdim=True).sqrt()
    return ComplexPair(small / torch.where(length == 0, torch.ones_like(length), length))


def _angle(x: Operand) -> Any:
    if not isinstance(x, ComplexPair):
        return NotImplemented
    real, imaginary = halves(x)
    return torch.atan2(cast(Tensor, imaginary), cast(Tensor, real))


def _polar(length: Tensor, angle: Tensor) -> ComplexPair:
    return join_parts(length * angle.cos(), length * angle.sin())


def _exponential(x: ComplexPair) -> ComplexPair:
    real, imaginary = halves(x)
    return _polar(cast(Tensor, real).exp(), cast(Tensor, imaginary))


def _logarithm(x: ComplexPair) -> ComplexPair:
    return join_parts(_magnitude(x).log(), _angle(x))


def _power(x: Operand, exponent: complex) -> Any:
    """Compute x to a power: as a product for an exponent from 1 to 4, else as exp(exponent log(x)).

    Return NotImplemented if x is not complex.
    """
    if not isinstance(x, ComplexPair):
        return NotImplemented
    if exponent in (1, 2, 3, 4):
        product: Any = x
        for _ in range(int(complex(exponent).real) - 1):
            product = _multiply(product, x)
        return product
    return _exponential(_multiply(_logarithm(x), exponent))


def _power_of_number(base: complex, x: ComplexPair) -> Any:
    """Compute base^x = exp(x log(base)) for a positive base; return NotImplemented for other bases."""
    if complex(base).imag or complex(base).real <= 0:
        return NotImplemented
    return _exponential(_multiply(x, math.log(complex(base).real)))


def _product(op: OpOverload) -> Callable[..., Any]:
    """Return the rule that computes the matrix product ``op`` for pairs, by products of their real and imaginary parts."""

    def product(x: Operand, y: Operand) -> Any:
        (a, b), (c, d) = halves(x), halves(y)
        if not isinstance(y, ComplexPair):
            return join_parts(op(a, c), op(b, c))
        if not isinstance(x, ComplexPair):
            return join_parts(op(a, c), op(a, d))
        return join_parts(op(a, c) - op(b, d), op(a, d) + op(b, c))

    return product


def _same(x: Operand, y: Operand) -> Tensor:
    (a, b), (c, d) = halves(x), halves(y)
    return cast(Tensor, (a == c) & (b == d))


def _select(condition: Tensor, x: Operand, y: Operand) -> ComplexPair:
    (a, b), (c, d) = halves(x), halves(y)
    return join_parts(torch.where(condition, a, c), torch.where(condition, b, d))


def _fill(x: Operand, value: Operand) -> Any:
    return (
        _add(ComplexPair(torch.zeros_like(x.parts)), value) if isinstance(x, ComplexPair) else NotImplemented
    )


def _fill_masked(x: Operand, mask: Tensor, value: Operand) -> Any:
    return _select(mask, value, x) if isinstance(x, ComplexPair) else NotImplemented


def _full(size: Sequence[int], value: complex, *, dtype: torch.dtype | None = None, **_: Any) -> ComplexPair:
    real = torch.full(size, complex(value).real, dtype=dtype.to_real() if dtype else None)
    return join_parts(real, complex(value).imag)


def _full_like(x: Operand, value: complex, **_: Any) -> ComplexPair:
    like = x.parts.select(-1, 0) if isinstance(x, ComplexPair) else cast(Tensor, x)
    return join_parts(torch.full_like(like, complex(value).real), complex(value).imag)


def _entries(x: ComplexPair) -> Tensor:
    """Return the entries of ``x`` as real numbers [entries, 2]."""
    return x.parts.reshape(-1, 2)


def _convert(x: Operand, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Convert x to ``dtype``. The imaginary part is dropped if ``dtype`` is real, as in torch."""
    if dtype is None:
        return x.parts.clone() if isinstance(x, ComplexPair) else x
    if not dtype.is_complex:
        return cast(Tensor, halves(x)[0]).to(dtype)
    if isinstance(x, ComplexPair):
        return ComplexPair(x.parts.to(dtype.to_real()))
    return as_pair(cast(Tensor, x).to(dtype.to_real()))


def _view_as_type(x: Operand, dtype: torch.dtype) -> Any:
    """Return a view of the bytes of x as another dtype: complex numbers as pairs of reals and back.

    Return NotImplemented for types of another size.
    """
    if isinstance(x, ComplexPair):
        return x.parts.flatten(-2) if x.parts.dtype == dtype and x.parts.dim() > 1 else NotImplemented
    tensor = cast(Tensor, x)
    return ComplexPair(tensor.unflatten(-1, (-1, 2))) if tensor.dtype == dtype.to_real() else NotImplemented


def _transpose(x: ComplexPair) -> ComplexPair:
    return ComplexPair(x.parts.transpose(0, 1)) if x.parts.dim() == 3 else x


def _roll(x: ComplexPair, shifts: Sequence[int], dims: Sequence[int] = ()) -> ComplexPair:
    if not dims:
        return ComplexPair(x.parts.flatten(0, -2).roll(shifts, 0).reshape(x.parts.shape))
    return ComplexPair(x.parts.roll(shifts, [dim % (x.parts.dim() - 1) for dim in dims]))


def _waves(size: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of 2 pi j k / ``size`` as matrices of ``rows`` values j and ``columns`` values k."""
    turns = np.outer(np.arange(rows), np.arange(columns)) % size * (2 * np.pi / size)
    return torch.tensor(np.cos(turns).tolist()), torch.tensor(np.sin(turns).tolist())


def _fourier(x: Operand, dim: int, *, forward: bool, kept: int | None = None) -> ComplexPair:
    """Compute the discrete Fourier transform along one axis, without a factor; return its first ``kept`` entries or
    all.

    If not ``forward``, compute the inverse transform.
    """
    a, b = halves(x)
    real, imaginary = cast(Tensor, a).movedim(dim, -1), b.movedim(dim, -1) if isinstance(b, Tensor) else b
    size = real.shape[-1]
    cos, sin = _waves(size, size, size if kept is None else kept)
    sin = -sin if forward else sin  # (a + bi)(cos + i sin)
    if isinstance(imaginary, Tensor):
        made = real @ cos - imaginary @ sin, real @ sin + imaginary @ cos
    else:
        made = real @ cos, real @ sin
    return join_parts(*(each.movedim(-1, dim) for each in made))


def _normalize(x: Any, sizes: Sequence[int], norm: int) -> Any:
    """Return x for ``norm`` 0, x over the root of the number of entries for 1, and x over that number for 2.

    ``sizes`` are the sizes of the transformed axes, whose product is the number of entries.
    """
    return _scale(x, math.prod(sizes) ** (-0.5 * norm))


def _complex_fourier(x: ComplexPair, dim: Sequence[int], norm: int, forward: bool) -> Any:
    dim = [each % (x.parts.dim() - 1) for each in dim]
    sizes = [x.parts.shape[each] for each in dim]
    if max(sizes) > _LONGEST:
        return NotImplemented
    for each in dim:
        x = _fourier(x, each, forward=forward)
    return _normalize(x, sizes, norm)


def _fourier_of_real(x: Tensor, dim: Sequence[int], norm: int, onesided: bool) -> Any:
    dim = [each % x.dim() for each in dim]
    if max(x.shape[each] for each in dim) > _LONGEST:
        return NotImplemented
    kept = x.shape[dim[-1]] // 2 + 1 if onesided else None
    made = _fourier(x, dim[-1], forward=True, kept=kept)
    for each in dim[:-1]:
        made = _fourier(made, each, forward=True)
    return _normalize(made, [x.shape[each] for each in dim], norm)


def _fourier_to_real(x: ComplexPair, dim: Sequence[int], norm: int, size: int) -> Any:
    """Compute the real inverse transform of half a spectrum, whose other half is the conjugate; NotImplemented for long
    axes.

    Args:
        x: half of a spectrum.
        dim: transformed axes; the last one is halved in ``x``.
        norm: factor of the result, as in :func:`_normalize`.
        size: length of the last axis in the result.
    """
    dim = [each % (x.parts.dim() - 1) for each in dim]
    sizes = [*(x.parts.shape[each] for each in dim[:-1]), size]
    if max(sizes) > _LONGEST:
        return NotImplemented
    for each in dim[:-1]:
        x = _fourier(x, each, forward=False)
    kept = size // 2 + 1
    real, imaginary = (cast(Tensor, each).narrow(dim[-1], 0, kept).movedim(dim[-1], -1) for each in halves(x))
    cos, sin = _waves(size, kept, size)
    twice = torch.tensor([[1.0 if 2 * k in (0, size) else 2.0] for k in range(kept)])
    return _normalize((real @ (twice * cos) - imaginary @ (twice * sin)).movedim(-1, dim[-1]), sizes, norm)


def _empty_strided(x: Operand, size: Sequence[int], stride: Sequence[int], **_: Any) -> Any:
    if not isinstance(x, ComplexPair):
        return NotImplemented
    return ComplexPair(x.parts.new_empty_strided([*size, 2], [*(2 * each for each in stride), 1]))


RULES: dict[Any, Callable[..., Any]] = {
    _aten.view_as_real.default: lambda x: x.parts if isinstance(x, ComplexPair) else NotImplemented,
    _aten.view_as_complex.default: ComplexPair,
    _aten.view.dtype: _view_as_type,
    _aten.complex.default: join_parts,
    _aten.polar.default: _polar,
    _aten._to_copy.default: _convert,
    **dict.fromkeys(aten_ops("_conj conj_physical _conj_physical"), _conjugate),
    _aten._neg_view.default: lambda x: _scale(x, -1.0),
    _aten.scalar_tensor.default: lambda value, **_: complex(value),
    **dict.fromkeys(aten_ops("add.Tensor add.Scalar"), _add),
    **dict.fromkeys(aten_ops("sub.Tensor sub.Scalar"), lambda x, y, *, alpha=1: _add(x, y, alpha=-alpha)),
    **dict.fromkeys(aten_ops("rsub.Tensor rsub.Scalar"), lambda x, y, alpha=1: _add(y, x, alpha=-alpha)),
    **dict.fromkeys(aten_ops("mul.Tensor mul.Scalar"), _multiply),
    **dict.fromkeys(aten_ops("div.Tensor div.Scalar"), _divide),
    _aten.reciprocal.default: _reciprocal,
    _aten.abs.default: _magnitude,
    _aten.sgn.default: _sign,
    _aten.angle.default: _angle,
    _aten.exp.default: _exponential,
    _aten.log.default: _logarithm,
    _aten.pow.Tensor_Scalar: _power,
    _aten.pow.Scalar: _power_of_number,
    **dict.fromkeys(aten_ops("eq.Tensor eq.Scalar"), _same),
    **{op: _product(op) for op in aten_ops("mm bmm mv")},
    _aten.where.self: _select,
    **dict.fromkeys(aten_ops("masked_fill.Scalar masked_fill.Tensor"), _fill_masked),
    **dict.fromkeys(aten_ops("fill.Scalar fill.Tensor"), _fill),
    _aten.full.default: _full,
    _aten.ones.default: lambda size, **options: _full(size, 1.0, **options),
    _aten.full_like.default: _full_like,
    _aten.ones_like.default: lambda x, **_: _full_like(x, 1.0),
    _aten.sum.default: lambda x, **_: ComplexPair(_entries(x).sum(0)),
    _aten.mean.default: lambda x, **_: ComplexPair(_entries(x).mean(0)),
    _aten.t.default: _transpose,
    _aten.roll.default: _roll,
    _aten._fft_c2c.default: _complex_fourier,
    _aten._fft_r2c.default: _fourier_of_real,
    _aten._fft_c2r.default: _fourier_to_real,
    _aten.new_empty_strided.default: _empty_strided,
}
