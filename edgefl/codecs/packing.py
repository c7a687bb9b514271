"""Numbers as bytes inside a graph, of standard ops only, with the same bits on each engine (layout: ``codecs.form``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgefl.codecs.coder import flat, split

_BIAS, _MANTISSA, _LEAST_EXPONENT = 127.0, 128.0, -126.0
_SIGN, _INFINITY = 32768.0, 255.0 * _MANTISSA


def pack_codes(parts: Sequence[Tensor], bits: int) -> Tensor:
    """uint8 (bytes of all parts,): whole numbers 0 .. 2**bits - 1 of any dtype, each part from a byte of its own."""
    codes, sizes = flat(parts).to(torch.float32), [part.numel() for part in parts]
    if 8 % bits:  # a code may lie across two bytes
        codes, sizes, bits = _planes(codes, bits), [bits * size for size in sizes], 1
    rows = _whole_bytes(codes, sizes, 8 // bits)
    if bits == 8:
        return rows.to(torch.uint8)
    # A product of matrices, as one op that every engine is fast at; sums up to 255 are exact.
    powers = torch.tensor([float(1 << shift) for shift in range(0, 8, bits)])
    return (rows.reshape(-1, 8 // bits) @ powers).to(torch.uint8)


def _planes(codes: Tensor, bits: int) -> Tensor:
    """The bits of each code, lowest first, one after the other, as 0.0 and 1.0."""
    left, planes = codes, []
    for _ in range(bits):
        halved = torch.floor(left / 2)
        planes.append(left - 2 * halved)
        left = halved
    return torch.stack(planes, dim=-1).reshape(-1)


def _whole_bytes(codes: Tensor, sizes: Sequence[int], each: int) -> Tensor:
    """``codes``, with zeros after each part up to a multiple of ``each``."""
    if not any(size % each for size in sizes):
        return codes
    padded = [[part, torch.zeros(-part.numel() % each)] for part in split(codes, list(sizes))]
    return torch.cat([part for pair in padded for part in pair if part.numel()])


def bfloat16_bits(x: Tensor) -> Tensor:
    """uint16 of x's shape: float32 rounded to bfloat16, ties to even; what is below 2**-126 becomes 0.

    In arithmetic that float32 does exactly, because engines neither share a bfloat16 nor reinterpret bits: the exponent
    is found by halving and doubling the number, which changes nothing else. Infinity and NaN become infinity.
    """
    finite = x.abs() <= torch.finfo(torch.float32).max  # false for NaN too
    x = torch.where(finite, x, torch.zeros(()))
    size, exponent = x.abs(), torch.zeros_like(x)
    for step in (64, 32, 16, 8, 4, 2, 1):
        small = size < 2.0 ** (1 - step)
        size = torch.where(small, size * 2.0**step, size)
        exponent = torch.where(small, exponent - step, exponent)
        large = size >= 2.0**step
        size = torch.where(large, size * 2.0**-step, size)
        exponent = torch.where(large, exponent + step, exponent)
    # 1 <= size < 2: seven bits of mantissa; a mantissa that rounds up to 128 carries into the exponent by itself.
    bits = (exponent + _BIAS) * _MANTISSA + torch.round((size - 1) * _MANTISSA)
    bits = torch.where(exponent < _LEAST_EXPONENT, torch.zeros(()), bits)
    bits = torch.where(x.abs() > 0, bits, torch.zeros(()))
    bits = torch.where(x < 0, bits + _SIGN, bits)
    return torch.where(finite, bits, torch.full((), _INFINITY)).to(torch.int32).to(torch.uint16)
