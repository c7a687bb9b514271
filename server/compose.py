"""From a federation file to a plan: the model, its tiers, their bundles, the initial weights and the evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from edgefl.config import Federation, TierTable
from edgefl.contract import server_state as memory
from edgefl.contract.program import Program
from edgefl.contract.tensors import prefixed
from edgefl.data.dataset import Dataset
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo import catalog as zoo
from edgefl.setup.training import (
    check_lies_like_weights,
    exchange_names,
    exchange_of,
    program_of,
    reads,
    trained_names,
)
from edgefl.submodels import catalog as submodels
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire.errors import ConfigError, ModelError
from edgefl.wire.tensors import Array, Arrays
from server.aggregate.robust import Rule, buffered_bytes
from server.bundles import Emit, kept_bundle
from server.coordinator.machine import Rules
from server.coordinator.roster import TierRule
from server.digests import run_digest
from server.events import Warned
from server.publish.downlink import check_counting
from server.run_spec import AggregatePlan, DownlinkPlan, Evaluate, ExchangePlan, Plan, TierPlan

EVALUATION_BATCH = 500
"""Static batch norm takes its statistics from test batches; the spec asks for large ones (2.7)."""


@runtime_checkable
class SelfChecking(Protocol):
    """A submodel that finds out by itself whether it can learn."""

    def warnings(self, weights: Mapping[str, Array]) -> tuple[str, ...]:
        """What a person should know before it is trained from these initial weights."""
        ...


def compose(
    federation: Federation, dataset: Dataset, out: Path, *, emit: Emit = lambda _: None, device: str = "auto"
) -> Plan:
    """The plan of a federation that is evaluated on ``dataset``. Exports the tiers' bundles into ``out/bundles``.

    Raises ConfigError, ModelError or ExportError, each with what to change.
    """
    spec = build_model(federation, dataset)
    tables = dict(federation.tiers) or {"strong": TierTable()}
    initial = _arrays(spec, rounded=federation.downlink.encoding != "float32")
    held = {tier: submodel_of(spec, tier, table) for tier, table in tables.items()}
    programs = {tier: program_of(federation, submodel) for tier, submodel in held.items()}
    method = next(iter(programs.values()))
    forms = {tier: program.form for tier, program in programs.items()}
    own = [tier for tier, submodel in held.items() if not submodel.units]
    check_counting(federation.round.count, federation.downlink.encoding, forms, own)
    for tier, submodel in held.items():
        for warned in warnings(submodel, tier, initial):
            emit(warned)
    trained = frozenset(trained_names(spec))
    kept = method.memory
    initial |= memory.initial(kept, initial, trained)
    exchanges = [
        _exchange(federation, dataset, held, name, out / "bundles", emit) for name in exchange_names(method)
    ]
    main = exchanges[-1]
    if federation.round.lr_decay_at and not any("lr" in exchange.hyper for exchange in exchanges):
        text = f"round.lr_decay_at has nothing to act on: program {method.name!r} has no scalar lr; see its own schedule"
        emit(Warned(tier="", text=text))
    aggregate = _aggregate(federation)
    if aggregate.rule.buffered:
        emit(Warned(tier="", text=_memory_of(aggregate.rule, sum(array.size for array in initial.values()))))
    for tier, table in tables.items():
        for warned in _offers(tier, table.memory_bytes, [each.tiers[tier] for each in exchanges]):
            emit(warned)
    return Plan(
        federation=federation.federation.name,
        digest=run_digest(federation),
        rules=_rules(federation, tables, method),
        tiers=main.tiers,
        units=(*spec.units, *memory.units_of(kept, spec.units, trained)),
        initial=initial,
        hyper=main.hyper,
        lr_decay_at=federation.round.lr_decay_at,
        schedule=main.schedule,
        server=main.server,
        opening=tuple(exchanges[: len(method.opening)]),
        ahead=tuple(exchanges[len(method.opening) : -1]),
        memory=tuple(kept),
        count=federation.round.count,
        trained=trained,
        aggregate=aggregate,
        downlink=DownlinkPlan(**federation.downlink.model_dump()),
        evaluate=evaluation(program_of(federation, OutputSide(spec, 0)), dataset, device),
        evaluate_every=federation.round.evaluate_every,
        limits=federation.wire_limits,
    )


def _exchange(
    federation: Federation,
    dataset: Dataset,
    held: Mapping[str, Submodel],
    name: str,
    folder: Path,
    emit: Emit,
) -> ExchangePlan:
    """The exchange ``name`` of the method, with the bundles of each tier."""
    tiers: dict[str, TierPlan] = {}
    for tier, submodel in held.items():
        program = program_of(federation, submodel)
        exchange, kept = exchange_of(program, name), program.memory
        bundle, *further = (
            kept_bundle(federation, dataset, submodel, tier, name, folder, emit, format)
            for format in federation.formats_of(tier)
        )
        finish = bundle.manifest.graph(bundle.manifest.finish)
        labels = [port.label for port in finish.outputs_of("update")]
        sends = (memory.WEIGHTS,) if exchange.form.sections else memory.memories(labels, kept)
        _check_sent(federation, program, submodel, sends)
        held_by = reads(exchange, kept)
        tiers[tier] = TierPlan(bundle, submodel.place, exchange.form, held_by, sends, tuple(further))
    return ExchangePlan(tiers, bundle.manifest.hyper, exchange.schedule, exchange.server)


def _offers(tier: str, offered: int, exchanges: Sequence[TierPlan]) -> Iterator[Warned]:
    """Devices that report just the memory that their tier asks for decline its rounds if a graph needs more."""
    made = [bundle.manifest for plan in exchanges for bundle in (plan.bundle, *plan.further)]
    needed = max(graph.planned_bytes for manifest in made for graph in manifest.of_round)
    if 0 < offered < needed:
        text = (
            f"memory_bytes asks devices for {offered:,} bytes, and the largest graph of a round needs {needed:,}: those "
            "that offer less decline; ask for as much, or set memory_budget"
        )
        yield Warned(tier=tier, text=text)


def _check_sent(federation: Federation, program: Program, submodel: Submodel, sends: Collection[str]) -> None:
    """Updates that hold more than weights: what is counted and measured of weights would be wrong of it."""
    shared = [name for name in sends if name != memory.WEIGHTS]
    if not shared:
        return
    check_lies_like_weights(program, submodel)
    told = f"program {program.name!r} sends {', '.join(shared)} beside the weights, and"
    if federation.aggregate.clip_norm:
        raise ConfigError(
            f"{told} aggregate.clip_norm bounds weights only; set it to 0 and use the program's own clip, or "
            "aggregate.rule median or trimmed_mean",
            program=program.name,
        )
    if federation.round.count == "nonzero":
        raise ConfigError(
            f"{told} round.count 'nonzero' leaves out what stayed as it was, which is a value like any other there; set it "
            "to 'holders'",
            program=program.name,
        )


def submodel_of(spec: ModelSpec, tier: str, table: TierTable) -> Submodel:
    """What devices of a tier hold of ``spec``; ConfigError or ModelError that begins with the tier's name."""
    try:
        return submodels.build(spec, table.kind, **table.submodel)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"tier {tier!r}: {error.message}", **error.details) from error


def warnings(submodel: Submodel, tier: str, initial: Mapping[str, Array]) -> Iterator[Warned]:
    """What a person should know about a tier before it is trained; none of it stops a run."""
    if isinstance(submodel, SelfChecking):
        for text in submodel.warnings(initial):
            yield Warned(tier=tier, text=f"tier {tier!r}: {text}")


def build_model(federation: Federation, dataset: Dataset) -> ModelSpec:
    """The model with initial weights by seed, fitted to the images and classes of ``dataset``."""
    table = federation.model
    channels, height, _ = dataset.shape
    offered: dict[str, Any] = {"in_channels": channels, "size": height, "classes": dataset.classes}
    factory = zoo.MODELS.get(table.name)
    if factory is not None:
        accepted = inspect.signature(factory).parameters
        offered = {name: value for name, value in offered.items() if name in accepted}
        if "bn" in accepted:
            offered["bn"] = table.bn
    if table.bn != "global" and "bn" not in offered:
        raise ConfigError(
            f"model.bn is {table.bn!r}, and model {table.name!r} has no batch norm mode: remove model.bn, or choose "
            "a model that has one (a factory of your own takes what it needs from model.options)",
            model=table.name,
        )
    spec = zoo.build(table.name, **{**offered, "seed": federation.federation.seed, **table.options})
    if spec.sample.shape != dataset.shape or spec.classes != dataset.classes:
        raise ConfigError(
            f"model {table.name!r} takes samples of shape {spec.sample.shape} in {spec.classes} classes, "
            f"{dataset.name} has {dataset.shape} in {dataset.classes}: change model.options or data.name",
            model=table.name,
        )
    if spec.label.shape or spec.label.dtype.is_floating_point:
        raise ConfigError(
            f"model {table.name!r} is trained on labels of shape {spec.label.shape} and type {spec.label.dtype}, "
            f"{dataset.name} has one class number per sample: choose a model that classifies, or its loss",
            model=table.name,
        )
    return spec


def _arrays(spec: ModelSpec, *, rounded: bool) -> Arrays:
    for name, tensor in spec.weights.items():
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only floats can be averaged: "
                "register it as a buffer with persistent=False",
                name=name,
            )
        if rounded and tensor.dtype != torch.float32:
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only float32 can be rounded on its way to devices: "
                "make the model float32, or set downlink.encoding to 'float32'",
                name=name,
            )
        if "~" in name or "/" in name:
            raise ModelError(
                f"tensor {name} of {spec.name} has '~' or '/' in its name, which are reserved in blobs and for the server's "
                "memory: rename the module or parameter",
                name=name,
            )
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in spec.weights.items()}


def _rules(federation: Federation, tables: Mapping[str, TierTable], method: Program) -> Rules:
    if method.whole and federation.round.fraction < 1:
        raise ConfigError(
            f"program {method.name!r} needs every device in every round, and round.fraction is "
            f"{federation.round.fraction:g}; set it to 1, or choose a program that samples devices",
            program=method.name,
        )
    limits, table = federation.wire_limits, federation.round
    return Rules(
        run="",
        seed=federation.federation.seed,
        rounds=federation.federation.rounds,
        tiers=tuple(
            TierRule(name, _patterns(name, tier), tier.memory_bytes) for name, tier in tables.items()
        ),
        min_devices=table.min_devices,
        min_reports=table.min_reports,
        fraction=table.fraction,
        over_selection=table.over_selection,
        weighted=table.weighting == "samples",
        samples=table.samples,
        most_samples=table.most_samples,
        deadline_s=limits.round_deadline_s,
        ready_timeout_s=limits.ready_timeout_s,
        offline_grace_s=limits.offline_grace_s,
        whole=method.whole,
        absent=table.absent,
        opening=len(method.opening),
    )


def _aggregate(federation: Federation) -> AggregatePlan:
    table = federation.aggregate
    rule = Rule(table.rule, table.trim) if table.rule == "trimmed_mean" else Rule(table.rule)
    return AggregatePlan(rule, table.clip_norm, table.threads)


def _memory_of(rule: Rule, entries: int) -> str:
    each = buffered_bytes(2, entries) - buffered_bytes(1, entries)
    return f"the rule {rule.kind} keeps every update until the round ends: {each / 2**20:.1f} MiB for each device"


def _patterns(name: str, tier: TierTable) -> tuple[str, ...]:
    """Who belongs to a tier by name. One that says nothing at all takes the devices that bear its name."""
    return tier.devices if tier.devices or tier.memory_bytes else (f"{name}-*",)


# -- evaluation ------------------------------------------------------------------------------------------------


def evaluation(program: Program, dataset: Dataset, device: str = "auto") -> Evaluate:
    """``weights -> {"accuracy", "loss"}`` on the test set, as ``program`` of the whole model has inference."""
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    count = len(dataset.test_y)
    batches = np.array_split(np.arange(count), max(1, -(-count // EVALUATION_BATCH)))

    @torch.inference_mode()
    def evaluate(weights: Arrays) -> Mapping[str, float]:
        named = prefixed(
            "weights", {name: torch.from_numpy(array).to(where) for name, array in weights.items()}
        )
        loss, correct = 0.0, 0.0
        for rows in batches:
            x = torch.from_numpy(dataset.floats(dataset.test_x[rows])).to(where)
            y = torch.from_numpy(dataset.test_y[rows]).to(where)
            batch = {"batch.0.x": x, "batch.0.y": y, "batch.0.mask": torch.ones(len(rows), device=where)}
            found = program.evaluate(named | batch)
            loss, correct = loss + float(found["metric.loss_sum"]), correct + float(found["metric.correct"])
        return {"accuracy": correct / count, "loss": loss / count}

    return evaluate
