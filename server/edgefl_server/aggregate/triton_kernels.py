"""Triton kernel that sums one-bit codes on a GPU, designed so that memory bandwidth is its only limit.

A launch must move 8 + 8 bytes per entry of the sums and 1 bit per entry and client: 24 bytes per entry for 64
clients, 8 ms for 1e9 entries at 3 TB/s. Meanwhile an H100 (132 multiprocessors at 1.75 GHz) can issue about 240
instructions per entry, half of them integer ones. Testing each of the 64 bits and adding a 64-bit scale takes three
integer instructions per bit, 1.6 times that long. Here the bits of four clients form a nibble that selects the sum of
their scales in a table of 16:

* a lane holds 32 entries; two swaps of bits turn the words of four clients into nibbles, 16 operations per 128 bits;
* a look-up is a shift, a mask, an address, a load and a 64-bit add: 7 instructions for four bits, 4 of them integer;
* a table has 128 bytes, one line of the first cache that covers each memory bank once, so lanes never conflict.
  (Tables of 256
sums for eight clients need half of the instructions, but conflict about threefold.)

Compiled for sm_90 the loop has 2.5 instructions and 1.4 integer operations per bit: two thirds and three quarters of
the available ones. These are counts; ``python -m benchmarks aggregate --processor cuda --on-device`` measures. Sums
are int64 and wrap, so the order does not change a bit.

Without a GPU, set ``TRITON_INTERPRET=1`` before the first import of triton to run the kernel in numpy.
"""

# Triton reads these functions' source: their arguments are tensors and pointers that have no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from edgefl_server.aggregate.scatter import BLOCK, Integers

GROUP = 4
"""Number of clients whose bits form one index of a table."""


@dataclass(frozen=True)
class Tuning:
    """Division of a block among GPU programs. Every choice gives the same sums.

    Attributes:
        words: Words of 32 entries that a program adds, a power of two. With ``32 * warps`` words, each lane has
            one.
        warps: Warps of a program.
        registers: Limit of registers per lane, so that more programs run at once; None lets the compiler choose
            (about 168).
    """

    words: int = 128
    warps: int = 4
    registers: int | None = 128


@triton.jit
def _swap(a, b, low: tl.constexpr, by: tl.constexpr):
    """Exchange bit fields between the 32-bit words ``a`` and ``b``, and return both words.

    Each consists of fields of ``by`` bits; the mask ``low`` selects every other one, beginning with the lowest. The first
    result joins the ``low`` fields of both words, those of ``b`` shifted up. The second result joins the other fields,
    those of ``a`` shifted down.
    """
    return (a & low) | ((b & low) << by), ((a >> by) & low) | (b & (low << by))


@triton.jit
def _word(at, client, clients, stride, shift, inside):
    """Return 32 code bits of ``client``, beginning at bit ``shift`` of the word at address ``at``.

    Words are ``stride`` apart from client to client. It is 0 for a client that does not exist, and where ``inside`` is
    False.
    """
    # In the interpreter two numbers compare to a Python bool, and a mask & True is int32.
    here = (inside & (client < clients)) != 0
    low = tl.load(at + client * stride, here, other=0)
    high = tl.load(at + client * stride + 1, here & (shift > 0), other=0)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def _four(at, first, clients, stride, shift, inside):
    return (
        _word(at, first, clients, stride, shift, inside),
        _word(at, first + 1, clients, stride, shift, inside),
        _word(at, first + 2, clients, stride, shift, inside),
        _word(at, first + 3, clients, stride, shift, inside),
    )


@triton.jit
def _sum_of(tables, offset):
    return tl.load((tables + offset).to(tl.pointer_type(tl.int64), bitcast=True))


@triton.jit
def _look_up(sums, tables, table, nibbles):
    """Return eight sums, each increased by the table entry that its nibble of the 32-bit word ``nibbles`` selects.

    ``table`` is the byte offset of the group's table in ``tables``; a table has 16 int64 entries.
    """
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    s0 += _sum_of(tables, ((nibbles << 3) & 0x78) | table)
    s1 += _sum_of(tables, ((nibbles >> 1) & 0x78) | table)
    s2 += _sum_of(tables, ((nibbles >> 5) & 0x78) | table)
    s3 += _sum_of(tables, ((nibbles >> 9) & 0x78) | table)
    s4 += _sum_of(tables, ((nibbles >> 13) & 0x78) | table)
    s5 += _sum_of(tables, ((nibbles >> 17) & 0x78) | table)
    s6 += _sum_of(tables, ((nibbles >> 21) & 0x78) | table)
    s7 += _sum_of(tables, ((nibbles >> 25) & 0x78) | table)
    return (s0, s1, s2, s3, s4, s5, s6, s7)


@triton.jit
def _in_order(sums):
    """Join eight tensors [words] into one [words, 2, 2, 2], whose last three axes are the index of the tensor."""
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    even, odd = tl.join(tl.join(s0, s4), tl.join(s2, s6)), tl.join(tl.join(s1, s5), tl.join(s3, s7))
    return tl.join(even, odd)


@triton.jit
def _add_signs(
    codes,  # int32 [clients, stride]
    stride: tl.int64,
    clients: tl.int32,
    tables,  # uint8 [rows, groups, 16 * 8]
    blocks,  # int64 [blocks, 5]
    index,  # int64 [listed]
    size: tl.int64,
    sums,  # int64 [size]
    WORDS: tl.constexpr,
):
    block = blocks + 5 * tl.program_id(0).to(tl.int64)
    skip = tl.program_id(1) * (32 * WORDS)
    first, count = tl.load(block) + skip, tl.load(block + 1) - skip
    row, target = tl.load(block + 3), tl.load(block + 4) + skip
    if count > 0:
        groups = (clients + 3) // 4
        shift = (first & 31).to(tl.uint32)
        word = tl.arange(0, WORDS)
        inside = word * 32 < count
        at = codes + (first >> 5) + word
        table = (row * groups * 128).to(tl.uint32)
        zero = tl.zeros([WORDS], tl.int64)
        s0 = (zero, zero, zero, zero, zero, zero, zero, zero)
        s1, s2, s3 = s0, s0, s0
        w0, w1, w2, w3 = _four(at, 0, clients, stride, shift, inside)
        for group in range(groups):
            a0, a1 = _swap(w0, w1, 0x55555555, 1)
            b0, b1 = _swap(w2, w3, 0x55555555, 1)
            n0, n2 = _swap(a0, b0, 0x33333333, 2)
            n1, n3 = _swap(a1, b1, 0x33333333, 2)
            # The next words are on their way while these are looked up.
            w0, w1, w2, w3 = _four(at, 4 * group + 4, clients, stride, shift, inside)
            s0 = _look_up(s0, tables, table, n0)
            s1 = _look_up(s1, tables, table, n1)
            s2 = _look_up(s2, tables, table, n2)
            s3 = _look_up(s3, tables, table, n3)
            table += 128
        # Nibble i of word j holds entry 4 * i + j: brought into order, neighbouring lanes write neighbouring entries.
        even, odd = tl.join(_in_order(s0), _in_order(s2)), tl.join(_in_order(s1), _in_order(s3))
        part = tl.reshape(tl.join(even, odd), [32 * WORDS])
        entry = tl.arange(0, 32 * WORDS)
        here = entry < count
        if target < size:  # noqa: SIM108 - one value or the other, not both: a branch for the whole block
            place = target + entry
        else:
            place = tl.load(index + (target - size) + entry, here, other=0)
        before = tl.load(sums + place, here, other=0)
        tl.store(sums + place, before + part, here)


def add_signs(
    codes: torch.Tensor,
    values: Integers,
    blocks: torch.Tensor,
    index: torch.Tensor,
    sums: torch.Tensor,
    tuning: Tuning = Tuning(),
) -> None:
    """Add a batch of one-bit updates to ``sums``.

    Args:
        codes: Packed bits, uint8 [clients, bytes]. ``bytes`` is a multiple of 4, and at least 4 more than the
            bits need.
        values: Fixed-point values that bit 0 and bit 1 add, int64 [clients, rows, 2].
        blocks: Contiguous int64 [blocks, 5], as in :mod:`edgefl_server.aggregate.scatter`. No two name the same
            entry.
        index: Model positions of scattered entries, int64.
        sums: Flat model, int64, changed in place.
        tuning: Division of the work.
    """
    if not len(blocks) or not len(codes):
        return
    tables = torch.from_numpy(sign_tables(values)).to(codes.device).view(torch.uint8)
    words = codes.view(torch.int32)
    options = {} if tuning.registers is None else {"maxnreg": tuning.registers}
    _add_signs[len(blocks), triton.cdiv(BLOCK, 32 * tuning.words)](
        words,
        words.stride(0),
        len(codes),
        tables,
        blocks,
        index,
        sums.numel(),
        sums,
        WORDS=tuning.words,
        num_warps=tuning.warps,
        **options,
    )


def sign_tables(values: Integers) -> Integers:
    """Return lookup tables that add four clients' one-bit codes at once, int64 [rows, groups of clients, 16].

    Entry c is the sum of the values of the four clients, where bit k of c is the bit of client k. ``values``, int64
    [clients, rows, 2], are what bit 0 and bit 1 of each client add. Missing clients of the last group add 0.
    """
    clients, rows, _ = values.shape
    full = np.zeros((-(-clients // GROUP) * GROUP, rows, 2), np.int64)
    full[:clients] = values
    grouped = full.reshape(-1, GROUP, rows, 2)
    bits = np.arange(1 << GROUP)[:, None] >> np.arange(GROUP) & 1
    tables = np.zeros((rows, len(grouped), 1 << GROUP), np.int64)
    for k in range(GROUP):
        tables += grouped[:, k].transpose(1, 0, 2)[:, :, bits[:, k]]
    return tables
