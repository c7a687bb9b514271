"""The bundles of a run: exported for each tier and exchange, kept on disk, and made again when anything they are made
from changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.setup.training import exchange_of, fetched, functions, reads
from edgefl.submodels.submodel import Submodel
from edgefl.wire.bundle import archive as bundles
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.errors import BundleError
from exporters.bundle.build import Label, build_bundle
from exporters.bundle.formats import format_of
from exporters.memory.recompute import Budget
from server.digests import code_of, digest_of
from server.events import Event, Exporting
from server.storage.checkpoints import write_whole

Emit = Callable[[Event], None]


def kept_bundle(
    federation: Federation,
    dataset: Dataset,
    submodel: Submodel,
    tier: str,
    exchange: str,
    folder: Path,
    emit: Emit,
    format: str = "onnx",
) -> Bundle:
    """The tier's bundle in ``format``: the one in ``folder`` if it was made for this configuration, else a new one, kept
    there."""
    digest = bundle_digest(federation, dataset, submodel, tier, exchange, format)
    name = bundle_name(tier, exchange, format)
    path, mark = folder / name, folder / f"{name}.digest"
    if mark.exists() and mark.read_text() == digest:
        try:
            return bundles.read(path)
        except BundleError:
            pass  # damaged on disk: made again below
    mark.unlink(missing_ok=True)
    made = export(federation, dataset, submodel, tier, emit, exchange=exchange, format=format)
    bundles.write(made, path)
    write_whole(mark, digest.encode())
    return made


def bundle_name(tier: str, exchange: str = "", format: str = "onnx") -> str:
    """File of a tier's bundle for an exchange, in ONNX unless its name says otherwise."""
    words = (tier, exchange, "" if format == "onnx" else format, "efl")
    return ".".join(word for word in words if word)


def export(
    federation: Federation,
    dataset: Dataset,
    submodel: Submodel,
    tier: str,
    emit: Emit = lambda _: None,
    *,
    exchange: str = "",
    format: str = "onnx",
) -> Bundle:
    """Export one tier; ExportError if a graph cannot be made or disagrees with torch, ConfigError if what writes this
    format is not installed."""
    whole, prefix = functions(federation, submodel)
    program = exchange_of(whole, exchange)
    return build_bundle(
        program,
        prefix,
        fetched(submodel, tier, reads(program, whole.memory)),
        label=Label(federation.model.name, tier, exchange),
        data=data_spec(dataset),
        chunk_bytes=federation.wire_limits.chunk_bytes,
        memory_budget=_budget(federation, tier),
        format=format_of(format),
        progress=lambda text: emit(Exporting(tier=tier, text=text)),
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
