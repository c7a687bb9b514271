"""Conditions that devices need to be selected, and options of the selection. Pure data and functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgefl.wire.mqtt.messages import THERMAL, Conditions

Policy = Literal["uniform", "tiers", "longest-idle"]
Heat = Literal["any", "cool", "warm"]


@dataclass(frozen=True)
class SelectionRules:
    """Options of the selection of devices: table ``selection`` of a federation file.

    Attributes:
        policy: Order in which devices are selected.
        quotas: (tier, share) pairs for the policy ``tiers``.
        power: Required power supply.
        link: Required kind of link.
        thermal: Highest thermal state.
        unknown: Treatment of devices that do not report a condition: ``in`` selects them.
        measured: Select more devices than wanted, by the share of tasks that the last rounds lost.
        most_over_selection: Largest number of selected devices, as a multiple of the wanted ones.
        quorum: Probability of getting ``min_reports`` updates with which a round opens; 0 to open without it.
        patience_s: Longest wait for the quorum, in seconds.
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


EVERYONE = SelectionRules()


def unfit(selection: SelectionRules, conditions: Conditions) -> str:
    """Return the reason why a device with these conditions must not be selected; an empty text if it may be selected."""
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
