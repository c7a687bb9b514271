"""Processes of a run: supervised ones, restarted after a crash, and single agents."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import ConfigError, EdgeflError
from edgefl.system.files import write_whole
from edgefl.system.processes import PARENT, last_line, module_command
from edgefl.wire.text import printable

_RESTARTS = 20
_CRASHES = 2
"""Crashes of a process until the run ends; kills are restarted more often, because they do not repeat by themselves."""
_PAUSE_S = 0.3
_ERROR = "error: "


@dataclass
class SupervisedProcess:
    """State of a supervised process.

    Attributes:
        name: its name in the run.
        command: command line.
        log: file that gets its texts and its standard error.
        process: the running or last process.
        restarts: number of restarts.
        crashes: number of exits with an error code.
        done: True after an exit with code 0.
        started_at: monotonic time of the last start.
        environment: environment variables in addition to those of the run.
    """

    name: str
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    crashes: int = 0
    done: bool = False
    started_at: float = field(default=0.0)
    environment: Mapping[str, str] = field(default_factory=dict)


class Supervisor:
    """Supervisor of a run's processes. It restarts those that crashed or were killed.

    A process that exits with 0 is done. The exit code of an expected error (bad configuration, bad data, port in use)
    ends the run, because a restart would not help. Process ids are in ``processes.json`` of ``folder``; lines of
    output are queued in ``lines`` as (process name, bytes). ``environment``: additional variables of all processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            PARENT: str(os.getpid()),
            **(environment or {}),
        }
        self._children: dict[str, SupervisedProcess] = {}
        self.lines: queue.Queue[tuple[str, bytes]] = queue.Queue()

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start ``python -m edgefl <arguments>`` as the process ``name``. ``environment``: additional environment
        variables.
        """
        self.start_program(name, module_command("edgefl", *arguments), environment)

    def start_program(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start any program as the process ``name``. ``environment``: additional environment variables."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        log = self._folder / "logs" / f"{name}.log"
        child = SupervisedProcess(name, command, log, environment=environment or {})
        self._children[name] = child
        self._spawn(child)

    def _spawn(self, child: SupervisedProcess) -> None:
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._environment, **child.environment},
            )
        child.started_at = time.monotonic()
        threading.Thread(target=self._read, args=(child, child.process), daemon=True).start()
        self._write_pids()

    def _read(self, child: SupervisedProcess, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with child.log.open("a", buffering=1) as log:
            for line in process.stdout:
                if text := _text_of(line):
                    log.write(f"{text}\n")
                self.lines.put((child.name, line))

    def _write_pids(self) -> None:
        pids = {
            name: child.process.pid
            for name, child in self._children.items()
            if child.process and not child.done
        }
        write_whole(self._folder / "processes.json", msgspec.json.encode(pids))

    def check(self) -> list[str]:
        """Restart processes that died, and return the names of the restarted ones.

        Raises:
            EdgeflError: if a process ended with the code of an expected error, or too often.
        """
        restarted = []
        for child in self._children.values():
            if child.done or child.process is None or (code := child.process.poll()) is None:
                continue
            if code == 0:
                child.done = True
                self._write_pids()
                continue
            child.crashes += code > 0
            if code in _EXPECTED or child.crashes > _CRASHES or child.restarts >= _RESTARTS:
                raise _failure(child, code)
            child.restarts += 1
            if time.monotonic() - child.started_at < 1.0:
                time.sleep(_PAUSE_S)
            self._spawn(child)
            restarted.append(child.name)
        return restarted

    def pid(self, name: str) -> int:
        process = self._children[name].process
        return process.pid if process else 0

    def running(self, name: str) -> subprocess.Popen[bytes] | None:
        """Return the process ``name``, or None if it does not run at the moment."""
        child = self._children.get(name)
        process = child.process if child is not None and not child.done else None
        return process if process is not None and process.poll() is None else None

    def replace(self, name: str, environment: Mapping[str, str]) -> None:
        """Kill the process ``name``. :meth:`check` restarts it with the additional variables ``environment``."""
        child = self._children[name]
        child.environment = {**child.environment, **environment}
        if (process := self.running(name)) is not None:
            process.kill()

    def is_done(self, name: str) -> bool:
        return self._children[name].done

    def wait(self, names: Sequence[str], timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until the processes ``names`` are done. Those that die are restarted.

        Raises:
            EdgeflError: if a process ended with the code of an expected error, or too often.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not all(self.is_done(name) for name in names):
            self.check()
            time.sleep(0.05)

    def stop(self) -> None:
        """Terminate running processes, and kill them after 5 s."""
        running = [process for name in self._children if (process := self.running(name))]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        (self._folder / "processes.json").unlink(missing_ok=True)


_EXPECTED = {kind.exit_code for kind in EdgeflError.__subclasses__()}


def _text_of(line: bytes) -> str:
    """Return the text to log for a line of output. A JSON event becomes its type and text, or "" without a text."""
    try:
        event = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return printable(line.decode(errors="replace").rstrip())
    return printable(f"{event.get('event', '')}  {event['text']}") if event.get("text") else ""


def _failure(child: SupervisedProcess, code: int) -> EdgeflError:
    """Return the error for a process that exited with ``code``. Its text has the process's error message or last line."""
    text = child.log.read_text(errors="replace")
    errors = "\n".join(line for line in text.splitlines() if line.startswith(_ERROR))
    words = last_line(errors or text, "it said nothing").removeprefix(_ERROR)
    error = EdgeflError(f"{child.name} stopped with code {code}: {words} (see {child.log})")
    error.exit_code = code if code in _EXPECTED else 1
    return error


class AgentProcess:
    """Agent in a process group of its own.

    Args:
        command: command line of the agent.
        log: file to which its output is appended.
        environment: additional environment variables.

    Raises:
        ConfigError: if the command cannot be run.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                )
        except OSError as error:
            raise ConfigError(
                f"the agent's command cannot be run ({error.strerror or error}: {command[0]!r}): name a command that takes "
                "the options of `edgefl device`",
                command=command[0],
            ) from error

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the agent, or None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill the agent and all its children at once, as a power cut does."""
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform != "win32":
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Ask the agent to end (SIGTERM)."""
        self._process.terminate()

    def wait(self, within_s: float | None = None) -> int | None:
        """Wait for the agent to end and return its exit code. Return None if it still runs after ``within_s`` seconds."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
