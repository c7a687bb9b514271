"""Federations of devices in processes of their own: agents of both kinds around one server, and what it came to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.e2e.runs import EDGEFL, PATIENCE_S

PYTHON = (*EDGEFL, "device")


@dataclass
class Device:
    """A device that somebody may kill. ``moments``: tables of its store; once there is a row in one it is killed and
    started again, in this order. ``surroundings``: variables of its processes, which take turns."""

    command: Sequence[str | Path]
    folder: Path
    moments: Sequence[str] = ()
    surroundings: Sequence[Mapping[str, str]] = ({},)
    killed: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""
    code: int | None = None

    def serve(self, environment: Mapping[str, str]) -> None:
        """Until it ends by itself."""
        waiting = list(self.moments)
        for more in cycle(self.surroundings):
            with subprocess.Popen(
                [str(word) for word in self.command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment, **more},
            ) as process:
                if waiting:
                    watch = threading.Thread(target=self._kill, args=(process, waiting[0]))
                    watch.start()
                out, self.errors = process.communicate(timeout=PATIENCE_S)
                if waiting:
                    watch.join()
            self.lines += [json.loads(line) for line in out.splitlines() if line.endswith("}")]
            self.code = process.returncode
            if process.returncode != -signal.SIGKILL:
                return
            self.killed.append(waiting.pop(0))

    def _kill(self, process: subprocess.Popen[str], table: str) -> None:
        while process.poll() is None:
            if self._rows(table):
                process.send_signal(signal.SIGKILL)
                return
            time.sleep(0.001)

    def _rows(self, table: str) -> int:
        with (
            suppress(sqlite3.Error),
            closing(
                sqlite3.connect(f"file:{self.folder / 'store.sqlite3'}?mode=ro", uri=True, timeout=0.1)
            ) as db,
        ):
            return int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])
        return 0

    def said(self) -> list[str]:
        return [str(line["event"]) for line in self.lines]


@dataclass(frozen=True)
class Trained:
    """``rounds`` as the server closed them."""

    rounds: list[dict[str, Any]]
    devices: dict[str, Device]

    @property
    def weights(self) -> str:
        return str(self.rounds[-1]["weights_sha256"])


def train(
    folder: Path, config: Path, broker: str, devices: dict[str, Device], bundles: Path | None = None
) -> Trained:
    """The run of ``config`` with these devices. ``bundles``: of an earlier run, not exported again."""
    folder.mkdir(parents=True, exist_ok=True)
    if bundles is not None:
        shutil.copytree(bundles, folder / "out" / "bundles")
    environment = {**os.environ, "EDGEFL_KEYS": str(folder.parent / "keys")}
    command = [*EDGEFL, "server", "--config", str(config), "--broker", broker, "--json"]
    with ExitStack() as stack:
        served = stack.enter_context(
            subprocess.Popen(
                [*command, "--out", str(folder / "out")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        stack.callback(served.kill)
        threads = [
            threading.Thread(target=each.serve, args=(environment,), daemon=True) for each in devices.values()
        ]
        for thread in threads:
            thread.start()
        out, errors = served.communicate(timeout=PATIENCE_S)
        assert served.returncode == 0, errors
        for thread in threads:
            thread.join(PATIENCE_S)
    events = [json.loads(line) for line in out.splitlines()]
    return Trained([each for each in events if each["event"] == "roundclosed"], devices)
