"""Goes on from what it kept of a round that was abandoned."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl_device.round import scheduler
from edgefl_device.round.job import Job

_of = Job.of


def plant() -> None:
    def based(*arguments: Any) -> Job | None:
        job = _of(*arguments)
        return job and msgspec.structs.replace(job, base=job.round - 1)

    Job.of = based  # type: ignore[method-assign, assignment]
    scheduler.drop_abandoned = lambda *_: None
