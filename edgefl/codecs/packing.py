"""Packing of named tensors into the arrays of a form, the last part of every coding ``finish``.

It uses standard ops only and gives the same bits on each engine (layout: ``edgefl.wire.update.form``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.codecs.codec import Change, Coder, flatten, reshape, split, unflatten
from edgefl.codecs.coders import NearestLevels
from edgefl.contract.tensors import Tensors
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective
from edgefl.wire.update.form import CodeEncoding, Encoding, FloatEncoding, Form, Section, SparseEncoding

_BIAS, _MANTISSA, _LEAST_EXPONENT = 127.0, 128.0, -126.0
_SIGN, _INFINITY = 32768.0, 255.0 * _MANTISSA


def pack_codes(parts: Sequence[Tensor], bits: int) -> Tensor:
    """Return the codes of all ``parts`` packed into bytes, uint8. Each part starts at a new byte.

    Args:
        parts: Whole numbers 0 .. 2**bits - 1 of any dtype and shape.
        bits: Bits of a code.
    """
    codes, sizes = flatten(parts).to(torch.float32), [part.numel() for part in parts]
    if 8 % bits:  # a code may lie across two bytes
        codes, sizes, bits = _split_bits(codes, bits), [bits * size for size in sizes], 1
    rows = _pad_to_bytes(codes, sizes, 8 // bits)
    if bits == 8:
        return rows.to(torch.uint8)
    # A product of matrices, as one op that every engine is fast at; sums up to 255 are exact.
    powers = torch.tensor([float(1 << shift) for shift in range(0, 8, bits)])
    return (rows.reshape(-1, 8 // bits) @ powers).to(torch.uint8)


def _split_bits(codes: Tensor, bits: int) -> Tensor:
    """Return the ``bits`` bits of each code, lowest first, one code after the other, as 0.0 and 1.0, flat."""
    left, planes = codes, []
    for _ in range(bits):
        halved = torch.floor(left / 2)
        planes.append(left - 2 * halved)
        left = halved
    return torch.stack(planes, dim=-1).reshape(-1)


def _pad_to_bytes(codes: Tensor, sizes: Sequence[int], each: int) -> Tensor:
    """Return ``codes`` with zeros appended to each part, up to a multiple of ``each`` codes.

    Args:
        codes: Parts, one after the other, flat.
        sizes: Number of codes of each part.
        each: Number of codes that fill one byte.
    """
    if not any(size % each for size in sizes):
        return codes
    padded = [[part, torch.zeros(-part.numel() % each)] for part in split(codes, list(sizes))]
    return torch.cat([part for pair in padded for part in pair if part.numel()])


def bfloat16_bits(x: Tensor) -> Tensor:
    """Return the bits of float32 ``x`` rounded to bfloat16, ties to even, as uint16 of x's shape.

    Values below 2**-126 become 0. Infinity and NaN become infinity. The function uses arithmetic that float32 does
    exactly, because not all engines have bfloat16 or can reinterpret bits. It finds the exponent by halving and doubling,
    which changes only the exponent.
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


FLOATS = 32


@dataclass(frozen=True)
class UpdateParts:
    """Names of an objective's tensors, grouped by their encoding in the update, each group ascending.

    These are names of weights. An update may hold several weights in one tensor; :meth:`sent` returns its tensors.

    Attributes:
        coded: Trained tensors that the codec codes.
        plain: Trained tensors that are sent as float32.
        statistics: Tensors that no gradient moves, such as moving statistics.
        update: Number of entries of each tensor of the update, by its name.
    """

    coded: tuple[str, ...]
    plain: tuple[str, ...]
    statistics: tuple[str, ...]
    update: Mapping[str, int]

    @classmethod
    def of(
        cls,
        objective: Objective,
        *,
        binarize_1d: bool,
        kernels_only: bool = False,
        change: bool = True,
        private: Collection[str] = (),
    ) -> UpdateParts:
        """Return the weights of an objective, grouped by their encoding in the update.

        Args:
            objective: Model part that a tier trains, with its loss.
            binarize_1d: True: code tensors of one dimension, too. False: send them as float32.
            kernels_only: True: code kernels only, and send all other trained tensors as float32.
            change: True: the update holds changes, and parameters that are not trained have none. False: it holds
                weights.
            private: Tensors that stay on the device (:attr:`edgefl.contract.algorithm.Algorithm.private`).
        """
        carrier = objective.carrier
        # What is neither in the update nor in the payload travels as a part of something else; the rest stays at home.
        travels = [
            n
            for n in objective.weights
            if (n in carrier.update or n not in carrier.payload) and n not in private
        ]
        trained = sorted(set(travels) & set(objective.trainable))
        small = [n for n in trained if not binarize_1d and len(objective.weights[n].shape) < 2]
        others = [n for n in trained if kernels_only and n not in objective.kernels]
        # What travels as a part of something else is coded with it.
        plain = tuple(n for n in trained if n in {*small, *others} and n in carrier.update)
        coded = tuple(n for n in trained if n not in plain)
        statistics = tuple(sorted(set(travels) & set(objective.buffers if change else objective.fixed)))
        sizes = {name: spec.zeros().numel() for name, spec in carrier.update.items() if name not in private}
        return cls(coded, plain, statistics, sizes)

    def sent(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the update's tensors that hold entries of the weights ``names``, ascending.

        A carrier (conversion between weights and sent tensors) may put several weights into one tensor. That tensor is
        then returned for each of these weights.
        """
        others = {*self.coded, *self.plain, *self.statistics} - set(names)
        shared = [name for name in self.update if name not in others]
        whole = all(name in self.update for name in names)
        return tuple(sorted(name for name in shared if name in names or not whole))


def statistics_coder(bits: int) -> Coder | None:
    """Return the coder of moving statistics with ``bits`` per entry, or None for 32 bits, which is float32.

    Raises:
        ConfigError: ``bits`` is neither 32 nor from 2 to 8.
    """
    if bits != FLOATS and not 2 <= bits <= 8:
        raise ConfigError(
            f"moving statistics travel in 2 to 8 bits each, or in 32 as float32; found statistics = {bits}",
            bits=bits,
        )
    return None if bits == FLOATS else NearestLevels(bits, same_sign=True)


def form_of(
    codec: str,
    version: int,
    parts: UpdateParts,
    encoding: Encoding,
    statistics: Coder | None,
    *,
    change: bool = True,
    groups: Mapping[str, int] | None = None,
) -> Form:
    """Return the form (layout of the arrays) of an update whose coded tensors have ``encoding``.

    Args:
        codec: Name of the codec.
        version: Version of its bytes.
        parts: Names of the weights by encoding.
        encoding: Encoding of the coded tensors.
        statistics: Coder of moving statistics. None: they are float32.
        change: True: the update holds changes. False: it holds weights.
        groups: Index of the scale of each coded tensor, by name. None: each tensor has its own scale.
    """
    numbered = {name: number for number, name in enumerate(parts.coded)} if groups is None else groups
    sections = [
        Section(parts.sent(parts.coded), encoding, numbered if isinstance(encoding, CodeEncoding) else {})
    ]
    if parts.plain:
        sections.append(Section(parts.sent(parts.plain), FloatEncoding()))
    if parts.statistics:
        coding = FloatEncoding() if statistics is None else statistics.encoding
        own = {name: number for number, name in enumerate(parts.statistics)} if statistics is not None else {}
        sections.append(Section(parts.sent(parts.statistics), coding, own))
    return Form(codec, version, tuple(sections), change)


def pack(form: Form, packed: Mapping[str, Tensor], scales: Sequence[Tensor]) -> Tensors:
    """Return the arrays of an update in ``form``, by name, all flat.

    Names are ``codes``, ``scales``, ``values``, ``halves`` and ``mask``; an array that the form does not need is
    omitted.

    Args:
        form: Form of the update, which lists its tensors and their encodings.
        packed: Codes or values, by name of the update's tensor.
        scales: Scales of each section that has scales, [groups], in the form's order.
    """
    codes: list[Tensor] = []
    values: list[Tensor] = []
    halves: list[Tensor] = []
    flags: list[Tensor] = []
    for section in form.sections:
        own = [reshape(packed[name], (packed[name].numel(),)) for name in section.names]
        match section.encoding:
            case CodeEncoding(bits=bits):
                codes.append(pack_codes(own, bits))
            case FloatEncoding(dtype="float32"):
                values += own
            case FloatEncoding(dtype="float16"):
                halves.append(flatten(own).to(torch.float16))
            case FloatEncoding():
                halves.append(bfloat16_bits(flatten(own)))
            case SparseEncoding() as sparse:
                for x in own:
                    chosen = top_k(x, sparse.kept(x.numel()))
                    values.append(x.index_select(0, chosen))
                    flags.append(torch.zeros(x.numel()).scatter(0, chosen, torch.ones(chosen.shape)))
    parts = {"codes": codes, "scales": scales, "values": values, "halves": halves}
    flat_arrays = {name: flatten(items) for name, items in parts.items() if items}
    return flat_arrays | ({"mask": pack_codes([flatten(flags)], 1)} if flags else {})


def top_k(x: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` entries of largest magnitude of a flat tensor, ascending, int64.

    NaN counts as the largest, because engines order it arbitrarily and the server must detect it.
    """
    size = torch.where(torch.isnan(x), torch.full((), torch.inf), x.abs())
    positions = torch.topk(size, count, sorted=False).indices
    return torch.topk(positions, count, largest=False, sorted=True).values


def code_statistics(
    names: Sequence[str], values: Tensors, base: Tensors, coder: Coder | None
) -> tuple[Tensors, list[Tensor]]:
    """Return (codes by name, scales) of moving statistics. If ``coder`` is None, return their values and no scales.

    Args:
        names: Names of the statistics.
        values: Changes or values by name.
        base: Initial values by name.
        coder: Coder of the statistics, or None for float32.
    """
    own = {name: values[name] for name in names}
    if coder is None or not own:
        return own, []
    coded = coder.code(Change.of(names, own, base))
    return unflatten(coded.codes, own), [] if coded.scale is None else [coded.scale]
