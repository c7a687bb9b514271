"""Trackers that record a simulation besides its own files: TensorBoard's event files, and MLflow.

They do not affect the weights. Each round is recorded once, however often a simulation is stopped and resumed.
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
    """Recorder of a simulation's rounds in an outside tool."""

    def begin(self, rows: Sequence[RoundRow]) -> None:
        """Start recording. ``rows``: rounds of earlier processes, of which missing ones are recorded."""

    def take(self, row: RoundRow) -> None:
        """Record one more round."""

    def close(self, *, finished: bool) -> None:
        """Stop recording after the last round of this process. ``finished``: True if the simulation ended without an
        error.
        """


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
def open_trackers(
    federation: Federation, dataset: str, folder: Path, listener: EventListener
) -> Iterator[Sequence[Tracker]]:
    """Open the trackers that the table ``simulation`` of ``federation`` requests, as a context. They are closed at its
    end.

    Args:
        federation: Configuration.
        dataset: Description of the dataset, which MLflow stores.
        folder: Folder of the simulation.
        listener: Receives warnings.

    Raises:
        ConfigError: If a tracker cannot be started, or its package is missing.
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
    """Event files of TensorBoard, in the subfolder ``tensorboard`` of a simulation's folder.

    They have the configuration ``federation`` as a text. A resumed simulation rewrites them from the saved rounds: a
    killed process leaves incomplete events, and rounds that are run again.
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
