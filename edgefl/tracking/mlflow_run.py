"""MLflow run of a run or simulation: configuration as parameters, figures of rounds as metrics, files as artifacts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException, RestException

from edgefl.config import Federation
from edgefl.config.text import by_key
from edgefl.errors import ConfigError
from edgefl.system.distribution import version
from edgefl.system.files import write_text
from edgefl.tracking.trackers import TrackedFile, first_line

NAME = "mlflow.json"
_PARAMS_AT_A_TIME = 100
_METRICS_AT_A_TIME = 1000
_MARK = "reports"
"""Metric that is sent last: a round that has it is complete."""
_DIGEST = "sha256/"
"""Prefix of the tag with the digest of a recorded file."""
_LACKING = "RESOURCE_DOES_NOT_EXIST"
_FORBIDDEN = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow refuses in names of metrics, parameters and tags, such as the @ of a candidate's tier."""


class _MlflowFile(msgspec.Struct, frozen=True):
    """Contents of ``mlflow.json``: server and identifier of the MLflow run."""

    uri: str
    run: str


class MlflowRun:
    """Run on an MLflow server.

    Args:
        client: Client of the server.
        uri: URL of the server.
        run: Identifier of the run.
        is_new: True if the server has just created the run. Otherwise :meth:`connect` asks what it has.
    """

    def __init__(self, client: MlflowClient, uri: str, run: str, *, is_new: bool) -> None:
        self.place, self.last = uri, 0
        self._client = client
        self._run = run
        self._is_connected = is_new
        self._tags: dict[str, str] = {}

    @classmethod
    def open(cls, folder: Path, federation: Federation, tags: Mapping[str, str]) -> MlflowRun:
        """Open the MLflow run named in ``mlflow.json`` of ``folder``, or else a new one.

        A new run gets the configuration as parameters, and its identifier is written to ``mlflow.json``. A known run is
        opened even if its server is away, because a fleet must be able to start again without its tracker.

        Args:
            folder: Folder of the run or simulation.
            federation: Configuration; ``tracking.mlflow`` is the URL of the server.
            tags: Tags of a new run.

        Raises:
            ConfigError: If MLflow cannot be reached for a new run, or refuses or lacks the known one.
        """
        uri, path = federation.tracking.mlflow, folder / NAME
        with _explained(uri, f". {path} names the run of this folder: without that file it begins another"):
            client, known = MlflowClient(uri), _known_run(folder, uri)
            if not known:
                run = _new_run(client, federation, tags, folder)
                write_text(path, msgspec.json.encode(_MlflowFile(uri, run)).decode())
                return cls(client, uri, run, is_new=True)
            opened = cls(client, uri, known, is_new=False)
            try:
                opened.connect()
            except MlflowException as error:
                if isinstance(error, RestException) or error.error_code == _LACKING:
                    raise  # the server answered: a retry would not help
            return opened

    def connect(self) -> None:
        """Mark the run as running, and load which rounds and files the server has. Does nothing the next time."""
        if not self._is_connected:
            self._client.update_run(self._run, status="RUNNING")
            steps = [metric.step for metric in self._client.get_metric_history(self._run, _MARK)]
            self._tags = dict(self._client.get_run(self._run).data.tags)
            self.last = max(steps, default=0)
            self._is_connected = True

    def record(self, number: int, values: Mapping[str, float]) -> None:
        """Send the figures of a round, the mark last. If that fails, the whole round has to be sent again."""
        self.connect()
        if number <= self.last:
            return
        now, rest = int(1000 * time.time()), dict(values)
        rest[_MARK] = rest.pop(_MARK, 0.0)
        metrics = [Metric(_FORBIDDEN.sub("_", name), value, now, number) for name, value in rest.items()]
        try:
            for first in range(0, len(metrics), _METRICS_AT_A_TIME):
                self._client.log_batch(self._run, metrics=metrics[first : first + _METRICS_AT_A_TIME])
        except Exception:
            self._is_connected = False  # the server may have the round: only its answer was lost
            raise
        self.last = number

    def record_file(self, file: TrackedFile) -> None:
        """Upload a file as an artifact, unless a tag shows that the server has it, then store its digest as a tag."""
        self.connect()
        tag, digest = _FORBIDDEN.sub("_", _DIGEST + file.name), file.sha256()
        if self._tags.get(tag) != digest:
            self._client.log_artifact(self._run, str(file.path), file.group)
            self._client.set_tag(self._run, tag, digest)
            self._tags[tag] = digest

    def end(self, *, finished: bool) -> None:
        """Mark the run as ended: ``FINISHED`` if ``finished``, else ``KILLED``."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


def check_server(federation: Federation, folder: Path | None) -> None:
    """Raise ConfigError if the MLflow of ``federation`` does not answer, unless ``folder`` has a run there already.

    ``folder`` is None for a new run.
    """
    uri = federation.tracking.mlflow
    with _explained(uri):
        if folder is None or not _known_run(folder, uri):
            MlflowClient(uri).get_experiment_by_name(federation.federation.name)


def _known_run(folder: Path, uri: str) -> str:
    """Return the identifier of the MLflow run of ``folder`` at the server ``uri``; empty if there is none."""
    path = folder / NAME
    known = msgspec.json.decode(path.read_bytes(), type=_MlflowFile) if path.exists() else None
    return known.run if known is not None and known.uri == uri else ""


@contextmanager
def _explained(uri: str, note: str = "") -> Iterator[None]:
    """Raise ConfigError for an error of MLflow in the context. ``note`` ends its message."""
    try:
        yield
    except (MlflowException, OSError, ImportError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"tracking.mlflow {uri!r} cannot be used: {first_line(error)}; correct the URL, start its server, or leave "
            f"the key out{note}",
            uri=uri,
        ) from error


def _new_run(client: MlflowClient, federation: Federation, tags: Mapping[str, str], folder: Path) -> str:
    """Create a run with the configuration as parameters, in the experiment with the federation's name. Return its
    identifier.
    """
    name = federation.federation.name
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    run: str = client.create_run(
        experiment, tags={**tags, "edgefl": version()}, run_name=folder.name
    ).info.run_id
    config = federation.model_dump(mode="json", exclude={"broker"})
    params = [Param(_FORBIDDEN.sub("_", key), str(value)) for key, value in by_key(config).items()]
    for first in range(0, len(params), _PARAMS_AT_A_TIME):
        client.log_batch(run, params=params[first : first + _PARAMS_AT_A_TIME])
    return run
