"""Takes every scalar from the manifest."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl_device.round.job import Job

_of = Job.of


def plant() -> None:
    def without(*arguments: Any) -> Job | None:
        job = _of(*arguments)
        return job and msgspec.structs.replace(job, hyper={})

    Job.of = without  # type: ignore[method-assign, assignment]
