"""Begin and end of a round's aggregation, for the server and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from edgefl.contract.server import MEAN
from edgefl.contract.server_state import apply_server_step, state_in
from edgefl.errors import ServerStepError
from edgefl.wire.norm_statistics import NORMS
from edgefl.wire.regions import EntryRegion
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.aggregator import NormClip, layout_of
from edgefl_server.aggregate.integer_sums import ReportCollector
from edgefl_server.aggregate.statistics import bounds_of
from edgefl_server.coordinator.claims import weight_cap
from edgefl_server.coordinator.collapse import BestMetrics, collapse
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.device_evaluation import summarize
from edgefl_server.device_statistics import sum_up
from edgefl_server.events import DataStatistics, DeviceEvaluation
from edgefl_server.hyperparameters import round_hyperparameters
from edgefl_server.norm_statistics import measured_statistics
from edgefl_server.publish.model import ModelVersion
from edgefl_server.round_aggregation import RoundAggregation, RoundAggregationSpec, UpdateLayout
from edgefl_server.run_spec import ExchangeSpec, RunSpec


class ModelDownlink(Protocol):
    """Source of the weights that devices receive for a model, after the encoding of the downlink."""

    def received(self, model: ModelVersion) -> Arrays:
        """Return the weights of ``model`` as devices receive them."""


@dataclass(frozen=True)
class FixedDownlink:
    """Implementation of :class:`ModelDownlink` for the simulator, which returns the same ``weights`` for any model."""

    weights: Arrays

    def received(self, model: ModelVersion) -> Arrays:
        return self.weights


@dataclass(frozen=True)
class RoundModel:
    """Model that a round begins from.

    Attributes:
        model: The model as the server has it.
        downlink: Encoder of the model for devices.
    """

    model: ModelVersion
    downlink: ModelDownlink

    @cached_property
    def received(self) -> Arrays:
        """Weights as devices receive them, by global name.

        They are computed at the first access, because that is expensive and only some aggregation rules need them.
        """
        return self.downlink.received(self.model)


def compares_updates(spec: RunSpec) -> bool:
    """Return True if the aggregation compares updates with the weights that devices began from.

    It does to count only the changed entries, and to clip the norm of changes.
    """
    return spec.count == "nonzero" or bool(spec.aggregate.clip_norm)


def begin_aggregation(
    spec: RunSpec,
    opened: OpenRound,
    start: RoundModel,
    *,
    device: str,
    sums: Accumulator | None,
    sent_bytes: int = 0,
    older: Mapping[int, RoundModel] | None = None,
) -> RoundAggregation:
    """Build the aggregation of a round, without updates.

    Args:
        spec: Specification of the run.
        opened: The round.
        start: Model that it begins from.
        device: Processor that sums updates.
        sums: Sums of an earlier round, whose memory is used again; or None.
        sent_bytes: Bytes that the server has sent in all.
        older: Models of earlier rounds whose devices still work, by number of the round.
    """
    older = older or {}
    exchange, aggregate = spec.exchange(opened.position), spec.aggregate
    layouts = _layouts(spec, exchange, start.model)
    older_layouts = {number: _layouts(spec, exchange, each.model) for number, each in older.items()}

    cap = weight_cap(spec.rules, opened)
    if opened.evaluates:
        return RoundAggregationSpec(
            number=opened.number,
            update_layouts=layouts,
            server=None,
            layout=layout_of({}),
            weight_limit=1,
            weight_cap=cap,
            rule=aggregate.rule,
            evaluates=True,
        ).build(device=device, sums=sums, sent_bytes=sent_bytes)

    # The sums have room for the global tensors that some update covers, and no others.
    names = {
        part
        for each in (layouts, *older_layouts.values())
        for layout in each.values()
        for name, region in {**layout.sent, **layout.averaged}.items()
        for part in (region.names if isinstance(region, EntryRegion) else (name,))
    }
    weights = {name: array for name, array in start.model.weights.items() if name in names}

    # Moving statistics are not trained. They do not show how far an update goes, and have bounds of their own; they
    # travel to devices unrounded, so the bounds are computed from the server's own values.
    base = start.received if compares_updates(spec) else {}
    untrained = frozenset(weights) - spec.trained
    statistics = sorted(untrained & frozenset(spec.model_of(weights)))
    is_robust = bool(aggregate.clip_norm) or aggregate.rule.name == "multi_krum"
    bounds = (
        bounds_of(weights, statistics, aggregate.clip_statistics, median=is_robust) if statistics else None
    )

    if opened.buffered:
        weight_limit = opened.goal * cap
    else:
        weight_limit = sum(min(each.weight_limit, cap) for each in opened.assignments.values())
    aggregation = RoundAggregationSpec(
        number=opened.number,
        update_layouts=layouts,
        older=older_layouts,
        server=exchange.server if any(each.unfolds for each in layouts.values()) else None,
        layout=layout_of(weights),
        weight_limit=weight_limit,
        weight_cap=cap,
        rule=aggregate.rule,
        threads=aggregate.threads,
        base=base if spec.count == "nonzero" else None,
        clip=NormClip(aggregate.clip_norm, base, untrained) if aggregate.clip_norm else None,
        statistics=bounds,
    ).build(device=device, sums=sums, sent_bytes=sent_bytes)

    if opened.buffered:
        aggregation = replace(aggregation, began={**older, opened.number: start})
    return replace(aggregation, by_turns=not aggregation.fits(opened, spec.limits.asked_bytes))


@dataclass(frozen=True)
class RoundConclusion:
    """Result of a round.

    Attributes:
        weights: Model and server state after the round.
        metrics: Metrics of the model that the updates gave; None without an evaluation.
        failed: Reason why ``weights`` are the old ones; empty if they are new.
        undone: True if the new model was evaluated and rejected; ``metrics`` describe the rejected model.
    """

    weights: Arrays
    metrics: Mapping[str, float] | None = None
    failed: str = ""
    undone: bool = False


def conclude_round(
    spec: RunSpec,
    ended: OpenRound,
    aggregation: RoundAggregation,
    start: RoundModel,
    *,
    devices: int,
    best: BestMetrics,
) -> RoundConclusion:
    """Compute the model after a round with enough updates. Nothing is written.

    Args:
        spec: Specification of the run.
        ended: The round, with its answers.
        aggregation: Sums of its updates.
        start: Model from which it began.
        devices: Number of devices that the algorithm assumes.
        best: Best metrics of the rounds before it.

    Returns:
        The new model, or the old one if the server's step fails or the rollback rule rejects the new one. After an
        evaluation round the model is unchanged; after a measuring round only the statistics of batch norm change.
    """
    unchanged = f"round {ended.number} is abandoned and the model unchanged"
    old = start.model.weights
    if ended.evaluates:
        return RoundConclusion(_measured(spec, ended, aggregation, old) if ended.measures else old)
    try:
        weights = _server_step(spec, ended, aggregation, start, devices)
    except ServerStepError as error:
        return RoundConclusion(old, failed=f"{unchanged}: {error.message}")
    metrics = None
    if spec.rollback.on and spec.evaluate is not None:
        try:
            metrics = spec.evaluate(spec.model_of(weights))
        except (
            Exception
        ):  # a user's function: the evaluation after the round calls it again and reports the error
            metrics = None
    reason = collapse(spec.rollback, best, metrics) if metrics is not None else ""
    if reason:
        return RoundConclusion(old, metrics, f"{unchanged}: with its updates {reason}", undone=True)
    return RoundConclusion(weights, metrics)


def _measured(spec: RunSpec, ended: OpenRound, aggregation: RoundAggregation, weights: Arrays) -> Arrays:
    sums, rules = aggregation.aggregator, spec.rules
    assert isinstance(sums, ReportCollector), "devices report sums"
    trained, cap = rules.trained_rounds(ended.number), rules.weight_cap
    return {**weights, **measured_statistics(spec.norms, sums.reports, weights, trained, cap)}


def evaluate_reports(
    spec: RunSpec, number: int, aggregation: RoundAggregation, weights: Arrays
) -> DeviceEvaluation:
    """Return the results of evaluation round ``number`` from the devices' reports in ``aggregation``.

    Tiers for which ``weights`` has no batch norm statistics of this model are left out.
    """
    sums, exchange = aggregation.aggregator, spec.evaluation
    assert isinstance(sums, ReportCollector) and exchange is not None, "the round is an evaluation round"
    trained = spec.rules.trained_rounds(number)
    unmeasured = {tier for tier in exchange.tiers if not spec.norms.covers(tier, weights, trained)}
    manifests = [tier.bundle.manifest for tier in exchange.tiers.values()]
    listed = [manifest.graph(manifest.evaluate).metrics for manifest in manifests]
    return summarize(
        [report for report in sums.reports if report.tier not in unmeasured],
        [name for name in listed[0] if all(name in names for names in listed)],
        trained_rounds=trained,
        least_group=spec.least_group,
        unmeasured=sorted(unmeasured & {report.tier for report in sums.reports}),
    )


def sum_up_reports(spec: RunSpec, aggregation: RoundAggregation, announced_rows: int) -> DataStatistics:
    """Return the data statistics from the devices' reports in ``aggregation``.

    ``announced_rows`` is the number of rows that these devices announced when they connected.
    """
    sums, exchange, request = aggregation.aggregator, spec.evaluation, spec.statistics
    assert isinstance(sums, ReportCollector) and exchange and request, "the round sums up the devices' data"
    data = next(iter(exchange.tiers.values())).bundle.manifest.data
    return sum_up(
        sums.reports, data, request.edges, announced_rows=announced_rows, least_group=spec.least_group
    )


def _server_step(
    spec: RunSpec, ended: OpenRound, aggregation: RoundAggregation, start: RoundModel, devices: int
) -> Arrays:
    """Return the model and the server's state after the step of the server's optimizer, by global name.

    Raises:
        ServerStepError: If the step fails.
    """
    reports = ended.count("accepted")
    hyper = {
        **round_hyperparameters(spec, ended.number, ended.position),
        "share": reports / max(reports, devices),
    }
    exchange = spec.exchange(ended.position)
    kept = {name: array for name, array in start.model.weights.items() if state_in(name, (NORMS,)) == NORMS}
    weights = {name: array for name, array in start.model.weights.items() if name not in kept}

    # A server optimizer measures how far updates moved, so it has to begin where the devices began: with the rounded
    # weights. The plain mean needs no begin, and changes are relative to it anyway.
    is_rounded = spec.downlink.encoding != "float32"
    sends_changes = any(tier.form.change for tier in exchange.tiers.values())
    is_exact = not is_rounded or exchange.server is MEAN or sends_changes
    began = weights if aggregation.began or is_exact else {name: start.received[name] for name in weights}
    mean = {**began, **aggregation.aggregator.result(began)}
    after = apply_server_step(exchange.server, began, mean, hyper)
    # A server optimizer may move what no device sent; the tensors that devices keep must stay as they are.
    after |= {name: began[name] for name in spec.private}
    if began is not weights:
        # Entries that did not move keep the digits that rounding cut off; otherwise each round would lose some more.
        after = {name: np.where(array == began[name], weights[name], array) for name, array in after.items()}
    return after | kept  # measured statistics, which no training changes


def _layouts(spec: RunSpec, exchange: ExchangeSpec, model: ModelVersion) -> dict[str, UpdateLayout]:
    """Return the layouts of the updates that begin from ``model``, by tier."""
    return {
        tier: exchange.update_layout(tier, placement, spec.trained)
        for tier, placement in model.placements.items()
        if tier in exchange.tiers  # candidates of a rollout have no part in an evaluation
    }
