"""Running `edgefl run` as a user does, watching it, and killing parts of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

EDGEFL = [sys.executable, "-m", "edgefl"]
PATIENCE_S = 600.0
ENGINES = ("onnx", pytest.param("executorch", marks=pytest.mark.slow))
"""What devices run on. `make test` has one engine of each test, `make test-all` and CI have both."""

on_both_engines = pytest.mark.parametrize("engine", ENGINES)

# Small enough that a run takes seconds, mixed enough that every tier takes part.
SMALL = """
[federation]
name = "e2e"
[model]
name = "resnet8"
options = { widths = [4, 8, 16] }
[program]
batch = 8
steps = 6
[data]
name = "digits"
train_samples = 240
test_samples = 200
[tiers.strong]
cut = 0
count = 1
[tiers.moderate]
cut = 2
count = 1
[tiers.weak]
cut = 3
chunks = 2
count = 1
[limits]
checkpoint_steps = 1
ack_timeout_s = 3
"""


@dataclass
class Run:
    """One `edgefl run --json` under watch."""

    process: subprocess.Popen[bytes]
    folder: Path
    rounds: list[dict[str, Any]] = field(default_factory=list)
    _thread: threading.Thread | None = None

    @classmethod
    def start(cls, folder: Path, arguments: Sequence[str], config: str = SMALL) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder.parent / f"{folder.name}.toml"
        file.write_text(config)
        command = [*EDGEFL, "run", str(file), "--out", str(folder), "--json", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        run = cls(process, folder)
        run._thread = threading.Thread(target=run._read, daemon=True)
        run._thread.start()
        return run

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.rounds.append(json.loads(line))

    def pids(self) -> dict[str, int]:
        try:
            return dict(json.loads((self.folder / "processes.json").read_text()))
        except (OSError, ValueError):
            return {}

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}: {self.errors()}"
            assert time.monotonic() < deadline, f"no {what} in {PATIENCE_S} s: {self.logs()}"
            time.sleep(0.005)

    def kill(self, name: str) -> None:
        """SIGKILL one child of the run."""
        os.kill(self.pids()[name], signal.SIGKILL)

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end; the rounds it printed."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            raise AssertionError(f"the run did not end: {self.logs()}") from None
        assert self._thread is not None
        self._thread.join(10)
        assert code == 0, f"exit code {code}: {self.errors()} {self.logs()}"
        return self.rounds

    def errors(self) -> str:
        return self.process.stderr.read().decode() if self.process.stderr else ""

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-1500:]}" for log in (self.folder / "logs").glob("*.log")
        )


def run_to_the_end(folder: Path, arguments: Sequence[str], config: str = SMALL) -> list[dict[str, Any]]:
    return Run.start(folder, arguments, config).finish()


@dataclass(frozen=True)
class Calm:
    """A run that nobody disturbs, with all of its devices on one engine: what the same run comes to when it is."""

    engine: str
    folder: Path
    arguments: tuple[str, ...]
    config: str
    rounds: list[dict[str, Any]]

    @classmethod
    def of(cls, engine: str, folder: Path, arguments: Sequence[str], config: str = SMALL) -> Calm:
        told = (*arguments, "--engine", engine)
        return cls(engine, folder, told, config, run_to_the_end(folder, told, config))

    @property
    def weights_sha256(self) -> str:
        """The digest of its final weights."""
        return str(self.rounds[-1]["weights_sha256"])

    def beside(self, folder: Path, *more: str, config: str = "") -> Run:
        """The same run under way in another folder, which need not export the same bundles again.

        ``more``: further arguments, which win; ``config``: another file for the same bundles.
        """
        shutil.copytree(self.folder / "bundles", folder / "bundles")
        return Run.start(folder, [*self.arguments, *more], config or self.config)
