"""Sizes of updates and announcements, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.config import Federation
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import role_of, select
from edgefl.data.dataset import Dataset
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import federation_model, naming_tier, submodel_of
from edgefl.setup.training import algorithm_of
from edgefl.submodels.submodel import Submodel
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import Offer, Round, encode
from edgefl.wire.regions import local_shape, pieces
from edgefl.wire.update.form import UpdateSize, update_size


def tier_sizes(
    federation: Federation, spec: ModelSpec, submodels: Mapping[str, Submodel]
) -> dict[str, UpdateSize]:
    """The size of an update, by tier. ConfigError or ModelError, which begins with the tier's name, where codec, algorithm
    and kind do not go together."""
    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}
    shapes = {name: array.shape for name, array in weights.items()}
    trained = {name for name, _ in spec.module.named_parameters(remove_duplicate=False)}
    by_tier = {}
    for tier, submodel in submodels.items():
        with naming_tier(tier):
            algorithm = algorithm_of(federation, submodel)
        regions = submodel.place(weights, 1).regions
        statistics = {
            name
            for name, region in regions.items()
            if not any(part in trained for part, _ in pieces(name, region, shapes))
        }
        local = _sent(algorithm)
        if local is None:
            local = {name: local_shape(name, region, shapes) for name, region in regions.items()}
        by_tier[tier] = update_size(algorithm.form, local, statistics)
    return by_tier


def _sent(algorithm: Algorithm) -> dict[str, tuple[int, ...]] | None:
    """The tensors of an update that holds more than weights, or less; None where it is the weights, in whatever form."""
    ports = (*algorithm.start.inputs, *algorithm.finish.inputs)
    if algorithm.form.sections or not (
        algorithm.server_state or any(role_of(name) == "carry" for name in ports)
    ):
        return None
    update = select(algorithm.finish(algorithm.finish.example(0)), "update")
    return {name: tuple(tensor.shape) for name, tensor in update.items()}


def update_sizes(federation: Federation, dataset: Dataset) -> dict[str, UpdateSize]:
    """Return the size of an update of each tier, for the federation's own model and tiers on ``dataset``."""
    spec = federation_model(federation, dataset)
    return tier_sizes(
        federation, spec, {tier: submodel_of(spec, tier, table) for tier, table in federation.tiers.items()}
    )


_MANIFEST_BYTES = 20_000
_SIGNATURE = bytes(64)
_HEADER_BYTES = 100  # of safetensors, for each tensor


def announcement(federation: Federation, spec: ModelSpec, tiers: Mapping[str, object]) -> tuple[int, int]:
    """(bytes of a round's announcement, messages that the round publishes at once), estimated: weights go whole, and what a
    tier gets beside the units is not in."""
    chunk = federation.wire_limits.chunk_bytes
    halves = federation.downlink.encoding == "float16"
    sizes: dict[str, int] = {}
    for name, tensor in spec.weights.items():
        unit = name.partition(".")[0]
        nbytes = tensor.numel() * tensor.element_size() // (2 if halves else 1)
        sizes[unit] = sizes.get(unit, 0) + nbytes + _HEADER_BYTES
    blobs = {unit: _ref(size, chunk) for unit, size in sizes.items()}
    formats = {name for tier in tiers for name in federation.formats_of(tier)}
    offer = Offer(
        bundles=dict.fromkeys(tiers, _ref(_MANIFEST_BYTES, chunk)),
        signatures=dict.fromkeys(tiers, _SIGNATURE),
    )
    message = Round(
        run="0" * 16,
        round=federation.federation.rounds,
        state="open",
        model_version="0" * 64,
        offers=dict.fromkeys(formats, offer),
        units={unit: (ref,) for unit, ref in blobs.items()},
        hyper={},
        base=0,
        deadline=1e9,
    )
    return len(encode(message)), 1 + sum(ref.count for ref in blobs.values())


def _ref(size: int, chunk: int) -> BlobRef:
    count = max(1, -(-size // chunk))
    return BlobRef(sha256="0" * 64, size=size, chunk=chunk, digests=bytes(32 * count) if count > 1 else b"")
