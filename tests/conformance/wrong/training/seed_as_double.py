"""Keeps the seed in a number that has 53 bits."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl_device.round.job import Job

_of = Job.of


def plant() -> None:
    def rounded(*arguments: Any) -> Job | None:
        job = _of(*arguments)
        return job and msgspec.structs.replace(job, seed=int(float(job.seed)))

    Job.of = rounded  # type: ignore[method-assign, assignment]
