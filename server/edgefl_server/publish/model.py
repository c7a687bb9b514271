"""The global model as one round begins: its weights, and what each tier gets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgefl.contract import server_state
from edgefl.wire.regions import Placement, extract
from edgefl.wire.tensors import Arrays
from edgefl_server.publish.downlink import PublishedPart
from edgefl_server.publish.publisher import of_units, unit_blobs, version_of
from edgefl_server.run_spec import RunSpec, TierSpec


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
        """Everything that a tier reads, by the name under which it is published."""
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
