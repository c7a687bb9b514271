"""Where the rounds of a simulation are told beside its own files: TensorBoard's event files, and MLflow by URL.

Neither has a say in the weights. Both hold each round once, however often a simulation was stopped and taken up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from edgefl.config import Federation
from edgefl.config.simulation import SimulationTable
from edgefl.errors import ConfigError
from edgefl.simulator.row import Row
from edgefl.system.distribution import install

_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Where the environment says nothing else: MLflow's makers are told nothing, our output stays ours, and a server that is not
there is told in seconds."""


class Tracker(Protocol):
    """One place where rounds are told."""

    def begin(self, rows: Sequence[Row]) -> None:
        """Tell the rounds before this process began, as far as they are not there."""

    def take(self, row: Row) -> None:
        """Tell one round more."""

    def close(self, *, finished: bool) -> None:
        """All rounds of this process are told."""


def refuse_missing(table: SimulationTable) -> None:
    """ConfigError where a package is not installed that the table asks for."""
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
    federation: Federation, dataset: str, folder: Path, warn: Callable[[str], None]
) -> Iterator[Sequence[Tracker]]:
    """The trackers that ``[simulation]`` asks for, closed where the block ends. ConfigError where one cannot be had."""
    refuse_missing(federation.simulation)
    trackers: list[Tracker] = []
    with ExitStack() as stack:
        if federation.simulation.tensorboard:
            from edgefl.simulator.to_tensorboard import EventFiles

            trackers.append(EventFiles(folder, federation))
        if federation.simulation.mlflow:
            for name, value in _MLFLOW.items():
                os.environ.setdefault(name, value)
            from edgefl.simulator.to_mlflow import MlflowRun

            trackers.append(MlflowRun.open(folder, federation, dataset, warn))
        for tracker in trackers:
            stack.push(lambda kind, _error, _trace, one=tracker: one.close(finished=kind is None))
        yield trackers
