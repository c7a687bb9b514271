"""Injection of a schedule of faults into the processes of a lab, each fault after its round's opening."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import psutil

from edgefl.errors import not_on_windows
from edgefl.lab.faults.links import LinkRelays
from edgefl.lab.faults.schedule import BROKER, EVERYBODY, SERVER, Fault, LinkFault, Schedule
from edgefl.lab.processes import Supervisor
from edgefl.system.files import write_text

_CLOCK = Path(__file__).parent / "clock"
_Work = Callable[[], None]


class Injector:
    """Injector of faults into the processes and links of a run, on the thread of the links.

    Processes must connect to the broker by :attr:`ports` (port by process name), and be started with
    :meth:`environment`. Pass each event of the server to :meth:`observe`.

    Args:
        schedule: the faults.
        supervisor: supervisor of the run's processes.
        devices: names of the devices.
        broker: (host, port) of the broker.
        folder: folder of the run.
        elsewhere: port of the broker for processes that use another one, by name.
    """

    def __init__(
        self,
        schedule: Schedule,
        supervisor: Supervisor,
        devices: Sequence[str],
        broker: tuple[str, int],
        folder: Path,
        elsewhere: Mapping[str, int] | None = None,
    ) -> None:
        if sys.platform == "win32" and schedule.faults:
            raise not_on_windows("a schedule of faults")
        self._schedule = schedule
        self._supervisor = supervisor
        self._names = (SERVER, *devices)
        self._folder = folder / "clocks"
        self._links = LinkRelays(self._names, broker, schedule.seed, elsewhere)
        self.ports: Mapping[str, int] = self._links.ports
        self._armed: set[int] = set()
        self._undo: set[_Work] = set()
        self.happened = 0
        """Number of faults so far, of links and of running processes."""

    def environment(self, name: str) -> dict[str, str]:
        """Return environment variables for the process ``name`` that let its wall clock jump; {} if no fault needs them."""
        jumps = any(fault.kind == "clock" for fault in self._schedule.faults)
        if name not in self._names or not jumps:
            return {}
        path = os.pathsep.join(filter(None, (str(_CLOCK), os.environ.get("PYTHONPATH", ""))))
        return {"PYTHONPATH": path, "EDGEFL_CLOCK_FILE": str(self._folder / name)}

    def observe(self, event: Mapping[str, Any]) -> None:
        """Schedule the faults of a round, once, if ``event`` of the server is the opening of the round."""
        number = event.get("round", 0)
        if event.get("event") != "roundopened" or number in self._armed:
            return
        self._armed.add(number)
        for fault in self._schedule.faults:
            if fault.round == number:
                self._links.later(fault.after_s, self._begin, fault)

    def stop(self) -> None:
        """Stop the links' thread, so that no further fault begins, and end all faults."""
        self._links.stop()
        for undo in self._undo:
            undo()

    def _begin(self, fault: Fault) -> None:
        of_links = fault.kind in get_args(LinkFault)
        self.happened += of_links or any(self._supervisor.running(name) for name in self._targets(fault))
        undo = self._link_fault(fault) if of_links else self._process_fault(fault)
        if undo is not None:
            self._undo.add(undo)
            self._links.later(fault.seconds, self._end, undo)

    def _end(self, undo: _Work) -> None:
        self._undo.discard(undo)
        undo()

    def _targets(self, fault: Fault) -> tuple[str, ...]:
        return self._names if fault.target == EVERYBODY else (fault.target,)

    def _link_fault(self, fault: Fault) -> _Work:
        names = self._targets(fault)
        self._links.begin(names, fault)
        return lambda: self._links.end(names, fault)

    def _process_fault(self, fault: Fault) -> _Work | None:
        undone = [undo for name in self._targets(fault) if (undo := self._disturb(name, fault)) is not None]

        def undo_all() -> None:
            for undo in undone:
                undo()

        return undo_all if undone else None

    def _disturb(self, name: str, fault: Fault) -> _Work | None:
        if sys.platform == "win32":
            raise not_on_windows("a fault")
        process = self._supervisor.running(name)
        if process is None:
            return None
        match fault.kind:
            case "kill":
                process.kill()
            case "stop":
                process.send_signal(signal.SIGSTOP)
                return lambda: process.send_signal(signal.SIGCONT)
            case "disk_full" if name != BROKER:
                _limit_files(process.pid, int(fault.amount))
                return lambda: _limit_files(process.pid, psutil.RLIM_INFINITY)
            case "clock":
                self._jump(name, fault.amount)
        return None

    def _jump(self, name: str, seconds: float) -> None:
        path = self._folder / name
        before = float(path.read_text()) if path.exists() else 0.0
        write_text(path, repr(before + seconds))


def _limit_files(pid: int, size: int) -> None:
    """Limit the size of files that process ``pid`` writes to ``size`` bytes. Longer writes then fail, as on a full disk."""
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))
