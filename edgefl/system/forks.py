"""Independent tasks in forked processes, which share all that was imported and built before.

::

    tasks = [partial(offer, size) for size in sizes]            # each is called with a function for progress texts
    for result in side_by_side(tasks, print, processes=processes_for(GIB)):
        ...                                                     # in the order of the tasks

Results do not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from edgefl.system.memory import cores

Result = TypeVar("Result")
Report = Callable[[str], None]
Task = Callable[[Report], Result]

_SYSTEM_BYTES = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_NONE = -1


def processes_for(nbytes: int) -> int:
    """Return the number of processes that cores and free memory allow, if each needs ``nbytes``.

    It is at least 1, and always 1 except on Linux, where forks are safe.
    """
    if sys.platform != "linux":
        return 1
    return max(1, min(cores(), _free_bytes() // nbytes))


def side_by_side(
    tasks: Sequence[Task[Result]], report: Report, *, processes: int, begin: Callable[[], None] = lambda: None
) -> Iterator[Result]:
    """Run tasks in forked processes, and yield their results in the order of the tasks.

    If a task raises an error, it is raised here when its result is due, and the other tasks are killed. A single
    task, or tasks with one process, run in this process. So does a task whose process dies or whose result cannot be
    pickled.

    Args:
        tasks: functions that take a function for progress texts and return a result.
        report: receives the progress texts of all tasks.
        processes: largest number of processes.
        begin: called first in each process; if it raises, the process ends and its tasks run here.
    """
    count = min(processes, len(tasks))
    if count <= 1:
        yield from (task(report) for task in tasks)
        return
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            workers.append(_fork(tasks, begin, [worker.line for worker in workers]))
        yield from _collect(tasks, workers, report)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.line.close()


@dataclass(eq=False)
class _Worker:
    """Worker process, the connection ``line`` to it, and the number of its current task (negative if it has none)."""

    process: BaseProcess
    line: Connection
    task: int = _NONE


@dataclass(frozen=True)
class _ProgressText:
    text: str


@dataclass(frozen=True)
class _Raised:
    error: Exception


class _NotSent:
    """Placeholder for a result that cannot be pickled."""


def _fork(tasks: Sequence[Task[Result]], begin: Callable[[], None], others: Sequence[Connection]) -> _Worker:
    if sys.platform != "linux":
        raise AssertionError("expected Linux: elsewhere processes_for() allows one process")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(tasks, there, begin, [here, *others]), daemon=True)
    with warnings.catch_warnings():
        # That another thread may hold a lock: those of Python's own are made anew, and of ours none lives in a task.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    return _Worker(process, here)


def _work(
    tasks: Sequence[Task[Result]],
    line: Connection,
    begin: Callable[[], None],
    inherited: Sequence[Connection],
) -> None:
    """Run tasks in the child process, by the numbers that the parent sends, until the parent closes the connection.

    Args:
        tasks: all tasks.
        line: connection to the parent.
        begin: function to call first.
        inherited: connections of the parent and of other workers, which are closed here.
    """
    for each in inherited:  # the other ends, which would keep the lines open
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the tasks stops them
    try:
        begin()
    except Exception:  # the tasks then run in the parent
        return
    with suppress(EOFError, OSError):
        while True:
            line.send_bytes(_sendable(_call(tasks[line.recv()], lambda text: line.send(_ProgressText(text)))))


def _call(task: Task[Result], report: Report) -> Any:
    try:
        return task(report)
    except Exception as error:  # raised again by who asked
        return _Raised(error)


def _sendable(result: Any) -> bytes:
    try:
        sent = pickle.dumps(result)
        pickle.loads(sent)  # an error whose class takes other arguments than it keeps fails only here
    except Exception:  # any class may refuse
        return pickle.dumps(_NotSent())
    return sent


def _collect(tasks: Sequence[Task[Result]], workers: Sequence[_Worker], report: Report) -> Iterator[Result]:
    waiting = iter(range(len(tasks)))
    arrived: dict[int, Any] = {}
    for worker in workers:
        _send_task(worker, waiting)
    for number in range(len(tasks)):
        while number not in arrived and (busy := [worker for worker in workers if worker.task >= 0]):
            ready = wait([worker.line for worker in busy])
            for worker in (each for each in busy if each.line in ready):
                _receive(worker, arrived, waiting, report)
        result = arrived.pop(number, _NotSent())  # lost if all processes have ended
        if isinstance(result, _Raised):
            raise result.error
        yield tasks[number](report) if isinstance(result, _NotSent) else result


def _receive(worker: _Worker, arrived: dict[int, Any], waiting: Iterator[int], report: Report) -> None:
    """Receive one message of a worker: a progress text, a result, or the end of its process.

    A result is stored in ``arrived`` by the number of its task, and the worker gets its next task from ``waiting``.
    """
    try:
        message = worker.line.recv()
    except (EOFError, OSError):
        arrived[worker.task] = _NotSent()
        worker.task = _NONE
        return
    if isinstance(message, _ProgressText):
        report(message.text)
        return
    arrived[worker.task] = message
    _send_task(worker, waiting)


def _send_task(worker: _Worker, waiting: Iterator[int]) -> None:
    """Send the next number in ``waiting`` to ``worker`` as its task. If none is left, mark the worker as idle."""
    worker.task = next(waiting, _NONE)
    if worker.task >= 0:
        with suppress(OSError):  # it died meanwhile: its line says so when it is read
            worker.line.send(worker.task)


def _free_bytes() -> int:
    """Return the free memory of the machine or of the control group, whichever is less; 0 if it is not reported."""
    free = 0
    with suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in _SYSTEM_BYTES.read_text().splitlines())
        free = int(lines.get("MemAvailable", "0 kB").split()[0]) << 10
    with suppress(OSError, ValueError):  # no limit is the word max
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return free
