"""Judging cases in processes of their own, forked from one that has imported everything."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.case import Outcome

LIMIT_S = 120.0
Task = tuple[str, Callable[[], Outcome]]


class _Child(NamedTuple):
    name: str
    file: Path
    deadline: float


def isolated(tasks: Iterable[Task], jobs: int = 1, limit_s: float = LIMIT_S) -> Iterator[tuple[str, Outcome]]:
    """Run each task in a forked process and yield its name and outcome as it ends; a crash or hang ends only that one."""
    waiting = iter(tasks)
    running: dict[int, _Child] = {}
    with tempfile.TemporaryDirectory(prefix="edgefl-judge-") as folder:
        more = True
        while more or running:
            while more and len(running) < jobs:
                task = next(waiting, None)
                more = task is not None
                if task is not None:
                    file = Path(folder) / f"{time.monotonic_ns()}.json"
                    running[_start(task, file)] = _Child(task[0], file, time.monotonic() + limit_s)
            ended = _ended(running)
            if ended is None:
                time.sleep(0.02)
            else:
                yield ended


def _ended(running: dict[int, _Child]) -> tuple[str, Outcome] | None:
    """Return the outcome of one child that has ended, or whose time is over."""
    for process, child in list(running.items()):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            del running[process]
            if child.file.exists():
                return child.name, Outcome(**json.loads(child.file.read_text()))
            return child.name, Outcome("raised", f"the process ended with status {status}")
        if time.monotonic() > child.deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            del running[process]
            return child.name, Outcome("raised", "still running at the time limit")
    return None


def _start(task: Task, file: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.environ["EDGEFL_CACHE"] = str(file.with_suffix(""))
        try:
            outcome = task[1]()
        except BaseException as error:
            outcome = Outcome("undecided", f"the judge failed: {type(error).__name__}: {error}")
        part = file.with_suffix(".part")
        part.write_text(json.dumps(outcome.__dict__))
        part.rename(file)
        code = 0
    finally:
        os._exit(code)
