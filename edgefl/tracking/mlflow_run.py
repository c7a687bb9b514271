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
from mlflow.exceptions import MlflowException

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
        last: Number of the last round that the server has.
        tags: Tags of the run, with the digests of the files that the server has.
    """

    def __init__(self, client: MlflowClient, uri: str, run: str, last: int, tags: Mapping[str, str]) -> None:
        self.place, self.last = uri, last
        self._client = client
        self._run = run
        self._tags = dict(tags)

    @classmethod
    def open(cls, folder: Path, federation: Federation, tags: Mapping[str, str]) -> MlflowRun:
        """Open the MLflow run named in ``mlflow.json`` of ``folder``, or else a new one.

        A new run gets the configuration as parameters, and its identifier is written to ``mlflow.json``.

        Args:
            folder: Folder of the run or simulation.
            federation: Configuration; ``tracking.mlflow`` is the URL of the server.
            tags: Tags of a new run.

        Raises:
            ConfigError: If MLflow cannot be reached, or does not have the run.
        """
        uri, path = federation.tracking.mlflow, folder / NAME
        note = f". {path} names the run of this folder: without that file it begins another"
        with _explained(uri, note):
            client = MlflowClient(uri)
            known = msgspec.json.decode(path.read_bytes(), type=_MlflowFile) if path.exists() else None
            if known is None or known.uri != uri:
                run = _new_run(client, federation, tags, folder)
                write_text(path, msgspec.json.encode(_MlflowFile(uri, run)).decode())
                return cls(client, uri, run, 0, {})
            client.update_run(known.run, status="RUNNING")
            steps = [metric.step for metric in client.get_metric_history(known.run, _MARK)]
            return cls(client, uri, known.run, max(steps, default=0), client.get_run(known.run).data.tags)

    def record(self, number: int, values: Mapping[str, float]) -> None:
        """Send the figures of a round, the mark last. If that fails, the whole round has to be sent again."""
        now, rest = int(1000 * time.time()), dict(values)
        rest[_MARK] = rest.pop(_MARK, 0.0)
        metrics = [Metric(_FORBIDDEN.sub("_", name), value, now, number) for name, value in rest.items()]
        for first in range(0, len(metrics), _METRICS_AT_A_TIME):
            self._client.log_batch(self._run, metrics=metrics[first : first + _METRICS_AT_A_TIME])
        self.last = number

    def record_file(self, file: TrackedFile) -> None:
        """Upload a file as an artifact, unless a tag shows that the server has it, then store its digest as a tag."""
        tag, digest = _FORBIDDEN.sub("_", _DIGEST + file.name), file.sha256()
        if self._tags.get(tag) != digest:
            self._client.log_artifact(self._run, str(file.path), file.group)
            self._client.set_tag(self._run, tag, digest)
            self._tags[tag] = digest

    def end(self, *, finished: bool) -> None:
        """Mark the run as ended: ``FINISHED`` if ``finished``, else ``KILLED``."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


def check_server(federation: Federation) -> None:
    """Raise ConfigError if the MLflow of ``federation`` does not answer."""
    with _explained(federation.tracking.mlflow):
        MlflowClient(federation.tracking.mlflow).get_experiment_by_name(federation.federation.name)


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
