"""The campaign as a whole: one undisturbed run, and one run for each schedule."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from edgefl.bench.faults.campaign import FaultRow, Ran, disturbed, undisturbed
from edgefl.bench.faults.federation import ROUNDS, small_federation
from edgefl.lab.faults.schedule import Schedule, random_schedule
from edgefl.setup.tiers import device_names


class Campaign:
    """Measures schedules. ``keep``: where the folders of runs with other weights go.

    >>> with Campaign(broker="auto") as campaign:
    ...     rows = [campaign.measure(each, print) for each in campaign.random(range(1, 4))]
    """

    def __init__(self, *, broker: str, keep: Path | None = None) -> None:
        self.federation = small_federation(broker=broker)
        self._keep = keep
        self._calm: Ran | None = None

    def __enter__(self) -> Campaign:
        self._folder = Path(tempfile.mkdtemp(prefix="edgefl-faults-"))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def random(self, seeds: Iterable[int]) -> list[Schedule]:
        """The schedules of these seeds."""
        devices = device_names(self.federation)
        return [random_schedule(seed, devices, ROUNDS) for seed in seeds]

    def measure(self, schedule: Schedule, tell: Callable[[str], None]) -> FaultRow:
        """The run under ``schedule``. EdgeflError if the undisturbed one does not end."""
        if self._calm is None:
            tell("the undisturbed run")
            self._calm = undisturbed(self.federation, self._folder / "calm")
        tell(f"the schedule of seed {schedule.seed}")
        folder = self._folder / f"seed-{schedule.seed}"
        row = disturbed(self.federation, folder, schedule, self._calm, tell)
        if not row.same and self._keep is not None:
            shutil.copytree(folder, self._keep / folder.name, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return row
