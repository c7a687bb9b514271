"""Interface of a tracker, the tracker for TensorBoard, and the figures and files that trackers record."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgefl.config import Federation
from edgefl.config.tables import BrokerTable
from edgefl.config.text import dump
from edgefl.system.lazy_modules import absent
from edgefl_server.device_evaluation import flat_evaluation
from edgefl_server.events import DeviceEvaluation, TierResult

TENSORBOARD_FOLDER = "tensorboard"
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Default environment of MLflow: no telemetry, no output, and short timeouts."""


class TrackedRow(Protocol):
    """Finished round as a line of its log: :class:`edgefl_server.events.RoundClosed` or a row of a simulation."""

    @property
    def round(self) -> int: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def evaluation(self) -> DeviceEvaluation | None: ...


@dataclass(frozen=True)
class TrackedFile:
    """File that trackers record, such as a bundle. ``group`` is the folder of similar files: ``bundles`` or ``model``."""

    path: Path
    group: str

    @property
    def name(self) -> str:
        """Name of the file, with its group."""
        return f"{self.group}/{self.path.name}"

    def sha256(self) -> str:
        """Return the SHA-256 digest of the file as hex digits."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class Tracker(Protocol):
    """Recorder of rounds and files in an outside tool. All methods are called on one thread, and may raise anything.

    Attributes:
        place: Address of the tool, for messages.
        last: Number of the last round that it has; 0 without rounds.
    """

    place: str
    last: int

    def record(self, number: int, values: Mapping[str, float]) -> None:
        """Record round ``number``, with its figures by name, and set :attr:`last` to it."""

    def record_file(self, file: TrackedFile) -> None:
        """Record a file. A file with an equal digest is recorded once, also over several processes."""

    def end(self, *, finished: bool) -> None:
        """End the recording of this process. ``finished``: True if the run is over."""


@contextmanager
def light_imports() -> Iterator[None]:
    """Open a context in which packages of trackers are imported without torch, pandas and pyarrow.

    They use these where they are installed, for nothing that is recorded here, and a server without torch would grow by
    270 MB. A process that has torch already is a user's own, whose imports stay as they are.
    """
    with absent(*(() if "torch" in sys.modules else ("torch", "pandas", "pyarrow"))):
        yield


def import_mlflow() -> None:
    """Import MLflow, with its default environment."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with light_imports():
        import mlflow  # noqa: F401  # optional package


def scalars(row: TrackedRow) -> dict[str, float]:
    """Return the figures of a round by name, with its metrics, its tiers, and its evaluation on devices.

    Missing values and the round's number are left out. Figures of a tier are called ``tier.NAME.reports``; those of an
    evaluation ``devices.accuracy``, ``devices.accuracy.median``, ``devices.accuracy.worst_decile`` and
    ``tier.NAME.accuracy``.
    """
    figures: dict[str, float] = dict(row.metrics)
    figures |= _numbers(row)
    tiers: Mapping[str, TierResult] = getattr(row, "tiers", {})
    for tier, result in tiers.items():
        figures |= {f"tier.{tier}.{name}": value for name, value in _numbers(result).items()}
    for name in ("selected", "declined") if tiers else ():
        figures.setdefault(name, float(sum(getattr(result, name) for result in tiers.values())))
    return figures | (flat_evaluation(row.evaluation) if row.evaluation else {})


def _numbers(row: Any) -> dict[str, float]:
    """Return the numeric fields of ``row`` by name, without the round's number."""
    return {
        name: float(value)
        for name in row.__struct_fields__
        if isinstance(value := getattr(row, name), int | float)
        and not isinstance(value, bool)
        and name != "round"
    }


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def without_broker(federation: Federation) -> Federation:
    """Return the federation without the broker's address and login, because more people read trackers."""
    return federation.model_copy(update={"broker": BrokerTable()})


class TensorboardFiles:
    """Event files of TensorBoard, in the subfolder ``tensorboard`` of a run's folder.

    They have the configuration and the digests of recorded files as texts. A resumed run rewrites them from its log: a
    killed process leaves incomplete events, and a simulation runs unsaved rounds again.

    Args:
        folder: Folder of the run.
        federation: Configuration.
    """

    def __init__(self, folder: Path, federation: Federation) -> None:
        with light_imports():
            from tensorboardX import SummaryWriter  # optional package

        self.place, self.last = str(folder / TENSORBOARD_FOLDER), 0
        for path in (folder / TENSORBOARD_FOLDER).glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = SummaryWriter(self.place, flush_secs=1)  # flush() alone leaves events in its queue
        config = dump(without_broker(federation)).splitlines()
        self._writer.add_text("config", "".join(f"    {line}\n" for line in config))
        self._writer.flush()

    def record(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()
        self.last = number

    def record_file(self, file: TrackedFile) -> None:
        text = f"`{file.path}`, {file.path.stat().st_size:,} bytes, SHA-256 `{file.sha256()}`"
        self._writer.add_text(file.name, text)
        self._writer.flush()

    def end(self, *, finished: bool) -> None:
        self._writer.close()
