"""Size of the messages of a round, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.config import Federation
from edgefl.models.spec import ModelSpec
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import Offer, Round, encode

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
