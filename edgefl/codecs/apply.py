"""Application of a codec to an algorithm: only ``finish`` changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from edgefl.codecs.codec import Change, Codec, CodedChange, Coder, flatten, split, unflatten
from edgefl.codecs.packing import UpdateParts, code_statistics, form_of, pack, statistics_coder, top_k
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select
from edgefl.errors import ConfigError
from edgefl.facts.combinations import combination_error
from edgefl.objective.objective import Objective
from edgefl.objective.parts import held_ports, private_ports, store_private
from edgefl.wire.update.form import CodeEncoding, Form, SparseEncoding


def apply_codec(codec: Codec, algorithm: Algorithm, objective: Objective) -> Algorithm:
    """Return a copy of ``algorithm`` whose ``finish`` codes the update with ``codec``. The codec ``dense`` changes
    nothing.

    Args:
        codec: Codec. One with feedback stores its coding error (the residual) per entry on the device.
        algorithm: Algorithm that sends the trained weights as they are.
        objective: Model and loss of the algorithm. If the codec has feedback, a tier must hold the same entries
            in each round.

    Raises:
        ConfigError: The algorithm codes its update itself, sends more than the weights or has several exchanges (round
            trips between server and device); or the codec leaves out every tensor.
    """
    if codec.trained is None:
        return algorithm
    if algorithm.form.sections:
        raise combination_error(
            f"algorithm {algorithm.name!r} codes its update itself ({algorithm.form.codec}); leave out codec {codec.name!r}",
            algorithm=algorithm.name,
            codec=codec.name,
        )
    _check_plain(algorithm, objective, codec)
    coding = _CodecFinish(codec, objective, algorithm.private)
    if not coding.parts.coded:
        raise ConfigError(
            f"codec {codec.name!r} has no tensor to code here, since biases and norms are left out; set binarize_1d",
            codec=codec.name,
        )
    finish = Function("finish", coding.finish, coding.ports)
    return replace(algorithm, finish=finish, form=coding.form, masks=coding.masks)


def _check_plain(algorithm: Algorithm, objective: Objective, codec: Codec) -> None:
    """Raise ConfigError if ``algorithm`` sends or stores more than trained weights, or has several exchanges (round
    trips between server and device).

    A codec replaces ``finish``, so anything else that ``finish`` sends or stores would be lost. Private tensors are not:
    the codec's ``finish`` stores them.
    """
    private = private_ports(objective, algorithm.private)
    more = [name for name in algorithm.start.inputs if role_of(name) == "carry" and name not in private]
    more += [name for name in algorithm.finish.inputs if name not in held_ports(objective)]
    if not more and len(algorithm.exchanges) == 1:
        return
    reason = f"it reads {more[0]!r} for it" if more else "in several exchanges"
    raise combination_error(
        f"codec {codec.name!r} codes the change of the weights, and algorithm {algorithm.name!r} sends or keeps "
        f"more than that "
        f"({reason}); choose codec dense, or an algorithm such as fedavg or fedprox",
        algorithm=algorithm.name,
        codec=codec.name,
    )


@dataclass(frozen=True, eq=False)
class _CodecFinish:
    """Function ``finish`` of an algorithm with a codec, with its inputs and the form (layout) of its update."""

    codec: Codec
    objective: Objective
    private: frozenset[str]

    @cached_property
    def parts(self) -> UpdateParts:
        codec = self.codec
        return UpdateParts.of(
            self.objective,
            binarize_1d=codec.binarize_1d,
            kernels_only=codec.kernels_only,
            change=codec.change,
            private=self.private,
        )

    @property
    def coder(self) -> Coder | None:
        """Coder of the trained tensors. None if each entry is sent as a smaller float, or only the largest entries are
        sent.
        """
        coder = self.codec.trained
        return coder if isinstance(coder, Coder) else None

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
        """Number of bits of the update's ``mask``: one per entry of a sparse section. {} without sparse sections."""
        entries = sum(self.parts.update[name] for name in self.form.masked)
        return {"mask": entries} if entries else {}

    @cached_property
    def ports(self) -> dict[str, TensorSpec]:
        """Specs of the inputs of :meth:`finish`, by port (input or output name)."""
        weights = {name: self.objective.weights[name] for name in self.parts.coded}
        ports = prefixed("weights", self.objective.carrier.payload) | held_ports(self.objective)
        if self.codec.feedback:
            ports |= prefixed("carry.residual", weights)
        if self.coder is not None and self.coder.random:
            ports |= prefixed("noise", weights)
        return ports

    def finish(self, tensors: Tensors) -> Tensors:
        """Return ``update.*`` in :attr:`form`, ``carry.residual.*`` if the codec has feedback, the carry of private
        tensors, and ``metric.*`` of the coding.

        The residual is the coding error of each change. The device stores it and adds it to its next change.
        """
        carrier, parts = self.objective.carrier, self.parts
        left, gates = select(tensors, "state.weights"), select(tensors, "state.gate")
        base = carrier.unpack(select(tensors, "weights"))[0]
        values = {name: left[name] - base[name] for name in left} if self.codec.change else left
        old_residual = self._load_residual(tensors) if self.codec.feedback else None
        change = self._change(values, base, carrier.held(gates), tensors, old_residual)
        like = {name: values[name] for name in parts.coded}
        values = values | unflatten(change.value, like)

        coded = None if self.coder is None else self.coder.code(change)
        codes = {} if coded is None else unflatten(coded.codes, like)
        scales = [] if coded is None or coded.scale is None else [coded.scale]
        statistics, others = code_statistics(parts.statistics, values, base, self.statistics)
        packed = carrier.pack(values | codes | statistics, gates)
        outputs = prefixed("update", pack(self.form, packed, [*scales, *others]))
        outputs |= store_private(self.objective, self.private, tensors)

        total = flatten(values[name] for name in (*parts.coded, *parts.plain, *parts.statistics)).sum()
        if old_residual is not None:
            lost = change.value - self._decode(change, coded)
            # The server refuses what is not finite: it learned nothing, so no later round may begin with the new residual.
            residual = torch.where(_finite(total), lost, old_residual)
            outputs |= prefixed("carry.residual", unflatten(residual, like))
        return outputs | self._metrics(change, total)

    def _load_residual(self, tensors: Tensors) -> Tensor:
        """Return the residual of the previous round, flat, with 0 for entries that are not finite."""
        residual = flatten(tensors[f"carry.residual.{name}"] for name in self.parts.coded)
        return torch.where(_finite(residual), residual, 0.0)

    def _change(
        self, values: Tensors, base: Tensors, held: Tensors, tensors: Tensors, kept: Tensor | None
    ) -> Change:
        uniform = None
        if self.coder is not None and self.coder.random:
            uniform = select(tensors, "noise")
        change = Change.of(self.parts.coded, values, base, held, uniform)
        return change if kept is None else replace(change, value=change.value + kept)

    def _decode(self, change: Change, coded: CodedChange | None) -> Tensor:
        """Return the change that the server will decode (mhat), flat, of the shape of ``change.value``.

        If ``coded`` is None, the update is sparse: all but the largest entries of ``change`` become 0.
        """
        encoding = self.form.sections[0].encoding
        if coded is not None:
            assert isinstance(encoding, CodeEncoding)
            scale = encoding.scale if coded.scale is None else change.spread(coded.scale)
            assert scale is not None
            return coded.levels.to(change.value.dtype) * scale
        assert isinstance(encoding, SparseEncoding)
        return flatten(_keep_largest(part, encoding) for part in split(change.value, change.sizes))

    def _metrics(self, change: Change, total: Tensor) -> Tensors:
        """Return the metrics that the codec adds to the update; {} if entries are not sent as codes.

        ``metric.zeros``, if no code means 0: number of unchanged entries, which cannot be sent as such (fedbat.md 8.7).
        ``metric.finite``, if the scale is constant: 1, or NaN if ``total``, the sum of the update, is not finite. A scale
        that is sent would be NaN or infinite itself.
        """
        encoding = self.form.sections[0].encoding
        if not isinstance(encoding, CodeEncoding):
            return {}
        metrics = {} if 0.0 in encoding.levels else {"metric.zeros": change.zeros()}
        return metrics if encoding.scale is None else metrics | {"metric.finite": 1.0 + 0.0 * total}


def _finite(x: Tensor) -> Tensor:
    return x.abs() <= torch.finfo(torch.float32).max  # false for NaN too


def _keep_largest(part: Tensor, sparse: SparseEncoding) -> Tensor:
    """Return ``part`` with 0 for all entries but the largest ones that ``sparse`` sends."""
    positions = top_k(part, sparse.kept(part.numel()))
    return torch.zeros(part.shape, dtype=part.dtype).scatter(0, positions, part.index_select(0, positions))
