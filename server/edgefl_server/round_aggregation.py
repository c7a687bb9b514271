"""Aggregation of one round: the layout of each tier's updates, and the sums that they are added to.

Nothing here imports torch. Worker processes (:mod:`edgefl_server.shards`) receive a :class:`RoundAggregationSpec`, build a
:class:`RoundAggregation` of their own, and their sums are merged exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgefl.errors import ProtocolError, UpdateRejected
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.mqtt.messages import Update
from edgefl.wire.norm_statistics import NORMS
from edgefl.wire.regions import Region
from edgefl.wire.statistics import STATISTICS
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import Form, float32_bytes
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.aggregator import Aggregator, CheckedArrays, NormClip
from edgefl_server.aggregate.integer_sums import DeviceSums, ReportCollector, SumBlocks
from edgefl_server.aggregate.robust import RobustRule
from edgefl_server.aggregate.scatter import Layout, TierBlocks
from edgefl_server.aggregate.statistics import StatisticsBounds
from edgefl_server.coordinator.states import OpenRound

if TYPE_CHECKING:
    from edgefl.contract.server import ServerOpt

_TENSOR_BYTES = 256
"""Upper bound of the header's size per tensor, without its name."""
_NAME_LETTER_BYTES = 6
"""Upper bound of the header's size per letter of a tensor's name, escaped."""
_MESSAGE_BYTES = 1 << 16
"""Upper bound of the size of an update's message without its tensors."""


@dataclass(frozen=True)
class UpdateLayout:
    """Layout of a tier's updates in a round: encoding and positions in the global model.

    Attributes:
        form: Encoding of the arrays.
        manifest: Manifest of the tier's bundle.
        mask_bits: Largest number of bits that the masks of an update may have.
        sent: Positions of the sent tensors in the global model, by local name.
        averaged: Positions of the averaged tensors in the global model, by local name.
        unfolds: True if the server computes the averaged tensors from the sent ones.
    """

    form: Form
    manifest: Manifest
    mask_bits: int
    sent: Mapping[str, Region]
    averaged: Mapping[str, Region]
    unfolds: bool = False


@dataclass(frozen=True)
class CheckedUpdate:
    """Validated update.

    Attributes:
        sent: Arrays as the device sent them.
        added: Arrays to add to the sums. Some algorithms compute them from the sent ones.
    """

    sent: CheckedArrays
    added: CheckedArrays


class StartWeights(Protocol):
    """Model from which devices began their training (:class:`edgefl_server.rounds.RoundModel`)."""

    @property
    def received(self) -> Arrays:
        """Weights as devices receive them."""


@dataclass(frozen=True)
class RoundAggregation:
    """Sums of a round that receives updates, and the layouts of these updates.

    Attributes:
        spec: Specification that this aggregation was built from.
        aggregator: Sums of the updates.
        sent_bytes: Bytes that the server had sent in total when the round began.
        by_turns: True if the updates are too large to request all at once.
        began: In asynchronous rounds, the models that devices may have begun with, by round. Updates are then added as
            changes of these models. Otherwise empty.
    """

    spec: RoundAggregationSpec
    aggregator: Aggregator
    sent_bytes: int = 0
    by_turns: bool = False
    began: Mapping[int, StartWeights] = field(default_factory=dict)

    def update_layout(self, tier: str, number: int) -> UpdateLayout:
        """Return the layout of the updates of ``tier`` that begin from the model of round ``number``: this one or an
        earlier one.
        """
        return self.spec.older.get(number, self.spec.update_layouts)[tier]

    @property
    def number(self) -> int:
        """Number of the round."""
        return self.spec.number

    @property
    def update_layouts(self) -> Mapping[str, UpdateLayout]:
        """Layouts of the updates that begin from this round's model, by tier."""
        return self.spec.update_layouts

    @cached_property
    def _sizes(self) -> dict[str, _UpdateSizes]:
        return {tier: self._sizes_of(layout) for tier, layout in self.update_layouts.items()}

    def _sizes_of(self, layout: UpdateLayout) -> _UpdateSizes:
        pieces = self._pieces(layout)
        header = _TENSOR_BYTES * (1 + len(pieces.expected)) + _NAME_LETTER_BYTES * sum(
            map(len, pieces.expected)
        )
        payload = sum(
            np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in pieces.expected.values()
        )
        return _UpdateSizes(header, payload + header + _MESSAGE_BYTES, float32_bytes(pieces.shapes))

    def _pieces(self, layout: UpdateLayout) -> TierBlocks:
        if self.spec.evaluates:
            return SumBlocks.of(layout.manifest)
        return self.aggregator.pieces(layout.sent, layout.form)

    def max_update_bytes(self, tier: str) -> int:
        """Return the size limit of an update of ``tier`` in bytes; no valid update is larger."""
        return self._sizes[tier].maximum

    def float32_bytes(self, tier: str) -> int:
        """Return the size in bytes that the tensors of an update of ``tier`` have in float32."""
        return self._sizes[tier].float32

    def fits(self, opened: OpenRound, nbytes: int) -> bool:
        """Return True if all updates of the round, at their largest size, together have at most ``nbytes``."""
        holders = Counter(assignment.tier for assignment in opened.assignments.values())
        return sum(count * self.max_update_bytes(tier) for tier, count in holders.items()) <= nbytes

    def weight(self, claimed: int) -> int:
        """Return the weight in the mean of an update whose device claims the weight ``claimed``: at most the cap of
        the round.
        """
        return min(claimed, self.spec.weight_cap)

    def check(self, update: Update) -> CheckedUpdate:
        """Validate the tensors of an update, and return them as received and as they are added to the sums.

        Raises:
            UpdateRejected: If names, shapes, dtypes or values differ from what the tier sends.
        """
        return self.check_sent(update.tier, update.tensors, update.round, update.samples)

    def check_sent(self, tier: str, sent_bytes: bytes, number: int, samples: int) -> CheckedUpdate:
        """Decode and validate the encoded tensors of an update.

        Args:
            tier: Tier of the device.
            sent_bytes: Tensors as they were sent, in safetensors format.
            number: Round whose model the device began with.
            samples: Number of rows that the device used.

        Returns:
            The tensors as they were sent, and as they are added to the sums.

        Raises:
            UpdateRejected: If names, shapes, dtypes or values differ from what the tier sends.
        """
        layout = self.update_layout(tier, number)
        try:
            tensors.check_bare(sent_bytes, self._sizes[tier].header)
            arrays = tensors.load(sent_bytes, max_bits=layout.mask_bits)
        except ProtocolError as error:
            raise UpdateRejected("malformed", error.message) from error
        if self.spec.evaluates:
            manifest, blocks = layout.manifest, SumBlocks.of(layout.manifest)
            if manifest.exchange == STATISTICS:
                report = DeviceSums.check_statistics(arrays, blocks, tier, samples, manifest)
            elif manifest.exchange == NORMS:
                report = DeviceSums.check_norms(arrays, blocks, tier, samples)
            else:
                report = DeviceSums.check(arrays, blocks, tier, samples, SumBlocks.labels(manifest))
            return CheckedUpdate(report, report)
        sent = self.aggregator.check(arrays, layout.sent, layout.form)
        if self.began:
            return CheckedUpdate(sent, self.aggregator.as_change(sent, self.began[number].received))
        server = self.spec.server
        if not layout.unfolds or server is None:
            return CheckedUpdate(sent, sent)
        averaged = server.unfolded(sent.named)
        return CheckedUpdate(sent, self.aggregator.check(averaged, layout.averaged, layout.form))


@dataclass(frozen=True)
class _UpdateSizes:
    """Sizes of a tier's updates in bytes: largest header, largest message, and tensors in float32."""

    header: int
    maximum: int
    float32: int


@dataclass(frozen=True)
class RoundAggregationSpec:
    """Specification of a :class:`RoundAggregation`, from which each process builds its own.

    Attributes:
        number: Number of the round.
        update_layouts: Layouts of the updates by tier.
        server: Server optimizer, if it computes the averaged tensors from the sent ones; otherwise None.
        weight_cap: Largest weight of one update.
        older: Layouts of earlier rounds whose devices still work.
        evaluates: True if devices report integer sums instead of updates.

    For the other fields see :class:`edgefl_server.aggregate.aggregator.Aggregator`.
    """

    number: int
    update_layouts: Mapping[str, UpdateLayout]
    server: ServerOpt | None
    layout: Layout
    weight_limit: int
    weight_cap: int
    rule: RobustRule
    threads: int = 0
    base: Mapping[str, Array] | None = None
    clip: NormClip | None = None
    statistics: StatisticsBounds | None = None
    older: Mapping[int, Mapping[str, UpdateLayout]] = field(default_factory=dict)
    evaluates: bool = False

    def build(
        self, *, device: str = "auto", sums: Accumulator | None = None, sent_bytes: int = 0
    ) -> RoundAggregation:
        """Build the aggregation of a round without updates.

        Args:
            device: Processor that sums updates: ``"cpu"``, ``"cuda"`` or ``"auto"``.
            sums: Sums of an earlier round, whose memory is used again if the size is the same.
            sent_bytes: Bytes that the server has sent in all.
        """
        if self.evaluates:
            return RoundAggregation(self, ReportCollector(sums), sent_bytes)
        aggregator = Aggregator(
            self.layout,
            weight_limit=self.weight_limit,
            device=device,
            threads=self.threads,
            base=self.base,
            rule=self.rule,
            sums=sums if sums is not None and sums.size == self.layout.size else None,
            clip=self.clip,
            statistics=self.statistics,
        )
        return RoundAggregation(self, aggregator, sent_bytes)
