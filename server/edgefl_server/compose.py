"""Composition of a run spec from a federation file: model, tiers, bundles, initial weights and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from edgefl.algorithms.evaluation import EVALUATE, evaluation
from edgefl.algorithms.statistics import statistics
from edgefl.config import Federation, TierTable
from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import TensorSpec, arrays
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.setup.bundles import bundle_of
from edgefl.setup.evaluation import evaluation_warning, federation_evaluation
from edgefl.setup.model import data_spec, federation_model, submodel_warnings
from edgefl.setup.norm_statistics import norm_measurement
from edgefl.setup.runs import run_digest
from edgefl.setup.training import (
    arrays_of,
    candidate_of,
    candidates_of,
    check_versions,
    refused,
    replaced_algorithm,
    tier_tables,
    tiers_of,
    tried_tiers,
)
from edgefl.system.sizes import mebibytes
from edgefl.system.structs import digest_of
from edgefl.wire.bundle.archive import BundleArchive, write_bundle
from edgefl.wire.norm_statistics import NORMS
from edgefl.wire.statistics import GATHER_S, STATISTICS, StatisticsRequest
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import DENSE
from edgefl_export.compiler.algorithm import check_whole_tensors
from edgefl_export.compiler.cache import BundleCache, CompiledBundle, bundle_name
from edgefl_export.compiler.compiler import Compiler, target_of
from edgefl_export.compiler.request import CompileRequest, Exchange, TierTraining, exchanges_of, trained_names
from edgefl_server.access.limits import HOSTED
from edgefl_server.aggregate.robust import SHARED, RobustRule, buffered_bytes
from edgefl_server.coordinator.collapse import RollbackRule
from edgefl_server.coordinator.eligibility import SelectionRules
from edgefl_server.coordinator.rollout import RolloutRules
from edgefl_server.coordinator.roster import CANDIDATE, TierRule
from edgefl_server.coordinator.states import MOST_SAMPLES, EvaluationSchedule, Rules
from edgefl_server.events import Compiled, Event, EventListener, Exporting, Noted, Warned
from edgefl_server.hyperparameters import shared_hyperparameters
from edgefl_server.norm_statistics import NO_NORMS, NormFamilies
from edgefl_server.publish.downlink import check_counting
from edgefl_server.run_spec import (
    AggregateSpec,
    DownlinkSpec,
    ExchangeSpec,
    FixedPlacement,
    RunSpec,
    TierSpec,
    steady,
)

BUNDLES, CANDIDATES = "bundles", "candidate"
"""Folder of a run's bundles, and the folder below it for the bundles of candidates."""


def compose(
    federation: Federation,
    dataset: Dataset,
    out: Path,
    *,
    listener: EventListener | None = None,
    device: str = "auto",
) -> RunSpec:
    """Compile the tiers' bundles into ``out/bundles`` and return the run spec of the federation.

    Args:
        federation: The federation.
        dataset: Data that the server evaluates models on.
        out: Folder of the run.
        listener: Receiver of progress events and warnings, or None.
        device: Device of the server's computations: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        ConfigError: If the configuration is invalid.
        ModelError: If the model cannot be divided into tiers.
        ExportError: If a tier cannot be compiled.
    """
    made = _Bundles(federation, dataset, out / BUNDLES, listener)
    other = made
    if federation.rollout.on:
        other = _Bundles(candidate_of(federation), dataset, out / BUNDLES / CANDIDATES, listener)
    spec = compose_with(federation, dataset, made.of, other.of, listener=listener, device=device)
    made.report_compiled()
    return spec


BundleFor = Callable[[TierTraining, Exchange, str], BundleArchive]
"""Function ``(tier, exchange, format)`` that returns a bundle."""


def compose_with(
    federation: Federation,
    dataset: Dataset,
    bundle_for: BundleFor,
    candidate_for: BundleFor | None = None,
    *,
    listener: EventListener | None = None,
    device: str = "auto",
) -> RunSpec:
    """Return the run spec of a federation with bundles from ``bundle_for`` instead of the compiler.

    Args:
        federation: The federation.
        dataset: Data that the server evaluates models on.
        bundle_for: Function that returns the bundle of a tier, exchange and format.
        candidate_for: The same for the candidate of a rollout; None without a rollout.
        listener: Receiver of warnings; None skips the search for them.
        device: Device of the server's computations.

    Raises:
        ConfigError: If the configuration is invalid.
        ModelError: If the model cannot be divided into tiers.
    """
    spec = federation_model(federation, dataset)
    model = arrays_of(spec, rounded=federation.downlink.encoding != "float32")
    tiers = tiers_of(federation, spec)
    method = next(iter(tiers.values())).algorithm  # what it asks of the server is the same for all tiers
    rules = _rules(federation, tier_tables(federation), method)
    aggregate = _aggregate(federation)
    _check_counting(federation, tiers)
    _check_private(tiers)
    trained = frozenset(trained_names(spec))
    initial = model | server_state.initial(method.server_state, model, trained)
    caveat = evaluation_warning(federation, spec, dataset, method)
    if listener is not None:
        if text := replaced_algorithm(federation):
            listener.emit(Noted(text=text))
        if caveat:
            listener.emit(Warned(tier="", text=caveat))
        for warned in _warnings(federation, tiers, model, initial, aggregate):
            listener.emit(warned)
    candidates = candidates_of(federation, spec, tiers) if candidate_for is not None else {}
    exchanges = [_exchange(federation, tiers, exchange, bundle_for) for exchange in exchanges_of(method)]
    if candidates and candidate_for is not None:
        exchanges = _with_candidates(candidate_of(federation), exchanges, candidates, candidate_for)
        rules = replace(rules, rollout=_rollout(federation))
    main = exchanges[-1]
    evaluated = measuring = measured = None
    if federation.evaluate.split:
        measured = norm_measurement(federation, spec)
        if measured is None:
            found = {name: Exchange(EVALUATE, evaluation(each.algorithm), ()) for name, each in tiers.items()}
            evaluated = _reporting(federation, tiers, found, bundle_for)
        else:
            evaluated = _reporting(federation, tiers, measured.evaluate, bundle_for)
            measuring = _reporting(federation, tiers, measured.measure, bundle_for)
            rules = replace(rules, evaluation=replace(rules.evaluation, measures=True))
    norms = NO_NORMS if measured is None else NormFamilies(measured.families, measured.variances)
    initial |= {} if measured is None else measured.initial
    for tier, table in federation.tiers.items():
        offered = [*exchanges, *(each for each in (evaluated, measuring) if each is not None)]
        for warned in _offers(tier, table.memory_bytes, [each.tiers[tier] for each in offered]):
            if listener is not None:
                listener.emit(warned)
    return RunSpec(
        federation=federation.federation.name,
        digest=run_digest(federation),
        rules=rules,
        tiers=main.tiers,
        units=(
            *spec.units,
            *server_state.units_of(method.server_state, spec.units, trained),
            *norms.units,
        ),
        initial=initial,
        hyper=main.hyper,
        lr_decay_at=federation.round.lr_decay_at,
        schedule=main.schedule,
        server=main.server,
        opening=tuple(exchanges[: len(method.opening)]),
        ahead=tuple(exchanges[len(method.opening) : -1]),
        evaluation=evaluated,
        measuring=measuring,
        norms=norms,
        least_group=federation.evaluate.least_group,
        server_state=(*method.server_state, *((NORMS,) if measured is not None else ())),
        count=federation.round.count,
        trained=trained,
        aggregate=aggregate,
        rollback=_rollback(federation, spec),
        downlink=DownlinkSpec(**federation.downlink.model_dump()),
        evaluate=federation_evaluation(federation, spec, dataset, device),
        caveat=caveat,
        metric=next(iter(spec.metrics), "loss"),
        evaluate_every=federation.round.evaluate_every,
        limits=federation.wire_limits,
        keep_updates=federation.round.keep_updates,
        message_limit=_message_limit(federation),
    )


def compose_statistics(
    federation: Federation,
    dataset: Dataset,
    request: StatisticsRequest,
    out: Path,
    *,
    listener: EventListener | None = None,
) -> RunSpec:
    """Compile bundles that sum up data into ``out/bundles`` and return the spec of a run of no training rounds.

    The run has the federation's tiers and limits. Its bundles need no weights, so that it publishes none.

    Args:
        federation: The federation.
        dataset: Data like those of the devices, for shapes and classes.
        request: The statistics.
        out: Folder of the run.
        listener: Receiver of progress events, or None.

    Raises:
        ConfigError: If the data do not have a statistic of the request.
        ExportError: If a bundle cannot be compiled.
    """
    data = data_spec(dataset)
    label = TensorSpec.of(torch.from_numpy(dataset.test_y[:1]))
    below = dataset.classes if not label.dtype.is_floating_point else None
    label = TensorSpec(label.shape[1:], label.dtype, below, dataset.ignored)
    made = _Bundles(federation, dataset, out / BUNDLES, listener)
    algorithm, tables = statistics(request, data, label), tier_tables(federation)
    tiers = {}
    for name in tables:
        compiled = CompileRequest(
            model=federation.model.name,
            tier=name,
            algorithm=algorithm,
            units=(),
            data=data,
            exchange=STATISTICS,
            chunk_bytes=federation.wire_limits.chunk_bytes,
            tokenizer=dataset.tokenizer,
        )
        bundle, *further = (made.compile(compiled, format) for format in federation.formats_of(name))
        tiers[name] = TierSpec(bundle, FixedPlacement({}), sends=(), further=tuple(further))
    made.report_compiled()
    table, limits = federation.round, federation.wire_limits
    awaited = request.devices or table.min_devices
    return RunSpec(
        federation=federation.federation.name,
        digest=statistics_digest(federation, request),
        rules=Rules(
            run="",
            seed=federation.federation.seed,
            rounds=0,
            tiers=_tier_rules(tables),
            min_devices=awaited,
            over_selection=table.over_selection,
            most_samples=MOST_SAMPLES,
            deadline_s=limits.round_deadline_s,
            ready_timeout_s=limits.ready_timeout_s,
            gather_s=GATHER_S if awaited == 1 and not request.devices else 0.0,
            offline_grace_s=limits.offline_grace_s,
            evaluation=EvaluationSchedule(devices=federation.evaluate.devices),
        ),
        tiers=tiers,
        units=(),
        initial={},
        hyper={},
        evaluation=ExchangeSpec(tiers, {}),
        least_group=federation.evaluate.least_group,
        statistics=request,
        downlink=replace(DownlinkSpec(**federation.downlink.model_dump()), encoding="float32"),
        limits=limits,
        message_limit=_message_limit(federation),
    )


def statistics_digest(federation: Federation, request: StatisticsRequest) -> str:
    """Return the digest of a run that sums up data; it is resumed with the same federation and request only."""
    return digest_of({"federation": run_digest(federation), "statistics": msgspec.to_builtins(request)})


def _message_limit(federation: Federation) -> int:
    """Return the largest message that the broker is known to accept, in bytes; 0 if unknown."""
    profile = federation.broker.profile
    return HOSTED[profile].payload_bytes if profile != "none" else 0


def _tier_rules(tables: Mapping[str, TierTable]) -> tuple[TierRule, ...]:
    return tuple(TierRule(name, _patterns(name, tier), tier.memory_bytes) for name, tier in tables.items())


class _Bundles:
    """Source of a run's bundles: compiles each, or takes it from the user's cache, and writes it to ``folder``.

    ``listener`` receives the progress, or is None.
    """

    def __init__(
        self, federation: Federation, dataset: Dataset, folder: Path, listener: EventListener | None
    ) -> None:
        self._federation, self._dataset, self._folder, self._listener = federation, dataset, folder, listener
        self._cache = BundleCache.of_user()
        self._all: list[CompiledBundle] = []

    def of(self, tier: TierTraining, exchange: Exchange, format: str) -> BundleArchive:
        """Return the bundle of a tier for one exchange (round trip of the algorithm) in ``format``.

        It is compiled or taken from the cache, and written to the run's folder.

        Raises:
            ExportError: If the bundle cannot be compiled.
        """
        found = bundle_of(
            self._federation,
            self._dataset,
            tier,
            exchange,
            format=format,
            cache=self._cache,
            progress=lambda text: self._report(Exporting(tier=tier.name, text=text)),
        )
        return self._written(found, tier.name, exchange.name, format)

    def compile(self, request: CompileRequest, format: str) -> BundleArchive:
        """Return the bundle of a request in ``format``, compiled or from the cache, and write it to the run's folder.

        Raises:
            ExportError: If the bundle cannot be compiled.
        """
        compiler = Compiler(target_of(format, self._federation.export.outputs), self._cache)
        found = compiler.compile(request, lambda text: self._report(Exporting(tier=request.tier, text=text)))
        return self._written(found, request.tier, request.exchange, format)

    def _written(self, found: CompiledBundle, tier: str, exchange: str, format: str) -> BundleArchive:
        self._all.append(found)
        write_bundle(found.bundle, self._folder / bundle_name(tier, exchange, format))
        return found.bundle

    def report_compiled(self) -> None:
        """Emit an event with the number of bundles that were compiled and of those that came from the cache."""
        compiled = sum(not each.from_cache for each in self._all)
        event = Compiled(
            compiled=compiled,
            reused=len(self._all) - compiled,
            cache=str(self._cache.folder),
            cache_bytes=self._cache.nbytes,
        )
        self._report(event)

    def _report(self, event: Event) -> None:
        if self._listener is not None:
            self._listener.emit(event)


def _exchange(
    federation: Federation, tiers: Mapping[str, TierTraining], exchange: Exchange, bundle_for: BundleFor
) -> ExchangeSpec:
    """Return the settings of one exchange (round trip) of the algorithm, with the bundles of all tiers."""
    own = {name: tier.exchange(exchange.name) for name, tier in tiers.items()}
    hyper = shared_hyperparameters(
        {name: each.algorithm for name, each in own.items()}
    )  # first: bundles take minutes
    specs = {name: _tier_spec(federation, tier, own[name], bundle_for) for name, tier in tiers.items()}
    return ExchangeSpec(specs, hyper, exchange.algorithm.schedule, exchange.algorithm.server)


def _reporting(
    federation: Federation,
    tiers: Mapping[str, TierTraining],
    exchanges: Mapping[str, Exchange],
    bundle_for: BundleFor,
) -> ExchangeSpec:
    """Return an exchange (round trip) in which devices report sums over their rows, with the bundles of all tiers."""
    specs = {}
    for name, tier in tiers.items():
        exchange = exchanges[name]
        bundle, *further = (bundle_for(tier, exchange, format) for format in federation.formats_of(name))
        submodel = tier.submodel
        place = steady(submodel.place, arrays(submodel.spec.weights), moves=submodel.moves)
        specs[name] = TierSpec(bundle, place, DENSE, sends=(), further=tuple(further))
    return ExchangeSpec(specs, {})


def _tier_spec(
    federation: Federation, tier: TierTraining, exchange: Exchange, bundle_for: BundleFor
) -> TierSpec:
    bundle, *further = (bundle_for(tier, exchange, format) for format in federation.formats_of(tier.name))
    form = exchange.algorithm.form
    finish = bundle.manifest.graph(bundle.manifest.finish)
    labels = [port.label for port in finish.outputs_of("update")]
    if leaked := sorted(exchange.algorithm.private.intersection(labels)):
        raise ConfigError(
            f"algorithm {exchange.algorithm.name!r} sends {leaked[0]!r}, which is among its private tensors: return it from "
            f"finish as carry.private.{leaked[0]} alone, or leave it out of private",
            algorithm=exchange.algorithm.name,
            tier=tier.name,
        )
    weights_only = (server_state.WEIGHTS,)
    sends = weights_only if form.sections else server_state.states_of(labels, tier.algorithm.server_state)
    _check_sent(federation, tier, sends)
    submodel = tier.submodel
    place = steady(submodel.place, arrays(submodel.spec.weights), moves=submodel.moves)
    return TierSpec(bundle, place, form, exchange.reads, sends, tuple(further), exchange.algorithm.private)


def _with_candidates(
    candidate: Federation,
    exchanges: Sequence[ExchangeSpec],
    tiers: Mapping[str, TierTraining],
    bundle_for: BundleFor,
) -> list[ExchangeSpec]:
    """Return ``exchanges`` in which each tier of ``tiers`` has a second entry for its candidate bundle.

    Its name has the suffix ``@candidate``. ``bundle_for`` returns the bundles of the federation ``candidate``.

    Raises:
        ConfigError: If a candidate cannot be tried beside the present bundle.
    """
    whole = []
    for index, exchange in enumerate(exchanges):
        own = {}
        for name, tier in tiers.items():
            spec = _tier_spec(candidate, tier, tier.exchanges[index], bundle_for)
            _check_alike(name, exchange.tiers[name], spec)
            own[name + CANDIDATE] = spec
        whole.append(replace(exchange, tiers={**exchange.tiers, **own}))
    return whole


def _check_alike(tier: str, ours: TierSpec, theirs: TierSpec) -> None:
    if (ours.sends, ours.reads) != (theirs.sends, theirs.reads):
        raise refused(tier, "it sends or reads another part of the server's state")
    if ours.private != theirs.private:
        raise refused(tier, "its devices keep other tensors to themselves")
    if ours.bundle.manifest.suffix != theirs.bundle.manifest.suffix:
        raise refused(tier, "it trains other parts of the model")
    if ours.bundle.manifest.carry_needed or theirs.bundle.manifest.carry_needed:
        raise refused(tier, "devices need what they kept of the round before, and those of a trial have none")


def _rollout(federation: Federation) -> RolloutRules:
    bounds = federation.rollout.model_dump(exclude={"algorithm", "tiers"})
    return RolloutRules(seed=federation.federation.seed, tiers=tried_tiers(federation), **bounds)


def _check_counting(federation: Federation, tiers: Mapping[str, TierTraining]) -> None:
    forms = {name: tier.algorithm.form for name, tier in tiers.items()}
    own = [name for name, tier in tiers.items() if not tier.submodel.units]
    check_counting(federation.round.count, federation.downlink.encoding, forms, own)


def _warnings(
    federation: Federation,
    tiers: Mapping[str, TierTraining],
    model: Arrays,
    initial: Arrays,
    aggregate: AggregateSpec,
) -> Iterator[Warned]:
    """Yield warnings about tiers, the learning rate decay and memory. Called before anything is compiled."""
    for name, tier in tiers.items():
        for text in submodel_warnings(tier.submodel, name, model):
            yield Warned(tier=name, text=text)
    method = next(iter(tiers.values())).algorithm
    if federation.round.lr_decay_at and not any("lr" in each.hyper for each in method.exchanges):
        text = f"round.lr_decay_at has nothing to act on: algorithm {method.name!r} has no scalar lr; see its own schedule"
        yield Warned(tier="", text=text)
    if aggregate.rule.buffered:
        entries = sum(array.size for array in initial.values())
        yield Warned(tier="", text=_memory_of(aggregate.rule, entries))


def _offers(tier: str, offered: int, exchanges: Sequence[TierSpec]) -> Iterator[Warned]:
    """Yield a warning if a graph of ``tier`` needs more than ``offered`` bytes, the memory that the tier asks devices
    for.

    Devices that offer only that much would decline their tasks.
    """
    manifests = [bundle.manifest for each in exchanges for bundle in (each.bundle, *each.further)]
    needed = max(manifest.planned_bytes for manifest in manifests)
    if 0 < offered < needed:
        text = (
            f"memory_bytes asks devices for {offered:,} bytes, and the largest graph of a round needs {needed:,}: those "
            "that offer less decline; ask for as much, or set memory_budget"
        )
        yield Warned(tier=tier, text=text)


def _check_sent(federation: Federation, tier: TierTraining, sends: Collection[str]) -> None:
    """Check that updates hold only weights if clipping or counting of non-zero changes is on.

    ``sends`` are the names of the states in an update.

    Raises:
        ConfigError: If updates hold other states, too.
    """
    shared = [name for name in sends if name != server_state.WEIGHTS]
    if not shared:
        return
    algorithm = tier.algorithm
    check_whole_tensors(algorithm, tier.submodel)
    subject = f"algorithm {algorithm.name!r} sends {', '.join(shared)} beside the weights, and"
    if federation.aggregate.clip_norm:
        raise ConfigError(
            f"{subject} aggregate.clip_norm bounds weights only; set it to 0 and use the algorithm's own clip, or "
            "aggregate.rule median or trimmed_mean",
            algorithm=algorithm.name,
        )
    if federation.round.count == "nonzero":
        raise ConfigError(
            f"{subject} round.count 'nonzero' leaves out what stayed as it was, which is a value like any other there; set "
            "it to 'holders'",
            algorithm=algorithm.name,
        )


def _check_private(tiers: Mapping[str, TierTraining]) -> None:
    """Raise ConfigError if one tier sends a tensor that the devices of another one keep to themselves."""
    kept = {name: tier for tier, each in tiers.items() for name in each.algorithm.private}
    for tier, each in tiers.items():
        sent = each.submodel.suffix.state_dict().keys() - each.algorithm.private
        if clash := sorted(sent & kept.keys()):
            raise ConfigError(
                f"algorithm {each.algorithm.name!r} keeps {clash[0]!r} on the devices of tier {kept[clash[0]]!r}, and tier "
                f"{tier!r} sends it: name the same layers for all tiers, by the option private of fedper or fedrep",
                algorithm=each.algorithm.name,
                tier=tier,
            )


def _rules(federation: Federation, tables: Mapping[str, TierTable], method: Algorithm) -> Rules:
    if method.whole and federation.round.fraction < 1:
        raise ConfigError(
            f"algorithm {method.name!r} needs every device in every round, and round.fraction is "
            f"{federation.round.fraction:g}; set it to 1, or choose an algorithm that samples devices",
            algorithm=method.name,
        )
    limits, table = federation.wire_limits, federation.round
    if table.mode == "buffered":
        check_versions(method)
    return Rules(
        run="",
        seed=federation.federation.seed,
        rounds=federation.federation.rounds,
        tiers=_tier_rules(tables),
        min_devices=table.min_devices,
        min_reports=table.min_reports,
        fraction=table.fraction,
        over_selection=table.over_selection,
        weighted=table.weighting == "samples",
        samples=table.samples,
        most_samples=table.most_samples,
        weight_cap=table.weight_cap,
        deadline_s=limits.round_deadline_s,
        ready_timeout_s=limits.ready_timeout_s,
        offline_grace_s=limits.offline_grace_s,
        strikes=limits.strikes,
        bench_rounds=limits.bench_rounds,
        whole=method.whole,
        absent=table.absent,
        opening=len(method.opening),
        evaluation=EvaluationSchedule(federation.evaluate.every, federation.evaluate.devices),
        selection=_selection(federation, method),
        **_buffered(federation),
    )


def _buffered(federation: Federation) -> dict[str, Any]:
    """Return the rules of asynchronous rounds as keyword arguments; an empty dict for synchronous rounds."""
    table = federation.round
    if table.mode == "synchronous":
        return {}
    names = ("buffer", "concurrency", "max_staleness", "staleness")
    return {name: getattr(table, name) for name in names}


def _selection(federation: Federation, method: Algorithm) -> SelectionRules:
    table = federation.selection
    if method.whole and (table.policy != "uniform" or table.measured or table.quorum):
        raise ConfigError(
            f"algorithm {method.name!r} needs every device in every round, and the table selection chooses among "
            f"them: leave "
            "policy, measured and quorum out, or choose an algorithm that samples devices",
            algorithm=method.name,
        )
    return SelectionRules(**{**dict(table), "quotas": tuple(table.quotas.items())})


def _aggregate(federation: Federation) -> AggregateSpec:
    table = federation.aggregate
    rule = RobustRule(table.rule, table.trim if table.rule in SHARED else 0.0)
    return AggregateSpec(rule, table.clip_norm, table.clip_statistics, table.threads)


def _rollback(federation: Federation, spec: ModelSpec) -> RollbackRule:
    table = federation.round
    if table.rollback_accuracy and "accuracy" not in spec.metrics:
        raise ConfigError(
            f"round.rollback_accuracy is {table.rollback_accuracy:g}, and {spec.name} has no accuracy: set it to 0, and "
            "round.rollback_loss in its place",
            metrics=spec.metrics,
        )
    return RollbackRule(table.rollback_accuracy, table.rollback_loss)


def _memory_of(rule: RobustRule, entries: int) -> str:
    each = buffered_bytes(2, entries) - buffered_bytes(1, entries)
    return f"the rule {rule.name} keeps every update until the round ends: {mebibytes(each)} for each device"


def _patterns(name: str, tier: TierTable) -> tuple[str, ...]:
    """Return the patterns of device names of tier ``name`` from its table, or ``NAME-*`` if the table has neither
    patterns nor a memory limit.
    """
    return tier.devices if tier.devices or tier.memory_bytes else (f"{name}-*",)
