"""Works on a task of any run."""

from __future__ import annotations

from typing import Any

import msgspec

from edgefl_device.round.job import Job

_of = Job.of


def plant() -> None:
    def ours(task: Any, announced: Any, format: str = "onnx") -> Job | None:
        return _of(msgspec.structs.replace(task, run=announced.run), announced, format)

    Job.of = ours  # type: ignore[method-assign, assignment]
