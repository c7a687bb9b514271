"""Version of the global model between two rounds: its weights, and the share of each tier."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from edgefl.contract import server_state
from edgefl.wire import tensors
from edgefl.wire.regions import Placement, extract
from edgefl.wire.tensors import Array, Arrays
from edgefl_server.publish.downlink import PublishedPart
from edgefl_server.run_spec import RunSpec, TierSpec


def group_by_unit(weights: Mapping[str, Array], units: Iterable[str]) -> dict[str, Arrays]:
    """Return the tensors of each unit (stage of the model): by unit, then by global name. Units without tensors are
    left out.

    ``weights`` is by global name, such as ``unit.layer.weight``.
    """
    by_unit = {
        unit: {name: array for name, array in weights.items() if name.startswith(f"{unit}.")}
        for unit in units
    }
    return {unit: own for unit, own in by_unit.items() if own}


def unit_blobs(weights: Mapping[str, Array], units: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (unit, safetensors blob of its tensors under their global names) for each of ``units``, the stages of the
    model.

    Units without tensors are left out.
    """
    return ((unit, tensors.dump(own)) for unit, own in group_by_unit(weights, units).items())


def version_of(units: Iterable[tuple[str, bytes]]) -> str:
    """Return the model version, a SHA-256 in hexadecimal digits over the SHA-256 of each unit's blob, sorted by unit.

    ``units`` are (unit, blob) pairs in any order.
    """
    digests = {unit: hashlib.sha256(data).hexdigest() for unit, data in units}
    whole = hashlib.sha256()
    for unit in sorted(digests):
        whole.update(f"{unit}={digests[unit]}\n".encode())
    return whole.hexdigest()


@dataclass(frozen=True)
class ModelVersion:
    """Global model after a round.

    Attributes:
        number: Number of the round; 0 for the initial model.
        weights: Tensors of the model and of the server's state.
        version: Digest of the weights.
        placements: Share of each tier in the next training round.
    """

    number: int
    weights: Arrays
    version: str
    placements: Mapping[str, Placement]

    @classmethod
    def of(cls, spec: RunSpec, number: int, weights: Arrays) -> ModelVersion:
        """Return the model version with ``weights`` after round ``number``.

        It contains the placements (the share of each tier) for the next training round, and for evaluations before it.
        """
        following = spec.rules.trained_rounds(number) + 1
        placements = {name: tier.place(weights, following) for name, tier in spec.tiers.items()}
        return cls(number, weights, version_of(unit_blobs(weights, spec.units)), placements)

    def parts(self, spec: RunSpec) -> dict[str, PublishedPart]:
        """Return all parts of the model that some tier reads, by the name under which they are published.

        A part is a unit (stage) of the model, or the own payload of a tier.
        """
        units = group_by_unit(self.weights, spec.units)
        parts: dict[str, PublishedPart] = {}
        for exchange in spec.exchanges:
            for tier, placement in self.placements.items():
                parts |= self._parts_of(exchange.tiers[tier], placement, units, spec.trained)
        return parts | {unit: PublishedPart(units[unit], frozenset()) for unit in spec.norms.units}

    def _parts_of(
        self, tier: TierSpec, placement: Placement, units: Mapping[str, Arrays], trained: frozenset[str]
    ) -> dict[str, PublishedPart]:
        if not placement.payload:
            manifest = tier.bundle.manifest
            names = (*manifest.suffix, *(unit for chunk in manifest.prefix for unit in chunk.units))
            return {unit: PublishedPart(units[unit], trained) for unit in names if unit in units}
        parts = {tier.published: PublishedPart.of_payload(placement, trained)}
        for state in tier.reads:
            regions = server_state.regions_of(placement, [state], trained)
            arrays = extract(self.weights, regions)
            parts[f"{tier.published}/{state}"] = PublishedPart(arrays, frozenset(), regions=regions)
        return parts
