"""Which devices rounds may select, by the conditions that they report (:mod:`edgefl.wire.mqtt.messages`), and how rounds
select among them. Pure data and functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgefl.wire.mqtt.messages import THERMAL, Conditions

Policy = Literal["uniform", "tiers", "longest-idle"]
Heat = Literal["any", "cool", "warm"]


@dataclass(frozen=True)
class Selection:
    """What the table ``selection`` of a federation file says.

    ``power``, ``link`` and ``thermal``: what is asked of a device; of what it does not know, ``unknown`` says whether that
    is enough. ``quotas``: shares of the tiers for policy ``tiers``. ``measured``: more devices are selected than are wanted,
    as many as the last rounds lost, at most ``most_over_selection`` times as many. ``quorum``: a round opens once it will
    have its ``min_reports`` with that probability, or has waited for ``patience_s``; 0: it does not wait for that.
    """

    policy: Policy = "uniform"
    quotas: tuple[tuple[str, float], ...] = ()
    power: Literal["any", "charging"] = "any"
    link: Literal["any", "unmetered"] = "any"
    thermal: Heat = "any"
    unknown: Literal["out", "in"] = "out"
    measured: bool = False
    most_over_selection: float = 3.0
    quorum: float = 0.0
    patience_s: float = 120.0


EVERYONE = Selection()


def unfit(selection: Selection, conditions: Conditions) -> str:
    """Why a device in these conditions is not selected, in words; empty if it may be."""
    if conditions.available is False:
        return "its owner does not let it train now"
    wants = (
        ("power", selection.power, conditions.power, conditions.power == selection.power),
        ("link", selection.link, conditions.link, conditions.link == selection.link),
        ("thermal", selection.thermal, conditions.thermal, _cool_enough(selection.thermal, conditions)),
    )
    for name, wanted, actual, holds in wants:
        if wanted == "any" or holds or (not actual and selection.unknown == "in"):
            continue
        return f"selection.{name} is {wanted}, and it is {actual or 'unknown'}"
    return ""


def _cool_enough(most: Heat, conditions: Conditions) -> bool:
    return conditions.thermal in THERMAL[: THERMAL.index(most) + 1] if most != "any" else True
