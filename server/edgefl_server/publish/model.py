"""The global model as one round begins: its weights, and what each tier gets of them."""

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


def of_units(weights: Mapping[str, Array], units: Iterable[str]) -> dict[str, Arrays]:
    """Return each unit's tensors under their global names, without units that have none."""
    by_unit = {
        unit: {name: array for name, array in weights.items() if name.startswith(f"{unit}.")}
        for unit in units
    }
    return {unit: own for unit, own in by_unit.items() if own}


def unit_blobs(weights: Mapping[str, Array], units: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield one safetensors blob per unit with its tensors under their global names. Skips units without tensors."""
    return ((unit, tensors.dump(own)) for unit, own in of_units(weights, units).items())


def version_of(units: Iterable[tuple[str, bytes]]) -> str:
    """Return the model version: the SHA-256 over the SHA-256 of each unit's blob, by unit."""
    digests = {unit: hashlib.sha256(data).hexdigest() for unit, data in units}
    whole = hashlib.sha256()
    for unit in sorted(digests):
        whole.update(f"{unit}={digests[unit]}\n".encode())
    return whole.hexdigest()


@dataclass(frozen=True)
class ModelVersion:
    """``weights`` (with the server's state) after round ``number``; each tier's share of them in the next."""

    number: int
    weights: Arrays
    version: str
    placements: Mapping[str, Placement]

    @classmethod
    def of(cls, spec: RunSpec, number: int, weights: Arrays) -> ModelVersion:
        """Return the version of the model after round ``number``, 0 for the initial one."""
        placements = {name: tier.place(weights, number + 1) for name, tier in spec.tiers.items()}
        return cls(number, weights, version_of(unit_blobs(weights, spec.units)), placements)

    def parts(self, spec: RunSpec) -> dict[str, PublishedPart]:
        """Return everything that a tier reads, by the name under which it is published."""
        units = of_units(self.weights, spec.units)
        parts: dict[str, PublishedPart] = {}
        for exchange in spec.exchanges:
            for tier, placement in self.placements.items():
                parts |= self._parts_of(exchange.tiers[tier], placement, units, spec.trained)
        return parts

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
