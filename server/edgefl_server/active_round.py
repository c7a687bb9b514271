"""A round's beginning and its end: what its updates are added to is made when it opens, and used up when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from edgefl.contract.server import MEAN
from edgefl.contract.server_state import stepped
from edgefl.errors import StepError
from edgefl.wire.regions import Entries, Region
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.aggregator import Clip, layout_of
from edgefl_server.aggregate.statistics import bounds_of
from edgefl_server.coordinator.claims import weight_cap
from edgefl_server.coordinator.collapse import Best, collapse
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.publish.model import Model
from edgefl_server.round_aggregation import RoundAggregation, RoundAggregationSpec, UpdateLayout
from edgefl_server.run_spec import ExchangeSpec, RunSpec

Received = Callable[[], Arrays]
"""The weights as devices have them: worked out only where it matters."""


@dataclass(frozen=True)
class Began:
    """What devices began with that are at work since an earlier round."""

    model: Model
    received: Received


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
) -> RoundAggregation:
    """Ready for the updates of ``opened``, which begins from ``model``. ``sums`` are those of an earlier round, to use
    again where they fit; ``device`` is where updates are summed. ``older``: what devices began with in earlier rounds that
    are still at work."""
    earlier = older or {}
    recipe = _recipe(spec, opened, model, received=received, older=earlier)
    active = recipe.build(device=device, sums=sums, sent_bytes=sent_bytes)
    if opened.buffered:
        began = {number: cache(each.received) for number, each in earlier.items()}
        active = replace(active, received={**began, opened.number: cache(received)})
    return replace(active, by_turns=not active.fits(opened, spec.limits.asked_bytes))


def _recipe(
    spec: RunSpec, opened: OpenRound, model: Model, *, received: Received, older: Mapping[int, Began]
) -> RoundAggregationSpec:
    exchange = spec.exchange(opened.position)
    readings = _readings(spec, exchange, model)
    earlier = {number: _readings(spec, exchange, began.model) for number, began in older.items()}
    names = {
        name
        for each in (readings, *earlier.values())
        for reading in each.values()
        for name in _global_names({**reading.sent, **reading.averaged})
    }
    weights = {name: array for name, array in model.weights.items() if name in names}
    aggregate = spec.aggregate
    base = received() if measured(spec) else {}
    # Moving statistics are not trained: they say nothing about how far an update goes, and are bounded on their own.
    untrained = frozenset(weights) - spec.trained
    statistics = sorted(untrained & frozenset(spec.model_of(weights)))
    cap = weight_cap(spec.rules, opened)
    return RoundAggregationSpec(
        number=opened.number,
        update_layouts=readings,
        older=earlier,
        server=exchange.server if any(each.unfolds for each in readings.values()) else None,
        layout=layout_of(weights),
        weight_limit=opened.goal * cap
        if opened.buffered
        else sum(min(each.weight_limit, cap) for each in opened.assignments.values()),
        weight_cap=cap,
        rule=aggregate.rule,
        threads=aggregate.threads,
        base=base if spec.count == "nonzero" else None,
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
    active: RoundAggregation,
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
    spec: RunSpec,
    ended: OpenRound,
    active: RoundAggregation,
    model: Model,
    *,
    received: Received,
    devices: int,
) -> Arrays:
    """The model and the server's state after the round's updates. StepError if the server's step gives none."""
    reports = ended.count("accepted")
    hyper = {**spec.hyper_at(ended.number, ended.position), "share": reports / max(reports, devices)}
    weights, exchange = model.weights, spec.exchange(ended.position)
    # Whoever measures how far updates went has to begin where the devices began (edgefl_server.publish.downlink).
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


def _readings(spec: RunSpec, exchange: ExchangeSpec, model: Model) -> dict[str, UpdateLayout]:
    """How each tier's updates are read that begin from ``model``."""
    return {
        tier: exchange.update_layout(tier, placement, spec.trained)
        for tier, placement in model.placements.items()
    }


def _global_names(regions: Mapping[str, Region]) -> set[str]:
    """The global tensors that local ones lie in."""
    return {
        part
        for name, region in regions.items()
        for part in (region.names if isinstance(region, Entries) else (name,))
    }
