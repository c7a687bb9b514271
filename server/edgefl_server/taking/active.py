"""One round as whoever takes its updates needs it: how they are read, and what they are added to.

Nothing here imports torch: updates may be taken by processes of their own (:mod:`edgefl_server.shards`), to which a
:class:`Recipe` travels. Only what an algorithm unfolds on the server needs it, and its workshop has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from edgefl.errors import ProtocolError, UpdateRejected
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.mqtt.messages import Update
from edgefl.wire.regions import Region
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import Form, float32_bytes
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.aggregator import Aggregator, Checked, Clip
from edgefl_server.aggregate.robust import MeanRule
from edgefl_server.aggregate.scatter import Layout
from edgefl_server.aggregate.statistics import Bounds
from edgefl_server.coordinator.states import OpenRound

if TYPE_CHECKING:
    from edgefl.contract.server import ServerOpt

_PLACED_BYTES, _LETTER_BYTES, _TOLD_BYTES = 256, 6, 1 << 16
"""Of an update, beside its numbers: a tensor's shape and place, a letter of its name however it is escaped; metrics, profile
and the message around them."""


@dataclass(frozen=True)
class UpdateReading:
    """How to read the updates of a tier in a round: where the tensors lie that travel, and those that are averaged.

    ``manifest``: of its bundle. ``mask_bits``: most bits that the masks of an update may unfold to. ``unfolds``: what is
    averaged is made of what travelled.
    """

    form: Form
    manifest: Manifest
    mask_bits: int
    sent: Mapping[str, Region]
    averaged: Mapping[str, Region]
    unfolds: bool = False


@dataclass(frozen=True)
class CheckedUpdate:
    """An update whose every name, shape, dtype and value is as it should be: as it was sent, and what is added of it."""

    sent: Checked
    added: Checked


@dataclass(frozen=True)
class ActiveRound:
    """A round while its updates come in: how each tier's are read, and what they are added to.

    ``sent_bytes`` is what the server had sent in all when the round began; ``by_turns``: its updates are too many bytes to
    come all at once. Where devices may have begun in earlier rounds, updates are added as changes: ``received`` has the
    weights that devices began with, by round.
    """

    recipe: Recipe
    aggregator: Aggregator
    sent_bytes: int = 0
    by_turns: bool = False
    received: Mapping[int, Callable[[], Arrays]] = field(default_factory=dict)

    def reading(self, tier: str, number: int) -> UpdateReading:
        """How the updates of ``tier`` are read that begin from round ``number``'s model."""
        return self.recipe.older.get(number, self.recipe.readings)[tier]

    @property
    def number(self) -> int:
        return self.recipe.number

    @property
    def readings(self) -> Mapping[str, UpdateReading]:
        """By tier."""
        return self.recipe.readings

    @cached_property
    def _expected(self) -> dict[str, Mapping[str, tuple[str, tuple[int, ...]]]]:
        """By tier, the arrays of its updates: (dtype, shape) by name."""
        return {
            tier: self.aggregator.pieces(reading.sent, reading.form).expected
            for tier, reading in self.readings.items()
        }

    @cached_property
    def _header_bytes(self) -> dict[str, int]:
        """By tier, what the names and places of an update's tensors may take."""
        return {
            tier: _PLACED_BYTES * (1 + len(expected)) + _LETTER_BYTES * sum(map(len, expected))
            for tier, expected in self._expected.items()
        }

    @cached_property
    def _most_bytes(self) -> dict[str, int]:
        return {
            tier: sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in expected.values())
            + self._header_bytes[tier]
            + _TOLD_BYTES
            for tier, expected in self._expected.items()
        }

    def most_bytes(self, tier: str) -> int:
        """The largest update that a device of ``tier`` has a reason to send: its tensors, and what is told of them."""
        return self._most_bytes[tier]

    @cached_property
    def _float32_bytes(self) -> dict[str, int]:
        return {
            tier: float32_bytes(self.aggregator.pieces(reading.sent, reading.form).shapes)
            for tier, reading in self.readings.items()
        }

    def float32_bytes(self, tier: str) -> int:
        """Bytes of the tensors of an update of ``tier``, if they were float32 and nothing else."""
        return self._float32_bytes[tier]

    def fits(self, opened: OpenRound, nbytes: int) -> bool:
        """Whether all updates of the round together have at most ``nbytes``."""
        holders = Counter(assignment.tier for assignment in opened.assignments.values())
        return sum(count * self.most_bytes(tier) for tier, count in holders.items()) <= nbytes

    def weight(self, claimed: int) -> int:
        """What an update weighs that claims so many samples."""
        return min(claimed, self.recipe.weight_cap)

    def check(self, update: Update) -> CheckedUpdate:
        """UpdateRejected unless the update's tensors are what its tier sends."""
        return self.check_sent(update.tier, update.tensors, update.round)

    def check_sent(self, tier: str, sent_bytes: bytes, number: int) -> CheckedUpdate:
        """The same of the tensors alone, as they travel, that begin from round ``number``'s model."""
        reading = self.reading(tier, number)
        try:
            tensors.check_bare(sent_bytes, self._header_bytes[tier])
            arrays = tensors.load(sent_bytes, max_bits=reading.mask_bits)
        except ProtocolError as error:
            raise UpdateRejected("malformed", error.message) from error
        sent = self.aggregator.check(arrays, reading.sent, reading.form)
        if self.received:
            return CheckedUpdate(sent, self.aggregator.as_change(sent, self.received[number]()))
        server = self.recipe.server
        if not reading.unfolds or server is None:
            return CheckedUpdate(sent, sent)
        averaged = server.unfolded(sent.named)
        return CheckedUpdate(sent, self.aggregator.check(averaged, reading.averaged, reading.form))


@dataclass(frozen=True)
class Recipe:
    """What an :class:`ActiveRound` is made from: each process that takes updates of the round makes its own, and their sums
    come together exactly. ``older``: the readings of earlier rounds whose devices are at work. ``weight_cap`` is the most
    that one update weighs, ``server`` is None where nothing is unfolded; the others are those of
    :class:`edgefl_server.aggregate.aggregator.Aggregator`."""

    number: int
    readings: Mapping[str, UpdateReading]
    server: ServerOpt | None
    layout: Layout
    weight_limit: int
    weight_cap: int
    rule: MeanRule
    threads: int = 0
    base: Mapping[str, Array] | None = None
    clip: Clip | None = None
    statistics: Bounds | None = None
    older: Mapping[int, Mapping[str, UpdateReading]] = field(default_factory=dict)

    def made(
        self, *, device: str = "auto", sums: Accumulator | None = None, sent_bytes: int = 0
    ) -> ActiveRound:
        """The round, to which nothing has been added yet. ``sums`` are those of an earlier round, to use again where they
        fit; ``device`` is where updates are summed."""
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
        return ActiveRound(self, aggregator, sent_bytes)
