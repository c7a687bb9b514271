"""The tiers of a federation on one machine, filled in where its file says nothing, and the devices of each."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.config import Federation, TierTable, parse
from edgefl.errors import ConfigError


def completed(federation: Federation, per_tier: int = 2) -> Federation:
    """Fill in what one machine implies: the model's own tiers, devices per tier, waiting for all of them."""
    tiers = own_tiers(federation, per_tier)
    by_memory = any(table.memory_bytes for table in tiers.values())
    tiers = {
        name: table if by_memory else table.model_copy(update={"devices": table.devices or (f"{name}-*",)})
        for name, table in tiers.items()
    }
    check_counts(tiers)
    tables = federation.model_dump() | {"tiers": {name: table.model_dump() for name, table in tiers.items()}}
    if "min_devices" not in federation.round.model_fields_set:
        tables["round"]["min_devices"] = sum(table.count for table in tiers.values())
    return parse(tables, source="the federation")


def check_counts(tiers: Mapping[str, TierTable]) -> None:
    """Raise ConfigError if there are tiers, and one machine starts no device of any."""
    if tiers and not any(table.count for table in tiers.values()):
        raise ConfigError(
            "no tier has a count: say in [tiers.NAME] how many devices `edgefl run` is to start"
        )


def with_guests(federation: Federation, guests: int) -> Federation:
    """The federation on one machine, whose first round waits for so many devices from elsewhere too, unless its file
    says how many it waits for."""
    if "min_devices" in federation.round.model_fields_set:
        return completed(federation)
    whole = completed(federation)
    wanted = {"min_devices": whole.round.min_devices + guests}
    return whole.model_copy(update={"round": whole.round.model_copy(update=wanted)})


def own_tiers(federation: Federation, per_tier: int = 2) -> dict[str, TierTable]:
    """Return the tiers of the file, or of the model if the file has none."""
    return dict(federation.tiers) or _preset_tiers(federation.model.name, per_tier)


def _preset_tiers(model: str, count: int) -> dict[str, TierTable]:
    from edgefl.submodels.output_side.submodel import TIERS  # torch, which a server does without

    presets = TIERS.get(model)
    if presets is None:
        return {"strong": TierTable(count=count)}
    return {name: TierTable.model_validate({**tier.table, "count": count}) for name, tier in presets.items()}


def idle_tiers(federation: Federation) -> list[str]:
    """Return the tiers of which one machine starts no device."""
    return [name for name, table in federation.tiers.items() if not table.count]


def device_names(federation: Federation) -> list[str]:
    """``strong-0``, ``strong-1``, ``weak-0``, ..."""
    return [f"{tier}-{number}" for tier, table in federation.tiers.items() for number in range(table.count)]
