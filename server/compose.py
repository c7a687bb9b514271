"""From a federation file to a plan: the model, its tiers, their bundles, the initial weights and the evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import applied
from edgefl.codecs.codec import Codec
from edgefl.config import Federation, TierTable
from edgefl.data.dataset import Dataset
from edgefl.models import zoo
from edgefl.models.spec import ModelSpec
from edgefl.programs import catalog
from edgefl.programs.contract import Program, prefixed
from edgefl.programs.forward import chunk_forward
from edgefl.programs.objective import Objective
from edgefl.submodels import catalog as submodels
from edgefl.submodels.output_side import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire import bundle as bundles
from edgefl.wire.bundle import Bundle
from edgefl.wire.errors import BundleError, ConfigError, ModelError
from edgefl.wire.manifest import DataSpec
from edgefl.wire.tensors import Array, Arrays
from exporters.bundle import Label, Prefix, build_bundle
from exporters.recompute import Budget
from server.checkpoints import write_whole
from server.coordinator import Rules
from server.digests import code_of, digest_of, run_digest
from server.downlink import check_counting
from server.events import Event, Exporting, Warned
from server.plan import AggregatePlan, DownlinkPlan, Evaluate, Plan, TierPlan
from server.robust import Rule, buffered_bytes
from server.roster import TierRule

FORWARD_BATCH = 32
"""Rows per group in a frozen forward pass (EmbracingFL Algorithm 1, b)."""

EVALUATION_BATCH = 500
"""Static batch norm takes its statistics from test batches; the spec asks for large ones (2.7)."""

Emit = Callable[[Event], None]


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
    forms = {tier: program.form for tier, program in programs.items()}
    own = [tier for tier, submodel in held.items() if not submodel.units]
    check_counting(federation.round.count, federation.downlink.encoding, forms, own)
    tiers: dict[str, TierPlan] = {}
    late: dict[str, float] = {}
    for tier, submodel in held.items():
        for warned in warnings(submodel, tier, initial):
            emit(warned)
        bundle = _bundle(federation, dataset, submodel, tier, out / "bundles", emit)
        tiers[tier] = TierPlan(bundle, submodel.place, forms[tier])
        late |= programs[tier].late
    defaults = next(iter(tiers.values())).bundle.manifest.hyper
    aggregate = _aggregate(federation)
    if aggregate.rule.buffered:
        emit(Warned(tier="", text=_memory_of(aggregate.rule, sum(array.size for array in initial.values()))))
    return Plan(
        federation=federation.federation.name,
        digest=run_digest(federation),
        rules=_rules(federation, tables),
        tiers=tiers,
        units=spec.units,
        initial=initial,
        hyper=defaults,
        lr_decay_at=federation.round.lr_decay_at,
        late=late,
        count=federation.round.count,
        trained=frozenset(name for name, _ in spec.module.named_parameters(remove_duplicate=False)),
        aggregate=aggregate,
        downlink=DownlinkPlan(**federation.downlink.model_dump()),
        evaluate=evaluation(program_of(federation, OutputSide(spec, 0)), dataset, device),
        evaluate_every=federation.round.evaluate_every,
        limits=federation.wire_limits,
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
        if "~" in name:
            raise ModelError(
                f"tensor {name} of {spec.name} has '~' in its name, which is reserved in blobs: "
                "rename the module or parameter",
                name=name,
            )
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in spec.weights.items()}


def _rules(federation: Federation, tables: Mapping[str, TierTable]) -> Rules:
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


# -- bundles ---------------------------------------------------------------------------------------------------


def _bundle(
    federation: Federation, dataset: Dataset, submodel: Submodel, tier: str, folder: Path, emit: Emit
) -> Bundle:
    """The tier's bundle: the one in ``folder`` if it was made for this configuration, else a new one, kept there."""
    digest = bundle_digest(federation, dataset, submodel, tier)
    path, mark = folder / f"{tier}.efl", folder / f"{tier}.efl.digest"
    if mark.exists() and mark.read_text() == digest:
        try:
            return bundles.read(path)
        except BundleError:
            pass  # damaged on disk: made again below
    mark.unlink(missing_ok=True)
    made = export(federation, dataset, submodel, tier, emit)
    bundles.write(made, path)
    write_whole(mark, digest.encode())
    return made


def export(
    federation: Federation, dataset: Dataset, submodel: Submodel, tier: str, emit: Emit = lambda _: None
) -> Bundle:
    """Export one tier; ExportError if a graph cannot be made or disagrees with torch."""
    program, prefix = functions(federation, submodel)
    return build_bundle(
        program,
        prefix,
        fetched(submodel, tier),
        label=Label(model=federation.model.name, tier=tier),
        data=data_spec(dataset),
        chunk_bytes=federation.wire_limits.chunk_bytes,
        memory_budget=_budget(federation, tier),
        progress=lambda text: emit(Exporting(tier=tier, text=text)),
    )


def fetched(submodel: Submodel, tier: str) -> tuple[str, ...]:
    """Names under which the weights to train are published: units that tiers share, or the tier's own payload."""
    return submodel.units or (f"{tier}/submodel",)


def functions(federation: Federation, submodel: Submodel) -> tuple[Program, list[Prefix]]:
    """What a bundle holds, before it is exported: the program of the trained units, and the frozen chunks."""
    prefix = [
        Prefix(chunk.units, chunk_forward(chunk.module, chunk.sample, batch=FORWARD_BATCH))
        for chunk in submodel.prefix
    ]
    return program_of(federation, submodel), prefix


def program_of(federation: Federation, submodel: Submodel) -> Program:
    """The local training of a submodel, its update coded. ConfigError where program, codec and kind do not go together."""
    codec = codecs.build(federation.codec.name, **federation.codec.options)
    if codec.feedback and submodel.moves:
        raise ConfigError(
            f"codec {codec.name!r} keeps on each device what coding lost of every entry, and kind {submodel.kind!r} holds "
            "other entries in each round; choose a codec without feedback, or a kind that stays in its place",
            codec=codec.name,
            kind=submodel.kind,
        )
    objective = Objective.of(submodel)
    name, options = _trained_by(codec, federation)
    program = catalog.build(name, objective, **options)
    if program.own_inference and submodel.prefix:
        raise ConfigError(
            f"program {name!r} computes with its weights in a form of its own, and a tier with frozen units would run these "
            "as they are; choose another program, or a kind that trains the whole depth, such as width",
            program=name,
            kind=submodel.kind,
        )
    return applied(codec, program, objective)


def _trained_by(codec: Codec, federation: Federation) -> tuple[str, dict[str, Any]]:
    """The program and its options: the federation's own, or the one in place of sgd that the codec belongs to."""
    table, training = federation.program, codec.training
    if training is None:
        return table.name, table.arguments
    if table.name not in ("sgd", training.program):
        raise ConfigError(
            f"codec {codec.name!r} goes with the local training {training.program!r}, and program.name is {table.name!r}; "
            "leave program.name out, or choose a codec that codes the result of any training",
            codec=codec.name,
            program=table.name,
        )
    return training.program, {**table.arguments, **training.options}


def _budget(federation: Federation, tier: str) -> Budget | None:
    table = federation.tiers.get(tier)
    return Budget.parse(table.memory_budget) if table and table.memory_budget else None


def data_spec(dataset: Dataset) -> DataSpec:
    """What the devices' samples look like."""
    return DataSpec(
        shape=dataset.shape,
        dtype="float32",
        classes=dataset.classes,
        scale=float(dataset.scale),
        shift=float(dataset.shift),
    )


def bundle_digest(federation: Federation, dataset: Dataset, submodel: Submodel, tier: str) -> str:
    """Digest of all that decides a tier's bundle."""
    return digest_of(
        {
            "code": code_of(federation),
            "model": federation.model.model_dump(mode="json"),
            "program": federation.program.model_dump(mode="json"),
            "codec": federation.codec.model_dump(mode="json"),
            "weights": {name: list(tensor.shape) for name, tensor in submodel.spec.weights.items()},
            "submodel": submodel.identity,
            "memory_budget": _budget(federation, tier),
            "data": data_spec(dataset),
            "chunk": federation.wire_limits.chunk_bytes,
            "torch": str(torch.__version__),
        }
    )


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
