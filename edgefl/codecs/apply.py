"""A program whose update a codec codes: everything but ``finish`` stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from edgefl.codecs.codec import Codec
from edgefl.codecs.coder import Change, Coder
from edgefl.codecs.form import Codes, Form, Values
from edgefl.codecs.sections import Parts, arrays, form_of, largest, statistics_coder, statistics_codes
from edgefl.programs.contract import Function, Program, Tensors, TensorSpec, prefixed, select
from edgefl.programs.objective import Objective
from edgefl.programs.sgd import held_ports
from edgefl.wire.errors import ConfigError


def applied(codec: Codec, program: Program, objective: Objective) -> Program:
    """``program`` with the update of ``codec``. ConfigError where the two, or the submodel, do not go together."""
    if codec.trained is None:
        return program
    if program.form.sections:
        raise ConfigError(
            f"program {program.name!r} codes its update itself ({program.form.codec}); leave out codec {codec.name!r}",
            program=program.name,
            codec=codec.name,
        )
    coding = _Coding(codec, objective)
    finish = Function("finish", coding.finish, coding.ports)
    return replace(program, finish=finish, form=coding.form, masks=coding.masks)


@dataclass(frozen=True, eq=False)
class _Coding:
    codec: Codec
    objective: Objective

    def __post_init__(self) -> None:
        if self.codec.feedback and isinstance(self.codec.trained, Values):
            raise ConfigError(
                f"codec {self.codec.name!r} loses next to nothing, which needs no feedback; leave it out",
                codec=self.codec.name,
            )
        if self.codec.feedback and set(self.objective.carrier.update) != set(self.objective.weights):
            raise ConfigError(
                f"codec {self.codec.name!r} keeps a residual per entry on the device, and this submodel holds other "
                "entries in each round; choose a codec without feedback or another kind of submodel",
                codec=self.codec.name,
            )

    @cached_property
    def parts(self) -> Parts:
        codec = self.codec
        return Parts.of(self.objective, binarize_1d=codec.binarize_1d, kernels_only=codec.kernels_only)

    @property
    def coder(self) -> Coder | None:
        found = self.codec.trained
        return found if isinstance(found, Coder) else None

    @cached_property
    def statistics(self) -> Coder | None:
        # Of weights themselves, not of a change, a few levels would say too little.
        return statistics_coder(self.codec.statistics) if self.codec.change else None

    @cached_property
    def form(self) -> Form:
        trained = self.codec.trained
        encoding = trained.encoding if isinstance(trained, Coder) else trained
        assert encoding is not None
        codec = self.codec
        return form_of(codec.name, codec.version, self.parts, encoding, self.statistics, change=codec.change)

    @property
    def masks(self) -> Mapping[str, int]:
        entries = sum(self.parts.update[name] for name in self.form.masked)
        return {"mask": entries} if entries else {}

    @cached_property
    def ports(self) -> dict[str, TensorSpec]:
        weights = {name: self.objective.weights[name] for name in self.parts.coded}
        ports = prefixed("weights", self.objective.carrier.payload) | held_ports(self.objective)
        if self.codec.feedback:
            ports |= prefixed("carry.residual", weights)
        if self.coder is not None and self.coder.random:
            ports |= prefixed("noise", weights)
        return ports

    def finish(self, tensors: Tensors) -> Tensors:
        """``update.*`` in :attr:`form`, and what coding lost of each change, for the next round."""
        left, gates = select(tensors, "state.weights"), select(tensors, "state.gate")
        base = self.objective.carrier.unpack(select(tensors, "weights"))[0]
        values = {name: left[name] - base[name] for name in left} if self.codec.change else left
        if self.codec.feedback:
            values = values | {
                name: values[name] + tensors[f"carry.residual.{name}"] for name in self.parts.coded
            }
        coded, scales = self._codes(values, base, self.objective.carrier.held(gates), tensors)
        names = self.parts.statistics
        statistics, others = statistics_codes(names, values, base, self.statistics)
        packed = self.objective.carrier.pack(values | coded | statistics, gates)
        told = [scales, *([[]] if self.parts.plain else []), *([others] if names else [])]
        update = prefixed("update", arrays(self.form, packed, told))
        return update | (
            prefixed("carry.residual", self._lost(values, coded, scales)) if self.codec.feedback else {}
        )

    def _codes(
        self, values: Tensors, base: Tensors, held: Tensors, tensors: Tensors
    ) -> tuple[Tensors, list[Tensor]]:
        if self.coder is None:
            return {}, []
        codes, scales = {}, []
        for name in self.parts.coded:
            uniform = tensors.get(f"noise.{name}")
            one = self.coder.code(Change(values[name], base[name], held.get(name), uniform))
            codes[name] = one.codes
            if one.scale is not None:
                scales.append(one.scale)
        return codes, scales

    def _lost(self, values: Tensors, codes: Tensors, scales: list[Tensor]) -> Tensors:
        """u - mhat: what the server does not hear of."""
        encoding = self.form.sections[0].encoding
        lost = {}
        for number, name in enumerate(self.parts.coded):
            value = values[name]
            if isinstance(encoding, Codes):
                levels = torch.tensor(encoding.levels)
                told = levels.index_select(0, codes[name].reshape(-1).to(torch.int64)).reshape(value.shape)
                scale = scales[number] if encoding.scale is None else encoding.scale
                lost[name] = value - scale * told
            else:
                flat = value.reshape(-1)
                kept = largest(flat, encoding.kept(flat.numel()))  # type: ignore[union-attr]
                lost[name] = flat.scatter(0, kept, torch.zeros(kept.shape)).reshape(value.shape)
        return lost
