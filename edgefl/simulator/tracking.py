"""Trackers of a simulation besides its own files: TensorBoard's event files, and MLflow by URL.

Neither affects the weights. Both hold each round once, however often a simulation is stopped and resumed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from edgefl.config import Federation
from edgefl.config.rounds import SimulationTable
from edgefl.config.text import dump
from edgefl.errors import ConfigError
from edgefl.simulator.results import RoundRow, scalars
from edgefl.system.distribution import install
from edgefl_server.events import EventListener

_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Default environment of MLflow: no telemetry, no output, and short timeouts."""


class Tracker(Protocol):
    """Receiver of rounds."""

    def begin(self, rows: Sequence[RoundRow]) -> None:
        """Record the rounds before this process began, as far as they are missing."""

    def take(self, row: RoundRow) -> None:
        """Record one more round."""

    def close(self, *, finished: bool) -> None:
        """Finish after all rounds of this process."""


def refuse_missing(table: SimulationTable) -> None:
    """Raise ConfigError if a package that the table requires is not installed."""
    for asked, key, package in (
        (table.tensorboard, "simulation.tensorboard", "tensorboardX"),
        (bool(table.mlflow), "simulation.mlflow", "mlflow"),
    ):
        if asked and find_spec(package) is None:
            raise ConfigError(
                f"{key} needs {package}, which is not installed: {install('tracking')}", key=key
            )


@contextmanager
def tracked(
    federation: Federation, dataset: str, folder: Path, listener: EventListener
) -> Iterator[Sequence[Tracker]]:
    """Yield the trackers of ``[simulation]``, and close them at the end of the block.

    Raises ConfigError if one fails to start.
    """
    refuse_missing(federation.simulation)
    trackers: list[Tracker] = []
    with ExitStack() as stack:
        if federation.simulation.tensorboard:
            trackers.append(TensorboardFiles(folder, federation))
        if federation.simulation.mlflow:
            for name, value in _MLFLOW.items():
                os.environ.setdefault(name, value)
            from edgefl.simulator.mlflow_run import MlflowRun

            trackers.append(MlflowRun.open(folder, federation, dataset, listener))
        for tracker in trackers:
            stack.push(lambda kind, _error, _trace, one=tracker: one.close(finished=kind is None))
        yield trackers


FOLDER = "tensorboard"


class TensorboardFiles:
    """The folder ``tensorboard`` in a simulation's folder.

    A resumed simulation rewrites it from the rounds that count, because a killed process leaves half an event, and rounds
    that are run again.
    """

    def __init__(self, folder: Path, federation: Federation) -> None:
        self._folder = folder / FOLDER
        self._config = dump(federation)
        self._writer: Any = None

    def begin(self, rows: Sequence[RoundRow]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        from tensorboardX import SummaryWriter  # optional package

        self._writer = SummaryWriter(str(self._folder))
        self._writer.add_text("config", "".join(f"    {line}\n" for line in self._config.splitlines()))
        for row in rows:
            self._add(row)
        self._writer.flush()

    def take(self, row: RoundRow) -> None:
        self._add(row)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, row: RoundRow) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row.round)
