"""Planned memory of a round, by tier, raised if devices report that they used more."""

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
MAX_FACTOR = 2.0
"""Largest multiple of the exporter's plan: reports of devices are not trusted beyond it."""
MIN_DEVICES = 3
"""Devices of a tier that report before its plan is raised: one malicious device does not decide."""
MAX_DEVICES = 1000
"""Devices of a tier whose peaks are compared."""


def read_raised(folder: Path) -> dict[str, int]:
    """Return the raised memory plans of the run in ``folder``: bytes by tier.

    An empty dict if the file is missing or invalid.
    """
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / NAME).read_bytes(), type=dict[str, int])
    return {}


class MemoryPlans:
    """Memory plans (bytes that a round takes on a device) of the tiers of a run, stored in its folder.

    The plan of a tier is raised to the median of its devices' reported peaks, and lowered when the median falls.

    Args:
        folder: Folder of the run.
        planned: Plans of the exporter, in bytes by tier.
    """

    def __init__(self, folder: Path, planned: Mapping[str, int]) -> None:
        self._folder = folder
        self._planned = planned
        self._raised = {tier: count for tier, count in read_raised(folder).items() if tier in planned}
        self._peaks: dict[str, dict[str, int]] = {tier: {} for tier in planned}
        self._applied: tuple[Rules, Rules] | None = None

    def apply(self, rules: Rules) -> Rules:
        """Return ``rules`` in which the memory requirement of each tier is raised to the memory that its devices reported.

        New devices must offer that much memory to join the tier. Tiers without a memory requirement do not change. The
        same object is returned until ``rules`` or a plan changes.
        """
        if self._applied is None or self._applied[0] is not rules:
            tiers = tuple(
                replace(tier, raised_bytes=self._raised.get(tier.name, 0)) if tier.memory_bytes else tier
                for tier in rules.tiers
            )
            self._applied = rules, replace(rules, tiers=tiers)
        return self._applied[1]

    def report(self, event: DeviceSeen) -> Warned | None:
        """Compare the peak memory of a device's round with its tier's plan, and raise or lower the plan.

        Args:
            event: Report of the device. Only reports of finished rounds count.

        Returns:
            A warning if the plan was raised, else None.
        """
        tier, planned = event.tier, self._planned.get(event.tier, 0)
        peaks = self._peaks.get(tier, {})
        is_new = event.device not in peaks
        if event.stage != REPORTED or not planned or (is_new and len(peaks) >= MAX_DEVICES):
            return None
        used = event.peak_bytes - event.idle_bytes
        peaks[event.device] = max(used, peaks.get(event.device, 0))
        if len(peaks) < MIN_DEVICES:
            return None
        plan = self._raised.get(tier, planned)
        measured = max(planned, min(median_low(peaks.values()), int(MAX_FACTOR * planned)))
        if measured == plan:
            return None
        self._raised[tier] = measured
        self._applied = None
        with suppress(OSError):  # after a restart the next reports write it again
            write_text(self._folder / NAME, msgspec.json.encode(self._raised).decode())
        if measured < plan:
            return None
        text = (
            f"rounds of tier {tier!r} take {mebibytes(measured)} on devices, planned {mebibytes(plan)}: the plan is raised; "
            "give small devices another tier, or set memory_budget"
        )
        return Warned(tier=tier, text=text)
