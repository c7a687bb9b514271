"""The bundles of a federation: each tier's exchanges compiled as its file says, or out of the cache; outlines of models."""

from __future__ import annotations

from collections.abc import Callable, Collection

from edgefl.config import Federation
from edgefl.contract.algorithm import Function
from edgefl.data.dataset import Dataset
from edgefl.setup.samples import data_spec
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.bundle.manifest import Graph
from edgefl_export.artifact import Artifact
from edgefl_export.bundle.formats import Format, format_of
from edgefl_export.capture.trace import Captured, Joint, capture
from edgefl_export.front.cache import BundleCache, Found
from edgefl_export.front.compile import cached, compiled
from edgefl_export.front.order import Order
from edgefl_export.front.tier import Exchange, Tier
from edgefl_export.memory.recompute import Budget
from edgefl_export.verify.graphs import Verification

# A bundle without its graphs: the manifest that a compiled one has, for whoever runs the functions themselves.


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
