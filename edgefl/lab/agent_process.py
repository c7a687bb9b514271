"""Process of a device agent that takes the options of `edgefl device`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from edgefl.errors import ConfigError


class AgentProcess:
    """An agent in a process group of its own, so that its children end with it. Its output is appended to ``log``.

    Raises ConfigError if the command cannot be run.
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
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """Ask the agent to leave (SIGTERM)."""
        self._process.terminate()

    def wait(self, within_s: float | None = None) -> int | None:
        """Return the exit code, or None if the agent still runs after ``within_s`` seconds."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
