"""Binarized update of FedBAT: its tensors, its step sizes, and ``finish``, which sends a bit per entry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from edgefl.algorithms.baselines.steps import weight_ports
from edgefl.codecs.binarize import StepSize, StepSizeGroups, draw, sign_codes, unpack_signs
from edgefl.codecs.codec import Change, Codec, Coder, spread, unflatten
from edgefl.codecs.coders import code_signs
from edgefl.codecs.packing import UpdateParts, code_statistics, form_of, pack, statistics_coder
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.objective.parts import held_ports
from edgefl.wire.bits import packed_bytes
from edgefl.wire.update.form import SIGNS, CodeEncoding, Form

UploadMode = Literal["resample_final", "last_forward", "det_sign"]


@dataclass(frozen=True, eq=False)
class BinarizedUpdate:
    """Tensors whose update FedBAT sends as signs (``parts.coded``), their step sizes, and the names of their state.

    ``state.change.*`` is m, the change of each tensor; ``state.scale`` and ``state.log_scale`` are alpha' and
    alpha_e, [groups]; ``hyper.rho`` is the learning speed of alpha. If ``learned`` is False, alpha is norm_inf(m),
    without state. ``bounds`` are the smallest and the largest learned alpha.
    """

    objective: Objective
    parts: UpdateParts
    groups: StepSizeGroups
    learned: bool
    bounds: tuple[float, float] | None = None

    def specs(self, names: Iterable[str]) -> dict[str, TensorSpec]:
        """Return the specs of the weights ``names``, by name."""
        return {name: self.objective.weights[name] for name in names}

    @cached_property
    def ports(self) -> dict[str, TensorSpec]:
        """Specs of the frozen weights, of the submodel's masks and thresholds (``state.gate.*``), and of m, by port
        (input or output name).
        """
        return held_ports(self.objective) | prefixed("state.change", self.specs(self.objective.trainable))

    @property
    def size_state(self) -> dict[str, TensorSpec]:
        """Specs of the state of learned step sizes, by port (input or output name). {} if they are not learned."""
        each = TensorSpec((self.groups.count,))
        return {"state.scale": each, "state.log_scale": each} if self.learned else {}

    @property
    def size_ports(self) -> dict[str, TensorSpec]:
        """Specs of the inputs of :meth:`step_sizes` besides m, by port (input or output name)."""
        return self.size_state | ({"hyper.rho": TensorSpec(())} if self.learned else {})

    def size(self, tensors: Tensors) -> StepSize:
        """Return the formula of learned step sizes, with the learning speed ``tensors["hyper.rho"]``."""
        return StepSize(tensors["hyper.rho"], self.bounds)

    @property
    def sent_ports(self) -> dict[str, TensorSpec]:
        """Specs of ``state.sent.scales`` and ``state.sent.codes``: step sizes and packed signs of the last step.

        Only uploads of mode "last_forward" have this state.
        """
        size = sum(packed_bytes(entries) for entries in self.entries.values())
        codes = TensorSpec((size,), torch.uint8, below=256)
        return {"state.sent.scales": TensorSpec((self.groups.count,)), "state.sent.codes": codes}

    @cached_property
    def entries(self) -> dict[str, int]:
        """Number of entries of each binarized tensor, in the trained shape, by name."""
        return {name: math.prod(self.objective.weights[name].shape) for name in self.parts.coded}

    def mean_sizes(self, m: Tensors, held: Tensors) -> Tensor:
        """Return the mean absolute change ||m||_1 / d of each group (fedbat.md, eq. 13).

        A group holds the binarized tensors that share a step size, usually one tensor; d is the number of its held entries.

        Args:
            m: Change of each tensor in this round, by name.
            held: Masks of the entries that the tier holds, by name. A tensor without a mask is held whole.

        Returns:
            float32 (groups,), in the order of the groups.
        """
        counts = {name: self._count(name, held, m[name].dtype) for name in self.parts.coded}
        return self._norms(m) / self.groups.sums(counts).clamp(min=1.0)

    def step_sizes(self, tensors: Tensors) -> Tensor:
        """Return alpha, [groups], from ``state.change.*`` and the state of learned step sizes.

        It is 0 for a group with m = 0, and NaN if m is not finite, so that the server rejects the update.
        """
        m = select(tensors, "state.change")
        norms = self._norms(m)
        if self.learned:
            alpha = self.size(tensors).of(tensors["state.scale"], tensors["state.log_scale"])
        else:
            alpha = self.groups.largest({name: m[name].abs().max() for name in self.parts.coded})
        alpha = torch.where(norms <= torch.finfo(torch.float32).max, alpha, math.nan)
        return torch.where(norms == 0, 0.0, alpha)

    def _norms(self, m: Tensors) -> Tensor:
        return self.groups.sums({name: m[name].abs().sum() for name in self.parts.coded})

    def _count(self, name: str, held: Tensors, dtype: torch.dtype) -> Tensor:
        if name in held:
            return held[name].sum().to(dtype)
        return torch.full((), float(self.entries[name]), dtype=dtype)


@dataclass(frozen=True, eq=False)
class FedBATFinish:
    """Function ``finish`` of FedBAT, with its inputs and the form (layout) of the update that it returns.

    It sends the signs of one draw with their step sizes, other trained tensors as float32, and moving statistics.
    """

    update: BinarizedUpdate
    codec: Codec
    mode: UploadMode
    statistics_bits: int

    @property
    def last_draw(self) -> bool:
        """True if ``finish`` sends the draw of the last step, which the steps then store."""
        return self.mode == "last_forward"

    @cached_property
    def statistics(self) -> Coder | None:
        return statistics_coder(self.statistics_bits)

    @cached_property
    def form(self) -> Form:
        groups = self.update.groups.numbers
        codec, parts = self.codec, self.update.parts
        return form_of(
            codec.name, codec.version, parts, CodeEncoding(1, SIGNS), self.statistics, groups=groups
        )

    @property
    def ports(self) -> dict[str, TensorSpec]:
        ports = weight_ports(self.update.objective) | self.update.ports
        if self.last_draw:
            return ports | self.update.sent_ports
        return ports | self.update.size_ports | prefixed("noise", self.update.specs(self.update.parts.coded))

    def finish(self, tensors: Tensors) -> Tensors:
        """Return the update that a device sends, as tensors ``update.*`` in the layout of :attr:`form`.

        It has the packed signs and step sizes of binarized tensors, the changes of all others as floats, and the moving
        statistics of batch norm.

        Args:
            tensors: State after the last local step, and the weights at the start of the round, by port name.
        """
        parts, carrier = self.update.parts, self.update.objective.carrier
        left, gates = select(tensors, "state.weights"), select(tensors, "state.gate")
        base = carrier.unpack(select(tensors, "weights"))[0]
        values = {name: left[name] - base[name] for name in parts.statistics}
        statistics, others = code_statistics(parts.statistics, values, base, self.statistics)
        scales, codes = self._code_changes(tensors, base)
        packed = carrier.pack(left | select(tensors, "state.change") | codes | statistics, gates)
        return prefixed("update", pack(self.form, packed, [scales, *others]))

    def _code_changes(self, tensors: Tensors, base: Tensors) -> tuple[Tensor, Tensors]:
        """Return (alpha [groups], codes by tensor name: 1.0 for +, 0.0 for -).

        Args:
            tensors: Inputs of ``finish`` by port (input or output name).
            base: Weights at the start of the round, by name.
        """
        if self.last_draw:
            return tensors["state.sent.scales"], self._unpack_codes(tensors["state.sent.codes"])
        names, m, alpha = (
            self.update.parts.coded,
            select(tensors, "state.change"),
            self.update.step_sizes(tensors),
        )
        change = Change.of(names, m, base, uniform=select(tensors, "noise"))
        if self.mode == "det_sign":
            codes = code_signs(change, "random")
        else:
            each = self.update.groups.spread(alpha)
            codes = sign_codes(
                draw(change.value, spread([each[name] for name in names], change.sizes), change.draws())
            )
        return alpha, unflatten(codes, {name: m[name] for name in names})

    def _unpack_codes(self, packed: Tensor) -> Tensors:
        """Return the codes of the last step's draw, by name, in the shapes of the weights. ``packed`` is
        ``state.sent.codes``.
        """
        codes, start = {}, 0
        for name, entries in self.update.entries.items():
            shape = self.update.objective.weights[name].shape
            codes[name] = unpack_signs(packed, start, entries).reshape(shape)
            start += packed_bytes(entries)
        return codes
