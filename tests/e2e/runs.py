"""Running `edgefl run` as a user does, watching it, and killing parts of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgefl.wire import tensors
from edgefl.wire.tensors import Arrays

EDGEFL = [sys.executable, "-m", "edgefl"]
PATIENCE_S = 600.0

# An export takes half a second for each graph of a model as small as this, and a round next to nothing.
TINY = """
[federation]
name = "e2e"
[model]
name = "mlp"
options = { hidden = [8] }
[algorithm]
batch = 8
steps = 3
[data]
name = "digits"
train_samples = 90
test_samples = 100
[limits]
checkpoint_steps = 1
ack_timeout_s = 3
"""
"""What every run here has in common, without tiers."""

ONE_EACH = """
[tiers.strong]
count = 1
[tiers.phone]
engine = "executorch"
count = 1
"""
"""Two devices with the whole model, one on each engine."""


@dataclass
class Run:
    """One `edgefl run --json` under watch."""

    process: subprocess.Popen[bytes]
    folder: Path
    rounds: list[dict[str, Any]] = field(default_factory=list)
    _thread: threading.Thread | None = None

    @classmethod
    def start(cls, folder: Path, arguments: Sequence[str], config: str) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder.parent / f"{folder.name}.toml"
        file.write_text(config)
        command = [*EDGEFL, "run", str(file), "--out", str(folder), "--json", *arguments]
        with (folder.parent / f"{folder.name}.err").open(
            "wb"
        ) as errors:  # a pipe that nobody reads would fill up
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
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

    def kill(self, *names: str) -> None:
        """SIGKILL children of the run at the same time, and wait until the run has started them again."""
        killed = {name: self.pids()[name] for name in names}
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        self.wait_until(
            lambda: all(self.pids().get(name, pid) != pid for name, pid in killed.items()),
            f"new processes of {', '.join(names)}",
        )

    def pause(self, name: str) -> None:
        """SIGSTOP: it stands still until it is killed."""
        os.kill(self.pids()[name], signal.SIGSTOP)

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
        return (self.folder.parent / f"{self.folder.name}.err").read_text()

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-1500:]}" for log in (self.folder / "logs").glob("*.log")
        )


def run_to_the_end(folder: Path, arguments: Sequence[str], config: str) -> list[dict[str, Any]]:
    return Run.start(folder, arguments, config).finish()


@dataclass(frozen=True)
class Calm:
    """A run that nobody disturbs: what the same run comes to when somebody does."""

    folder: Path
    arguments: tuple[str, ...]
    config: str
    rounds: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path, arguments: Sequence[str], config: str) -> Calm:
        """Made in ``folder``, or read from there where another process of the same test session has made it."""
        rows = folder.parent / f"{folder.name}.rounds.json"
        if not rows.exists():
            rows.write_text(json.dumps(run_to_the_end(folder, arguments, config)))
        return cls(folder, tuple(arguments), config, json.loads(rows.read_text()))

    @property
    def weights_sha256(self) -> str:
        """The digest of its final weights."""
        return str(self.rounds[-1]["weights_sha256"])

    def model(self) -> Arrays:
        """Its final weights."""
        return dict(tensors.load((self.folder / "model.safetensors").read_bytes()))

    def beside(self, folder: Path, *more: str, config: str = "") -> Run:
        """The same run under way in another folder, which need not export the same bundles again.

        ``more``: further arguments, which win; ``config``: another file for the same bundles.
        """
        shutil.copytree(self.folder / "bundles", folder / "bundles")
        return Run.start(folder, [*self.arguments, *more], config or self.config)


def rows(run: Run, device: str, table: str) -> int:
    """How many rows the store of a running device has in a table."""
    return _number(_store(run.folder, device), f"SELECT COUNT(*) FROM {table}")


def journaled(run: Run) -> int:
    """Updates of the open round that the server's journal has accepted."""
    return _number(
        run.folder / "journal.sqlite",
        "SELECT COUNT(*) FROM rounds JOIN updates USING (run, round) WHERE rounds.state = 'open' AND reason = ''",
    )


def carried(folder: Path, device: str) -> Arrays:
    """What a device keeps for its next round."""
    with closing(sqlite3.connect(f"file:{_store(folder, device)}?mode=ro", uri=True)) as store:
        ((data,),) = store.execute("SELECT data FROM carries ORDER BY id DESC LIMIT 1").fetchall()
    return dict(tensors.load(data))


def _store(folder: Path, device: str) -> Path:
    return folder / "devices" / device / "store" / "store.sqlite3"


def _number(database: Path, query: str) -> int:
    """What the query counts; 0 while another process has not made the tables yet."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=0.1)) as connection,
    ):
        return int(connection.execute(query).fetchone()[0])
    return 0
