"""The bundles of a federation: each tier's exchanges compiled as its file says, and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.setup.digests import code_of, digest_of
from edgefl.submodels.submodel import Submodel
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import DataSpec
from exporters.bundle.formats import format_of
from exporters.front.compile import compiled
from exporters.front.folder import bundle_name, stored_bundle
from exporters.front.tier import Exchange, Tier
from exporters.memory.recompute import Budget

Progress = Callable[[str], None]


def export(
    federation: Federation,
    dataset: Dataset,
    tier: Tier,
    exchange: Exchange,
    *,
    format: str = "onnx",
    progress: Progress = lambda _: None,
) -> Bundle:
    """Compile one exchange of a tier; ExportError if a graph cannot be made or disagrees with torch, ConfigError if what
    writes this format is not installed."""
    return compiled(
        tier,
        exchange,
        model=federation.model.name,
        data=data_spec(dataset),
        format=format_of(format),
        chunk_bytes=federation.wire_limits.chunk_bytes,
        memory_budget=_budget(federation, tier.name),
        progress=progress,
    )


def stored(
    federation: Federation,
    dataset: Dataset,
    tier: Tier,
    exchange: Exchange,
    *,
    folder: Path,
    format: str = "onnx",
    progress: Progress = lambda _: None,
) -> Bundle:
    """The bundle in ``folder`` if it was made for this configuration, else a new one (:func:`export`), written there."""
    return stored_bundle(
        folder / bundle_name(tier.name, exchange.name, format),
        bundle_digest(federation, dataset, tier.submodel, tier.name, exchange.name, format),
        lambda: export(federation, dataset, tier, exchange, format=format, progress=progress),
    )


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


def bundle_digest(
    federation: Federation,
    dataset: Dataset,
    submodel: Submodel,
    tier: str,
    exchange: str = "",
    format: str = "onnx",
) -> str:
    """Digest of all that decides a tier's bundle."""
    return digest_of(
        {
            "code": code_of(federation),
            "model": federation.model.model_dump(mode="json"),
            "program": federation.program.model_dump(mode="json"),
            "exchange": exchange,
            "codec": federation.codec.model_dump(mode="json"),
            "weights": {name: list(tensor.shape) for name, tensor in submodel.spec.weights.items()},
            "submodel": submodel.identity,
            "memory_budget": _budget(federation, tier),
            "data": data_spec(dataset),
            "chunk": federation.wire_limits.chunk_bytes,
            "format": [format, format_of(format).version],
            "torch": str(torch.__version__),
        }
    )
