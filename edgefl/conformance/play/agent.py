"""The agent: a command that becomes a process, with options as `edgefl device` has them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgefl.wire.errors import ConfigError

_KILL_S = 10.0


class Agent:
    """One process, in a group of its own, so that what it starts ends with it. ``log`` takes what it prints."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = list(command)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )
        except OSError as error:
            raise ConfigError(
                f"the agent's command cannot be run ({error.strerror}: {command[0]}); name one behind --, such as "
                "`-- edgefl device`"
            ) from error

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """At once, as a power cut does, with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """Ask it to leave (SIGTERM)."""
        self._process.terminate()

    def wait(self, within_s: float) -> int | None:
        """Its exit code; None if it still runs then."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
