"""One round while its updates come in: made when it opens, handed to whoever takes updates, and used up when it ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np

from edgefl.contract.server import MEAN
from edgefl.contract.server_state import stepped, unfolded
from edgefl.wire import tensors
from edgefl.wire.errors import ProtocolError, StepError, UpdateRejected
from edgefl.wire.mqtt.messages import Update
from edgefl.wire.regions import Entries, Region
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.size import float32_bytes
from server.aggregate.accumulator import Accumulator
from server.aggregate.aggregator import Aggregator, Checked, Clip, layout_of
from server.aggregate.statistics import bounds_of
from server.coordinator.claims import weight_cap
from server.coordinator.collapse import Best, collapse
from server.coordinator.states import OpenRound
from server.publish.model import Model
from server.run_spec import ExchangeSpec, RunSpec, UpdateReading

_PLACED_BYTES, _LETTER_BYTES, _TOLD_BYTES = 256, 6, 1 << 16
"""Of an update, beside its numbers: a tensor's shape and place, a letter of its name however it is escaped; metrics, profile
and the message around them."""

Received = Callable[[], Arrays]
"""The weights as devices have them: worked out only where it matters."""


@dataclass(frozen=True)
class Began:
    """What devices began with that are at work since an earlier round."""

    model: Model
    received: Received


@dataclass(frozen=True)
class CheckedUpdate:
    """An update whose every name, shape, dtype and value is as it should be: as it was sent, and what is added of it."""

    sent: Checked
    added: Checked


@dataclass(frozen=True)
class ActiveRound:
    """Round ``number``: the exchange that it is, how each tier's updates are read, and what they are added to.

    ``older`` is how those are read whose devices began in an earlier round. Where there may be such, updates are added as
    changes: ``received`` has the weights that devices began with, by round. ``weight_cap`` is the most that an update
    weighs. ``sent_bytes`` is what the server had sent in all when the round began; ``by_turns``: its updates are too many
    bytes to come all at once.
    """

    number: int
    exchange: ExchangeSpec
    readings: Mapping[str, UpdateReading]
    aggregator: Aggregator
    weight_cap: int
    sent_bytes: int = 0
    by_turns: bool = False
    older: Mapping[int, Mapping[str, UpdateReading]] = field(default_factory=dict)
    received: Mapping[int, Received] = field(default_factory=dict)

    def reading(self, tier: str, number: int) -> UpdateReading:
        """How the updates of ``tier`` are read that begin from round ``number``'s model."""
        return self.older.get(number, self.readings)[tier]

    @cached_property
    def _expected(self) -> dict[str, Mapping[str, tuple[str, tuple[int, ...]]]]:
        """By tier, the arrays of its updates: (dtype, shape) by name."""
        return {
            tier: self.aggregator.pieces(reading.sent, reading.tier.form).expected
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
            tier: float32_bytes(self.aggregator.pieces(reading.sent, reading.tier.form).shapes)
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
        return min(claimed, self.weight_cap)

    def check(self, update: Update) -> CheckedUpdate:
        """UpdateRejected unless the update's tensors are what its tier sends."""
        return self.check_sent(update.tier, update.tensors, update.round)

    def check_sent(self, tier: str, sent_bytes: bytes, number: int) -> CheckedUpdate:
        """The same of the tensors alone, as they travel, that begin from round ``number``'s model."""
        reading = self.reading(tier, number)
        try:
            tensors.check_bare(sent_bytes, self._header_bytes[tier])
            arrays = tensors.load(sent_bytes, max_bits=reading.tier.mask_bits)
        except ProtocolError as error:
            raise UpdateRejected("malformed", error.message) from error
        sent = self.aggregator.check(arrays, reading.sent, reading.tier.form)
        if self.received:
            return CheckedUpdate(sent, self.aggregator.as_change(sent, self.received[number]()))
        if not reading.unfolds:
            return CheckedUpdate(sent, sent)
        unfolded_arrays = unfolded(self.exchange.server, sent.named)
        return CheckedUpdate(
            sent, self.aggregator.check(unfolded_arrays, reading.averaged, reading.tier.form)
        )


def measured(spec: RunSpec) -> bool:
    """Whether what is added of an update depends on the weights that its device began with."""
    return spec.count == "nonzero" or bool(spec.aggregate.clip_norm)


def active_round(
    spec: RunSpec,
    opened: OpenRound,
    model: Model,
    *,
    received: Received,
    device: str,
    sums: Accumulator | None,
    sent_bytes: int,
    older: Mapping[int, Began] | None = None,
) -> ActiveRound:
    """Ready for the updates of ``opened``, which begins from ``model``. ``sums`` are those of an earlier round, to use
    again where they fit; ``device`` is where updates are summed. ``older``: what devices began with in earlier rounds that
    are still at work."""
    exchange = spec.exchange(opened.position)
    readings = _readings(spec, exchange, model)
    earlier = {number: _readings(spec, exchange, began.model) for number, began in (older or {}).items()}
    names = {
        name
        for each in (readings, *earlier.values())
        for reading in each.values()
        for name in _global_names({**reading.sent, **reading.averaged})
    }
    weights = {name: array for name, array in model.weights.items() if name in names}
    aggregate, nonzero = spec.aggregate, spec.count == "nonzero"
    base = received() if measured(spec) else {}
    # Moving statistics are not trained: they say nothing about how far an update goes, and are bounded on their own.
    untrained = frozenset(weights) - spec.trained
    statistics = sorted(untrained & frozenset(spec.model_of(weights)))
    layout = layout_of(weights)
    cap = weight_cap(spec.rules, opened)
    aggregator = Aggregator(
        layout,
        weight_limit=opened.goal * cap
        if opened.buffered
        else sum(min(each.weight_limit, cap) for each in opened.assignments.values()),
        device=device,
        threads=aggregate.threads,
        base=base if nonzero else None,
        rule=aggregate.rule,
        sums=sums if sums is not None and sums.size == layout.size else None,
        clip=Clip(aggregate.clip_norm, base, untrained) if aggregate.clip_norm else None,
        # They travel to devices as they are, whatever the others are rounded to.
        statistics=bounds_of(
            weights,
            statistics,
            aggregate.clip_statistics,
            median=bool(aggregate.clip_norm) or aggregate.rule.name == "multi_krum",
        )
        if statistics
        else None,
    )
    active = ActiveRound(opened.number, exchange, readings, aggregator, cap, sent_bytes)
    if opened.buffered:
        began = {number: cache(each.received) for number, each in (older or {}).items()}
        active = replace(active, older=earlier, received={**began, opened.number: cache(received)})
    return replace(active, by_turns=not active.fits(opened, spec.limits.asked_bytes))


@dataclass(frozen=True)
class Conclusion:
    """What a round comes to: the model and the server's state after it, and the metrics of the model, if it has been judged.

    ``failed`` says why ``weights`` are the old ones; ``undone``: because the new model was worse by the rule, of which
    ``metrics`` then tell.
    """

    weights: Arrays
    metrics: Mapping[str, float] | None = None
    failed: str = ""
    undone: bool = False


def concluded(
    spec: RunSpec,
    ended: OpenRound,
    active: ActiveRound,
    model: Model,
    *,
    received: Received,
    devices: int,
    best: Best,
) -> Conclusion:
    """The end of a round with enough updates, of ``devices`` that the method is about; ``best`` of the rounds before it."""
    stays = f"round {ended.number} is abandoned and the model unchanged"
    try:
        weights = _averaged(spec, ended, active, model, received=received, devices=devices)
    except StepError as error:
        return Conclusion(model.weights, failed=f"{stays}: {error.message}")
    metrics = _metrics_of(spec, weights) if spec.rollback.on else None
    wrong = collapse(spec.rollback, best, metrics) if metrics is not None else ""
    if wrong:
        return Conclusion(model.weights, metrics, f"{stays}: with its updates {wrong}", undone=True)
    return Conclusion(weights, metrics)


def _metrics_of(spec: RunSpec, weights: Arrays) -> Mapping[str, float] | None:
    """None where the evaluation fails: whoever tells of the round tries again, and tells of that."""
    try:
        return spec.evaluate(spec.model_of(weights)) if spec.evaluate is not None else None
    except Exception:
        return None


def _averaged(
    spec: RunSpec, ended: OpenRound, active: ActiveRound, model: Model, *, received: Received, devices: int
) -> Arrays:
    """The model and the server's state after the round's updates. StepError if the server's step gives none."""
    reports = ended.count("accepted")
    hyper = {**spec.hyper_at(ended.number, ended.position), "share": reports / max(reports, devices)}
    weights, exchange = model.weights, active.exchange
    # Whoever measures how far updates went has to begin where the devices began (server.publish.downlink).
    began = weights if active.received or _exact(spec, exchange) else received()
    mean = {**began, **active.aggregator.result(began)}
    after = stepped(exchange.server, began, mean, hyper)
    if began is weights:
        return after
    # What nobody moved keeps the digits that its way to the devices had rounded off.
    return {name: np.where(array == began[name], weights[name], array) for name, array in after.items()}


def _exact(spec: RunSpec, exchange: ExchangeSpec) -> bool:
    """Whether the mean may be taken as it is: devices began with these very weights, or send changes of them, or nobody
    looks at where they began."""
    rounded = spec.downlink.encoding != "float32"
    return not rounded or exchange.server is MEAN or any(tier.form.change for tier in exchange.tiers.values())


def _readings(spec: RunSpec, exchange: ExchangeSpec, model: Model) -> dict[str, UpdateReading]:
    """How each tier's updates are read that begin from ``model``."""
    return {
        tier: exchange.reading(tier, placement, spec.trained) for tier, placement in model.placements.items()
    }


def _global_names(regions: Mapping[str, Region]) -> set[str]:
    """The global tensors that local ones lie in."""
    return {
        part
        for name, region in regions.items()
        for part in (region.names if isinstance(region, Entries) else (name,))
    }
