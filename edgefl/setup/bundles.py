"""Bundles of a federation, and the functions that a bundle was made of."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from edgefl.algorithms.activations import stored
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.config import Federation, load, without_devices
from edgefl.contract.algorithm import Function
from edgefl.data.dataset import Dataset, OtherInput
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import MODELS
from edgefl.setup.model import federation_model, submodel_of
from edgefl.setup.samples import data_spec
from edgefl.setup.tiers import completed
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.bundle.manifest import Graph, Manifest
from edgefl.wire.tensors import Array
from edgefl_export.artifact import Artifact
from edgefl_export.bundle.formats import Format, format_of
from edgefl_export.bundle.verify import Origin
from edgefl_export.capture.trace import Captured, Joint, capture
from edgefl_export.front.cache import BundleCache, Found
from edgefl_export.front.compile import cached, compiled
from edgefl_export.front.order import Order
from edgefl_export.front.tier import Exchange, Tier
from edgefl_export.memory.recompute import Budget
from edgefl_export.verify.graphs import Verification


# A bundle without graphs has the manifest of a compiled one, for devices that run the functions themselves.
class Outline:
    """Format ``name`` whose graphs have the ports of the compiled ones, but are not written."""

    version = ""

    def __init__(self, name: FormatName = "onnx") -> None:
        self.name: FormatName = name

    def capture(self, function: Function, joint: Joint | None = None) -> Captured:
        return capture(function, joint=joint)

    def write(self, _captured: Captured) -> Artifact:
        return Artifact(b"")

    def write_within(self, _captured: Captured, _budget: Budget) -> tuple[Artifact, int]:
        return Artifact(b""), 0

    def verify(
        self,
        function: Function,
        _model: bytes,
        seed: int,
        _in_place: Collection[str] = (),
        *,
        quick: bool = False,
    ) -> Verification:
        return Verification(function.name, seed, {})

    def verify_again(
        self, function: Function, model: bytes, seed: int, in_place: Collection[str] = ()
    ) -> Verification:
        return self.verify(function, model, seed, in_place)

    def variants(self, _captured: Captured, _artifact: Artifact, _verified: Verification) -> dict[str, bytes]:
        return {}

    def differs(self, _graph: Graph, _model: bytes) -> str:
        return ""


Progress = Callable[[str], None]


def bundle_of(
    federation: Federation,
    dataset: Dataset,
    tier: Tier,
    exchange: Exchange,
    *,
    format: str = "onnx",
    cache: BundleCache | None = None,
    progress: Progress = lambda _: None,
) -> Found:
    """The bundle of one exchange of a tier, compiled where ``cache`` (default: the user's) has none.

    ExportError if a graph cannot be made or disagrees with torch, ConfigError if what writes this format is not
    installed.
    """
    order = _order(federation, dataset, tier, exchange, format_of(format, federation.export.outputs))
    return cached(cache or BundleCache.of_user(), order, progress)


def outline_of(
    federation: Federation,
    dataset: Dataset,
    tier: Tier,
    exchange: Exchange,
    *,
    progress: Progress = lambda _: None,
) -> Bundle:
    """The bundle with its manifest and without its graphs: nothing is compiled. ExportError if a function breaks the
    contract."""
    return compiled(_order(federation, dataset, tier, exchange, Outline()), progress)


def _order(federation: Federation, dataset: Dataset, tier: Tier, exchange: Exchange, format: Format) -> Order:
    return Order(
        tier,
        exchange,
        model=federation.model.name,
        data=data_spec(dataset),
        format=format,
        chunk_bytes=federation.wire_limits.chunk_bytes,
        memory_budget=_budget(federation, tier.name),
        tokenizer=dataset.tokenizer,
    )


def _budget(federation: Federation, tier: str) -> Budget | None:
    table = federation.tiers.get(tier)
    return Budget.parse(table.memory_budget) if table and table.memory_budget else None


def origin_of(manifest: Manifest, federation: Federation | None = None, model: str = "") -> Origin:
    """The functions of the federation's tier of this name; without one, of the units and the algorithm that the manifest
    lists, with default options. ``model`` is compared with instead of the one that is named.

    ConfigError where the manifest does not say enough, or the federation has no such tier.
    """
    settings = federation or _told(manifest, model)
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
    tier = Tier(manifest.tier, submodel, stored(algorithm_of(settings, submodel), _activations(manifest)))
    return origin(tier, tier.exchange(manifest.exchange))


def _activations(manifest: Manifest) -> str:
    """Return the dtype in which the steps of a bundle store activations."""
    return next((manifest.graph(phase.graph).activations for phase in manifest.phases), "float32")


def _label(manifest: Manifest) -> tuple[Array, int | None]:
    """A label as the bundle's graphs read it, (1, *label), and the number that counts for nothing among such."""
    graphs = (*(phase.graph for phase in manifest.phases), manifest.evaluate)
    for port in (port for name in graphs for port in manifest.graph(name).inputs_of("batch")):
        if port.label.endswith(".y"):
            return np.zeros((1, *port.shape[1:]), port.dtype), port.ignored
    return np.zeros(1, np.int64), None


def origin(tier: Tier, exchange: Exchange) -> Origin:
    """Return the sources of a bundle: the functions of a tier's exchange."""
    return Origin(exchange.algorithm, tier.prefix, tier.fetched(exchange), exchange.name)


def _told(manifest: Manifest, model: str) -> Federation:
    """Return the federation that a manifest describes, with defaults for all else. ``model`` replaces the manifest's."""
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
