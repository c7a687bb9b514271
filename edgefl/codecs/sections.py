"""From named tensors to the arrays of a form: what every ``finish`` that codes ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.codecs.coder import Change, Coder, flat, parted, shaped
from edgefl.codecs.levels import NearestLevels
from edgefl.codecs.packing import bfloat16_bits, pack_codes
from edgefl.contract.tensors import Tensors
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective
from edgefl.wire.update.form import Codes, Encoding, Form, Section, Sparse, Values

FLOATS = 32


@dataclass(frozen=True)
class Parts:
    """The names of an objective's tensors by what becomes of them, each ascending.

    ``coded`` and ``plain`` are trained, ``statistics`` are not. They are names of weights; ``sent`` gives the names of
    the update's tensors that hold some of them.
    """

    coded: tuple[str, ...]
    plain: tuple[str, ...]
    statistics: tuple[str, ...]
    update: Mapping[str, int]

    @classmethod
    def of(
        cls, objective: Objective, *, binarize_1d: bool, kernels_only: bool = False, change: bool = True
    ) -> Parts:
        """``change``: what is sent are changes, of which parameters that are not trained have none."""
        carrier = objective.carrier
        # What is neither in the update nor in the payload travels as a part of something else; the rest stays at home.
        travels = [n for n in objective.weights if n in carrier.update or n not in carrier.payload]
        trained = sorted(set(travels) & set(objective.trainable))
        small = [n for n in trained if not binarize_1d and len(objective.weights[n].shape) < 2]
        others = [n for n in trained if kernels_only and n not in objective.kernels]
        # What travels as a part of something else is coded with it.
        plain = tuple(n for n in trained if n in {*small, *others} and n in carrier.update)
        coded = tuple(n for n in trained if n not in plain)
        statistics = tuple(sorted(set(travels) & set(objective.buffers if change else objective.fixed)))
        sizes = {name: spec.zeros().numel() for name, spec in carrier.update.items()}
        return cls(coded, plain, statistics, sizes)

    def sent(self, names: Sequence[str]) -> tuple[str, ...]:
        """The update's tensors with entries of ``names``."""
        others = {*self.coded, *self.plain, *self.statistics} - set(names)
        shared = [name for name in self.update if name not in others]
        whole = all(name in self.update for name in names)
        return tuple(sorted(name for name in shared if name in names or not whole))


def statistics_coder(bits: int) -> Coder | None:
    """How moving statistics are coded; None: as float32. ConfigError for another number of bits."""
    if bits != FLOATS and not 2 <= bits <= 8:
        raise ConfigError(
            f"moving statistics travel in 2 to 8 bits each, or in 32 as float32; found statistics = {bits}",
            bits=bits,
        )
    return None if bits == FLOATS else NearestLevels(bits, same_sign=True)


def form_of(
    codec: str,
    version: int,
    parts: Parts,
    encoding: Encoding,
    statistics: Coder | None,
    *,
    change: bool = True,
    groups: Mapping[str, int] | None = None,
) -> Form:
    """The form of an update whose coded tensors have ``encoding``; without ``groups`` each has a scale of its own."""
    numbered = {name: number for number, name in enumerate(parts.coded)} if groups is None else groups
    sections = [Section(parts.sent(parts.coded), encoding, numbered if isinstance(encoding, Codes) else {})]
    if parts.plain:
        sections.append(Section(parts.sent(parts.plain), Values()))
    if parts.statistics:
        coding = Values() if statistics is None else statistics.encoding
        own = {name: number for number, name in enumerate(parts.statistics)} if statistics is not None else {}
        sections.append(Section(parts.sent(parts.statistics), coding, own))
    return Form(codec, version, tuple(sections), change)


def arrays(form: Form, packed: Mapping[str, Tensor], scales: Sequence[Tensor]) -> Tensors:
    """The arrays of ``form``: ``packed`` holds codes or values by update tensor, ``scales`` those of each section that has
    some, [groups]."""
    codes: list[Tensor] = []
    values: list[Tensor] = []
    halves: list[Tensor] = []
    flags: list[Tensor] = []
    for section in form.sections:
        own = [shaped(packed[name], (packed[name].numel(),)) for name in section.names]
        match section.encoding:
            case Codes(bits=bits):
                codes.append(pack_codes(own, bits))
            case Values(dtype="float32"):
                values += own
            case Values(dtype="float16"):
                halves.append(flat(own).to(torch.float16))
            case Values():
                halves.append(bfloat16_bits(flat(own)))
            case Sparse() as sparse:
                for x in own:
                    chosen = largest(x, sparse.kept(x.numel()))
                    values.append(x.index_select(0, chosen))
                    flags.append(torch.zeros(x.numel()).scatter(0, chosen, torch.ones(chosen.shape)))
    parts = {"codes": codes, "scales": scales, "values": values, "halves": halves}
    flat_arrays = {name: flat(items) for name, items in parts.items() if items}
    return flat_arrays | ({"mask": pack_codes([flat(flags)], 1)} if flags else {})


def largest(x: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` entries of largest magnitude of a flat tensor, ascending, int64. NaN is the largest:
    engines order it as they like, and the server must see it."""
    size = torch.where(torch.isnan(x), torch.full((), torch.inf), x.abs())
    positions = torch.topk(size, count, sorted=False).indices
    return torch.topk(positions, count, largest=False, sorted=True).values


def statistics_codes(
    names: Sequence[str], values: Tensors, base: Tensors, coder: Coder | None
) -> tuple[Tensors, list[Tensor]]:
    """(codes, scales) of moving statistics, or (their values, none) where they travel as float32."""
    own = {name: values[name] for name in names}
    if coder is None or not own:
        return own, []
    coded = coder.code(Change.of(names, own, base))
    return parted(coded.codes, own), [] if coded.scale is None else [coded.scale]
