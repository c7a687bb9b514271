"""Memory that a round takes, by tier: as planned, or more where devices measured more."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import msgspec

from edgefl.system.files import write_text
from edgefl.system.sizes import mebibytes
from edgefl_server.coordinator.states import Rules
from edgefl_server.events import REPORTED, DeviceSeen, Warned

NAME = "memory_plans.json"
MOST_RAISED = 2.0
"""Times the exporter's plan: reports of devices are not trusted beyond it."""
LEAST_DEVICES = 3
"""Devices of a tier that report before its plan is raised: one that lies does not decide."""
MOST_DEVICES = 1000
"""Devices of a tier whose peaks are compared."""


def read_raised(folder: Path) -> dict[str, int]:
    """Return the plans of the run in ``folder`` that were raised, in bytes by tier. None were if the file cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / NAME).read_bytes(), type=dict[str, int])
    return {}


class MemoryPlans:
    """Plans of the tiers of a run, kept in its folder.

    The plan of a tier is raised to the median of its devices' peaks, and lowered again with it.

    Args:
        folder: of the run.
        planned: bytes by tier, as the exporter planned them.
    """

    def __init__(self, folder: Path, planned: Mapping[str, int]) -> None:
        self._folder = folder
        self._planned = planned
        self._raised = {tier: count for tier, count in read_raised(folder).items() if tier in planned}
        self._peaks: dict[str, dict[str, int]] = {tier: {} for tier in planned}

    def asked(self, rules: Rules) -> Rules:
        """Return ``rules`` with the raised plans, where a tier asks its devices for memory."""
        tiers = (
            replace(tier, raised_bytes=self._raised.get(tier.name, 0)) if tier.memory_bytes else tier
            for tier in rules.tiers
        )
        return replace(rules, tiers=tuple(tiers))

    def report(self, event: DeviceSeen) -> Warned | None:
        """Compare the peak of a round with its tier's plan.

        Returns:
            A warning if the plan was raised.
        """
        tier, planned = event.tier, self._planned.get(event.tier, 0)
        peaks = self._peaks.get(tier, {})
        if (
            event.stage != REPORTED
            or not planned
            or (len(peaks) >= MOST_DEVICES and event.device not in peaks)
        ):
            return None
        used = event.peak_bytes - event.idle_bytes
        peaks[event.device] = max(used, peaks.get(event.device, 0))
        if len(peaks) < LEAST_DEVICES:
            return None
        plan = self._raised.get(tier, planned)
        found = max(planned, min(median_low(peaks.values()), int(MOST_RAISED * planned)))
        if found == plan:
            return None
        self._raised[tier] = found
        with suppress(OSError):  # it is written again after a restart, by the next reports
            write_text(self._folder / NAME, msgspec.json.encode(self._raised).decode())
        if found < plan:
            return None
        text = (
            f"rounds of tier {tier!r} take {mebibytes(found)} on devices, planned {mebibytes(plan)}: the plan is raised; "
            "give small devices another tier, or set memory_budget"
        )
        return Warned(tier=tier, text=text)
