"""MLflow run of a simulation: the configuration as parameters, and the numbers of each round as metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from edgefl.config import Federation
from edgefl.config.text import by_key
from edgefl.errors import ConfigError
from edgefl.simulator.results import RoundRow, scalars
from edgefl.system.distribution import version
from edgefl.system.files import write_text
from edgefl_server.events import EventListener, Warned

NAME = "mlflow.json"
_PARAMS_AT_A_TIME = 100
_MARK = "reports"
"""Metric that is sent last: a round that has it is complete."""
_AGAIN_S = 60.0
"""Seconds until a failed server is tried again, so that not every round waits for it."""


class _MlflowFile(msgspec.Struct, frozen=True):
    """Contents of ``mlflow.json``: server and identifier of the MLflow run."""

    uri: str
    run: str


@dataclass
class MlflowRun:
    """Run on an MLflow server. If the server fails later, rounds are queued and sent when it is available again.

    Attributes:
        client: Client of the server.
        uri: URL of the server.
        run: Identifier of the run.
        last: Number of the last round that the server has.
        listener: Receives warnings.
        waiting: Queue of rounds to send.
        again: Earliest time (monotonic) of the next attempt after a failure.
    """

    client: MlflowClient
    uri: str
    run: str
    last: int
    listener: EventListener
    waiting: list[RoundRow] = field(default_factory=list)
    again: float = 0.0

    @classmethod
    def open(cls, folder: Path, federation: Federation, dataset: str, listener: EventListener) -> MlflowRun:
        """Open the MLflow run of a simulation: the one named in ``mlflow.json`` of ``folder``, or else a new one.

        A new run gets the configuration as parameters, and its identifier is written to ``mlflow.json``.

        Args:
            folder: Folder of the simulation.
            federation: Configuration; ``simulation.mlflow`` is the URL of the server.
            dataset: Description of the dataset, a tag of the run.
            listener: Receives warnings.

        Raises:
            ConfigError: If MLflow cannot be reached, or does not have the run.
        """
        uri, path = federation.simulation.mlflow, folder / NAME
        try:
            client = MlflowClient(uri)
            known = msgspec.json.decode(path.read_bytes(), type=_MlflowFile) if path.exists() else None
            if known is None or known.uri != uri:
                run = _new_run(client, federation, dataset, folder)
                write_text(path, msgspec.json.encode(_MlflowFile(uri, run)).decode())
                return cls(client, uri, run, 0, listener)
            client.update_run(known.run, status="RUNNING")
            steps = [metric.step for metric in client.get_metric_history(known.run, _MARK)]
            return cls(client, uri, known.run, max(steps, default=0), listener)
        except (MlflowException, OSError, ImportError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"simulation.mlflow {uri!r} cannot be used: {_short(error)}; correct the URL, start its server, or leave "
                f"the key out. {path} names the run of this simulation: without that file it begins another",
                uri=uri,
            ) from error

    def begin(self, rows: Sequence[RoundRow]) -> None:
        """Queue and send the rounds of earlier processes that the server lacks."""
        self.waiting.extend(row for row in rows if row.round > self.last)
        self._send()

    def take(self, row: RoundRow) -> None:
        """Queue a round that the server lacks. Send all queued rounds, unless an attempt failed within the last minute."""
        self.waiting.extend([row] if row.round > self.last else [])
        if time.monotonic() >= self.again:
            self._send()

    def close(self, *, finished: bool) -> None:
        """Send the queued rounds and mark the run as ended: ``FINISHED`` if ``finished``, else ``KILLED``. If sending
        fails, only emit a warning.
        """
        self._send()
        if self.waiting:
            self._warn(f"{self.uri} lacks {len(self.waiting)} rounds: `resume` sends them when it is back")
            return
        with suppress(MlflowException, OSError):  # it has all rounds, and only looks unfinished
            self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")

    def _send(self) -> None:
        """Send the queued rounds in order. If that fails, warn once and set the time of the next attempt."""
        try:
            while self.waiting:
                self._log(self.waiting[0])
                self.last, self.again = self.waiting.pop(0).round, 0.0
        except (MlflowException, OSError) as error:
            if not self.again:  # once, not with every round
                self._warn(f"{self.uri} takes no rounds now: {_short(error)}; they are sent when it does")
            self.again = time.monotonic() + _AGAIN_S

    def _warn(self, text: str) -> None:
        self.listener.emit(Warned(tier="", text=text))

    def _log(self, row: RoundRow) -> None:
        numbers = dict(scalars(row))
        numbers[_MARK] = numbers.pop(_MARK)
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, row.round) for name, value in numbers.items()]
        self.client.log_batch(self.run, metrics=metrics)


def _new_run(client: MlflowClient, federation: Federation, dataset: str, folder: Path) -> str:
    """Create a run with the configuration as parameters, in the experiment with the federation's name. Return its
    identifier.
    """
    name = federation.federation.name
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    tags = {"dataset": dataset, "edgefl": version()}
    run: str = client.create_run(experiment, tags=tags, run_name=folder.name).info.run_id
    config = federation.model_dump(mode="json", exclude={"broker"})
    params = [Param(key, str(value)) for key, value in by_key(config).items()]
    for first in range(0, len(params), _PARAMS_AT_A_TIME):
        client.log_batch(run, params=params[first : first + _PARAMS_AT_A_TIME])
    return run


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
