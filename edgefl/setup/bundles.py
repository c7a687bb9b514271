"""Compilation of a federation's bundles, and the compile requests of existing bundles."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import numpy as np

from edgefl.algorithms.activations import store_activations
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.algorithms.evaluation import EVALUATE
from edgefl.config import Federation, load, without_devices
from edgefl.contract.algorithm import Function
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import MODELS
from edgefl.setup.model import data_spec, federation_model, submodel_of
from edgefl.setup.tiers import completed
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Manifest, Split
from edgefl.wire.tensors import Array
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.compiler.cache import BundleCache, CompiledBundle
from edgefl_export.compiler.compiler import Compiler, target_of
from edgefl_export.compiler.request import CompileRequest, Exchange, TierTraining
from edgefl_export.memory.recompute import Budget
from edgefl_export.target import Target
from edgefl_export.verify.graphs import Verification

Progress = Callable[[str], None]


class PortsOnlyTarget(Target):
    """Export target that lowers functions only to get the names, shapes and dtypes of their ONNX inputs and outputs.

    It writes no files.
    """

    name = "onnx"

    def emit(self, lowered: LoweredGraph, budget: Budget | None = None) -> Artifact:
        return Artifact(b"")

    def verify(
        self,
        function: Function,
        model: bytes,
        seed: int,
        in_place: Collection[str] = (),
        *,
        quick: bool = False,
    ) -> Verification:
        return Verification(function.name, seed, {})


def bundle_of(
    federation: Federation,
    dataset: Dataset,
    tier: TierTraining,
    exchange: Exchange,
    *,
    format: str = "onnx",
    cache: BundleCache | None = None,
    progress: Progress = lambda _: None,
) -> CompiledBundle:
    """Return the bundle of one exchange of a tier: from the cache, or else compiled.

    An exchange is a round trip of the algorithm; most algorithms have one.

    Args:
        federation: the settings of the export.
        dataset: the samples that the tier's devices have.
        tier: the tier.
        exchange: one of its exchanges.
        format: the format of the graphs.
        cache: compiled bundles; by default the user's.
        progress: called with a line of text before each graph.

    Raises:
        ExportError: if a graph cannot be made or disagrees with torch.
        ConfigError: if the package that writes the format is not installed.
    """
    target = target_of(format, federation.export.outputs)
    compiler = Compiler(target, cache or BundleCache.of_user())
    return compiler.compile(_request(federation, dataset, tier, exchange), progress)


def outline_of(
    federation: Federation,
    dataset: Dataset,
    tier: TierTraining,
    exchange: Exchange,
    *,
    progress: Progress = lambda _: None,
) -> BundleArchive:
    """Return a bundle with a complete manifest and empty graphs. Nothing is written or run.

    Args:
        federation: the settings of the export.
        dataset: the samples that the tier's devices have.
        tier: the tier.
        exchange: one of its exchanges (round trips between server and device).
        progress: called with a line of text before each graph.

    Raises:
        ExportError: if a function breaks the contract.
    """
    return Compiler(PortsOnlyTarget()).compile(_request(federation, dataset, tier, exchange), progress).bundle


def _request(
    federation: Federation, dataset: Dataset, tier: TierTraining, exchange: Exchange
) -> CompileRequest:
    table = federation.tiers.get(tier.name)
    return tier.request(
        exchange,
        model=federation.model.name,
        data=data_spec(dataset),
        chunk_bytes=federation.wire_limits.chunk_bytes,
        memory_budget=Budget.parse(table.memory_budget) if table and table.memory_budget else None,
        tokenizer=dataset.tokenizer,
        split=split_of(federation, exchange),
    )


def split_of(federation: Federation, exchange: Exchange) -> Split | None:
    """Return the division of a device's rows for ``exchange``: an evaluation uses held-out rows, any other exchange
    training rows.

    None if the federation holds out no rows.
    """
    table = federation.evaluate
    if not table.split:
        return None
    part: Literal["train", "held-out"] = "held-out" if exchange.name == EVALUATE else "train"
    return Split(share=table.split, seed=federation.federation.seed, part=part)


def request_of(manifest: Manifest, federation: Federation | None = None, model: str = "") -> CompileRequest:
    """Return the request from which a bundle was compiled, as far as its manifest describes it.

    Args:
        manifest: the bundle's manifest.
        federation: the federation that the bundle was exported with; its tier of the same name is used. None: the
            model, units (stages of the model) and algorithm that the manifest names, with default options.
        model: name of a model to use instead; "" for the model of the manifest or federation.

    Raises:
        ConfigError: if the manifest does not describe enough, or if the federation has no such tier.
    """
    settings = federation or _settings_of(manifest, model)
    if model:
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"name": model})})
    data = manifest.data
    x, (y, ignored) = np.zeros((1, *data.shape), np.uint8), _label(manifest)
    rows = {each.name: np.zeros((1, *each.shape), each.dtype) for each in data.others}
    others = {each.name: OtherInput(rows[each.name], rows[each.name], each.below) for each in data.others}
    samples = Dataset(
        "the bundle",
        x,
        y,
        x,
        y,
        data.scale,
        data.shift,
        data.classes,
        below=data.below,
        others=others,
        ignored=ignored,
    )
    spec = federation_model(settings, samples)
    if federation is None:
        submodel: Submodel = _units(manifest, spec)
    else:
        tiers = completed(without_devices(settings)).tiers
        if manifest.tier not in tiers:
            raise ConfigError(f"the bundle is of tier {manifest.tier!r}; the file has {', '.join(tiers)}")
        submodel = submodel_of(spec, manifest.tier, tiers[manifest.tier])
    activations = next((manifest.graph(phase.graph).activations for phase in manifest.phases), "float32")
    tier = TierTraining(
        manifest.tier, submodel, store_activations(algorithm_of(settings, submodel), activations)
    )
    return tier.request(tier.exchange(manifest.exchange), model=manifest.model, data=manifest.data)


def _label(manifest: Manifest) -> tuple[Array, int | None]:
    """Return (label of zeros, class number to ignore) as the bundle's graphs read labels. The label has shape (1,
    *label). The number is None if no class is ignored.
    """
    graphs = (*(phase.graph for phase in manifest.phases), manifest.evaluate)
    for port in (port for name in graphs for port in manifest.graph(name).inputs_of("batch")):
        if port.label.endswith(".y"):
            return np.zeros((1, *port.shape[1:]), port.dtype), port.ignored
    return np.zeros(1, np.int64), None


def _settings_of(manifest: Manifest, model: str) -> Federation:
    """Return a federation with the model and algorithm of a manifest, and defaults for all else.

    ``model`` replaces the manifest's model, unless it is "".

    Raises:
        ConfigError: if the manifest does not describe enough.
    """
    if manifest.codec != "dense":
        raise ConfigError(
            f"the bundle's updates are coded by {manifest.codec!r}, whose options it does not list: name the federation "
            "that it was exported with",
            codec=manifest.codec,
        )
    named: tuple[tuple[str, str, Collection[str]], ...] = (
        ("model", model or manifest.model, MODELS),
        ("algorithm", manifest.program, ALGORITHMS),
    )
    for what, name, known in named:
        if name not in known and ":" not in name:
            raise ConfigError(
                f"the bundle was made with {what} {name!r}, which edgefl does not bring, and does not say in which file "
                "that is: name the federation that it was exported with",
                **{what: name},
            )
    settings: dict[str, object] = {
        "model.name": manifest.model,
        "algorithm.name": manifest.program,
        "algorithm.batch": manifest.batch,
    }
    if len(manifest.phases) == 1:
        settings["algorithm.steps"] = manifest.phases[0].steps
    if "lr" in manifest.hyper:
        settings["algorithm.lr"] = manifest.hyper["lr"]
    return load(None, settings)


def _units(manifest: Manifest, spec: ModelSpec) -> OutputSide:
    if manifest.suffix[0] == f"{manifest.tier}/submodel":
        raise ConfigError(
            f"tier {manifest.tier!r} holds a part of its own of the model, which the bundle does not describe: name the "
            "federation file that it was exported with",
            tier=manifest.tier,
        )
    # Units that a chunk reads beside its own come later: trained ones, or those of a later chunk.
    later, groups = set(manifest.suffix), list[tuple[str, ...]]()
    for chunk in reversed(manifest.prefix):
        groups.insert(0, tuple(unit for unit in chunk.units if unit not in later))
        later.update(chunk.units)
    named, first = [unit for group in groups for unit in group], manifest.suffix[0]
    if first in spec.units and named != list(spec.units[: spec.units.index(first)]):
        raise ConfigError(
            f"tier {manifest.tier!r} has frozen units without weights, which the bundle does not name: name the federation "
            "file that it was exported with",
            tier=manifest.tier,
        )
    return OutputSide(spec, len(named), groups)
