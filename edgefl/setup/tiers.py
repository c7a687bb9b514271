"""Tiers of a federation, from its file, its model, or a text on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from edgefl.config import Federation, TierTable, parse
from edgefl.errors import ConfigError
from edgefl.facts import shipped
from edgefl.wire.text import suggest


def completed(federation: Federation, per_tier: int = 2) -> Federation:
    """Return the federation completed for a run on one machine.

    Missing tiers are the model's own, missing patterns of device names are ``TIER-*``, and rounds wait for all
    devices if ``round.min_devices`` is not set.

    Args:
        federation: the federation.
        per_tier: number of devices of each tier, if the tiers are the model's own.

    Raises:
        ConfigError: if no tier has a device.
    """
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
    """Raise ConfigError if there are tiers, but none has a number of devices."""
    if tiers and not any(table.count for table in tiers.values()):
        raise ConfigError(
            "no tier has a count: say in [tiers.NAME] how many devices `edgefl run` is to start"
        )


def with_guests(federation: Federation, guests: int) -> Federation:
    """Return the federation completed for one machine, whose rounds also wait for ``guests`` devices on other machines.

    If the file sets ``round.min_devices``, its value stays.
    """
    if "min_devices" in federation.round.model_fields_set:
        return completed(federation)
    whole = completed(federation)
    wanted = {"min_devices": whole.round.min_devices + guests}
    return whole.model_copy(update={"round": whole.round.model_copy(update=wanted)})


def own_tiers(federation: Federation, per_tier: int = 2) -> dict[str, TierTable]:
    """Return the tables of the tiers by name: those of the file, or the model's own with ``per_tier`` devices each.

    A model without tiers of its own gets one tier ``strong``, the whole model.
    """
    return dict(federation.tiers) or _preset_tiers(federation.model.name, per_tier)


def _preset_tiers(model: str, count: int) -> dict[str, TierTable]:
    from edgefl.submodels.output_side.submodel import TIERS  # torch, which a server does without

    presets = TIERS.get(model)
    if presets is None:
        return {"strong": TierTable(count=count)}
    return {name: TierTable.model_validate({**tier.table, "count": count}) for name, tier in presets.items()}


def idle_tiers(federation: Federation) -> list[str]:
    """Return the names of the tiers without devices on one machine."""
    return [name for name, table in federation.tiers.items() if not table.count]


def device_names(federation: Federation) -> list[str]:
    """Return the names of the devices on one machine: ``strong-0``, ``strong-1``, ``weak-0``, ..."""
    return [f"{tier}-{number}" for tier, table in federation.tiers.items() for number in range(table.count)]


GRAMMAR = "[NAME=]KIND[:SIZE][*DEVICES], separated by commas"
_PRESETS = ("strong", "moderate", "weak")
_ITEM = re.compile(r"(?:(?P<name>[^=:*,]+)=)?(?P<kind>[^=:*,]+)(?::(?P<size>[^=:*,]+))?(?:\*(?P<count>\d+))?")


def check_tiers(text: str) -> None:
    """Check the tiers in a text of the command line (:func:`parse_tiers`) without loading a model or torch.

    Raises:
        ConfigError: if the text does not follow the grammar, or no model has such a tier.
    """
    kinds = sorted(shipped().kinds)
    for _, kind, size, _ in _items(text) if text else ():
        known = kinds if size else ("full", *_PRESETS, *kinds)
        if kind not in known:
            what = f"{kind!r} with a size" if size else repr(kind)
            raise ConfigError(
                f"no tier {what}; there are {', '.join(known)}{suggest(kind, known)}", tier=kind
            )
        if size:
            _size_options(kind, size)


def _items(text: str) -> Iterator[tuple[str, str, str, int | None]]:
    """Yield (name, kind, size, devices) of each tier in a text. Size is "" and devices is None if they are missing.

    Raises:
        ConfigError: if a tier cannot be read, or a name is repeated.
    """
    names: set[str] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"cannot read the tier {item.strip()!r}; tiers are {GRAMMAR}", tier=item)
        kind = match["kind"].strip()
        name = (match["name"] or kind).strip().replace("_", "-")
        if name in names and match["name"]:
            raise ConfigError(f"two tiers are called {name!r}; give each its own name", tier=name)
        name = name if name not in names else f"{name}{len(names) + 1}"
        names.add(name)
        yield name, kind, (match["size"] or "").strip(), int(match["count"]) if match["count"] else None


def parse_tiers(text: str, model: str, *, count: int = 1) -> dict[str, dict[str, Any]]:
    """Return the tables ``tiers`` of a federation file from a text of the command line, by tier's name.

    Args:
        text: ``[NAME=]KIND[:SIZE][*DEVICES]`` separated by commas. KIND is a submodel kind, ``full``, or a preset of
            the model (``strong``, ``moderate``, ``weak``). SIZE is the share of the parameters (``0.25``, ``1/4``), or
            for ``output_side`` the number of frozen units (stages of the model). Without NAME a tier has the name of
            its kind.
        model: name of the model, for its presets.
        count: number of devices of a tier without DEVICES.

    Raises:
        ConfigError: if the text does not follow the grammar, which the message contains.
    """
    from edgefl.submodels.catalog import KINDS
    from edgefl.submodels.output_side.submodel import TIERS

    presets = TIERS.get(model, {})
    tables: dict[str, dict[str, Any]] = {}
    for name, kind, size, devices in _items(text):
        preset = presets.get(kind) if not size else None
        if kind == "full" and not size:
            table: dict[str, Any] = {"cut": 0}
        elif preset is not None:
            table = dict(preset.table)
        else:
            if kind not in KINDS:
                raise ConfigError(
                    f"no tier {kind!r} of {model}; there are {', '.join(['full', *presets])}, "
                    f"and with a size after a colon the kinds {', '.join(sorted(KINDS))}",
                    tier=kind,
                )
            table = _size_options(kind, size)
        tables[name] = table | {"count": count if devices is None else devices}
    return tables


def _size_options(kind: str, size: str) -> dict[str, Any]:
    if kind == "output_side":
        if size and not size.isdigit():
            raise ConfigError(f"the size of output_side is the number of frozen units, found {size!r}")
        return {"cut": int(size or 0)}
    if not size:
        return {"kind": kind}
    try:
        gamma = float(Fraction(size))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"the size of {kind} is a share such as 0.25 or 1/4, found {size!r}") from error
    if not 0 < gamma <= 1:
        raise ConfigError(
            f"the size of {kind} is a share above 0 and at most 1, like 1/4; found {size!r}",
            kind=kind,
            size=size,
        )
    return {"kind": kind, "gamma": gamma}
