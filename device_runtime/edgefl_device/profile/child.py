"""Profiler in a separate process: memory above idle is exact, and a crash does not end the agent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl.errors import BundleError, EdgeflError, RoundAborted, RoundDeclined
from edgefl.system.processes import end_with_input, sign_of_life
from edgefl.wire.bundle.profiles import BundleProfile
from edgefl.wire.mqtt.messages import LATE, MALFORMED, PROFILE_FAILED
from edgefl_device.sandbox.confine import Confinement
from edgefl_device.sandbox.process import command, environment

if TYPE_CHECKING:
    import subprocess

_POLL_S = 0.05
_MOST_OUTPUT = 16 << 20
_LAST_WORDS = 300


@dataclass(frozen=True, kw_only=True)
class ProfilerProcess:
    """Profiler that runs in a separate process.

    Attributes:
        engine: Format of the graphs.
        threads: Threads that the device trains with.
        confinement: Rights of the process that runs graphs; None: those of this process.
    """

    engine: str
    threads: int
    confinement: Confinement | None = None

    def measure(self, bundle: Path, repeat: int, cancelled: threading.Event, until: float) -> BundleProfile:
        """Start a process that measures a bundle, and wait for its profile. The process is killed if the wait ends
        early.

        Args:
            bundle: The bundle's file; the output files are written beside it.
            repeat: Measured calls of each graph.
            cancelled: Event that ends the measurement.
            until: Deadline as ``time.monotonic()``.

        Raises:
            RoundAborted: ``cancelled`` was set.
            RoundDeclined: The deadline passed, or the process failed.
        """
        import subprocess

        bundle = bundle.absolute()
        out, errors = bundle.with_suffix(".out"), bundle.with_suffix(".err")
        with out.open("wb") as output, errors.open("wb") as complaints, sign_of_life() as line:
            process = subprocess.Popen(
                self._command(bundle, repeat),
                stdin=line,
                stdout=output,
                stderr=complaints,
                cwd=bundle.parent,
                # Files that it leaves when it is killed go with the bundle.
                env=environment() | {"TMPDIR": str(bundle.parent)},
                start_new_session=True,
            )
            try:
                _wait(process, cancelled, until)
            finally:
                _end(process)
        if process.returncode != 0:
            words = errors.read_text(errors="replace").strip()[-_LAST_WORDS:] or "it said nothing"
            raise RoundDeclined(PROFILE_FAILED, f"nothing was measured (code {process.returncode}): {words}")
        return _read(out)

    def _command(self, bundle: Path, repeat: int) -> list[str]:
        bounds = msgspec.json.encode(self.confinement).decode()
        arguments = (str(bundle), self.engine, str(self.threads), str(repeat), bounds)
        return command("edgefl_device.profile.child", *arguments)


def _wait(process: subprocess.Popen[bytes], cancelled: threading.Event, until: float) -> None:
    while process.poll() is None:
        if cancelled.is_set():
            raise RoundAborted("a round began while a bundle was profiled")
        if time.monotonic() > until:
            raise RoundDeclined(LATE, "the profile was not done in time: ask with a longer `timeout`")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its child processes, one for each graph."""
    running = process.poll() is None
    with suppress(ProcessLookupError):
        if sys.platform != "win32":
            os.killpg(process.pid, signal.SIGKILL)  # also where it ended, or was ended, before them
        elif running:
            process.kill()
    process.wait()


def _read(out: Path) -> BundleProfile:
    if out.stat().st_size > _MOST_OUTPUT:
        raise BundleError(f"the profile takes {out.stat().st_size} bytes, more than {_MOST_OUTPUT}")
    try:
        return msgspec.json.decode(out.read_bytes(), type=BundleProfile)
    except MALFORMED as error:
        raise BundleError(f"the profile cannot be read: {error}; install one edgefl only") from error


def main(bundle: str, engine: str, threads: str, repeat: str, bounds: str) -> None:
    """Profile the file ``bundle`` and print the result as JSON; an error becomes the exit code of this process.

    Args:
        bundle: Path of the bundle.
        engine: Format to run.
        threads: Threads of the engine, a number as text.
        repeat: Measured calls of each graph, a number as text.
        bounds: Confinement of the processes that run graphs, as JSON.
    """
    from edgefl.wire.bundle.archive import read_bundle
    from edgefl_device.profile.whole import ProfileSettings, profile_bundle

    end_with_input()
    try:
        settings = ProfileSettings(
            engine=engine,
            threads=int(threads),
            repeat=int(repeat),
            confinement=msgspec.json.decode(bounds, type=Confinement | None),
        )
        profile = profile_bundle(read_bundle(Path(bundle)), settings)
    except EdgeflError as error:
        sys.stderr.write(error.message + "\n")
        sys.exit(error.exit_code)
    sys.stdout.buffer.write(msgspec.json.encode(profile))


if __name__ == "__main__":
    main(*sys.argv[1:])
