"""Tracking of a run or simulation: a thread for each tracker, which reads the rounds from their log."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from edgefl.config import Federation
from edgefl.tracking.trackers import (
    TensorboardFiles,
    TrackedFile,
    TrackedRow,
    Tracker,
    first_line,
    import_mlflow,
    scalars,
)
from edgefl_server.events import Event, Finished, RoundClosed, Started, Warned
from edgefl_server.storage.audit import HISTORY_NAME

_RETRY_S = 60.0
"""Seconds until a failed tracker is tried again, so that its thread does not wait for it all the time."""
_STOP_S = 20.0
"""Longest wait for a tracker when a run is stopped."""
_FINISH_S = 600.0
"""Longest wait for a tracker at the end of a run, for uploads."""
_POLL_S = 0.1


def check_tracking(federation: Federation, folder: Path | None) -> None:
    """Raise ConfigError if a tracker that the table ``tracking`` requests cannot be used. Nothing is recorded.

    An MLflow server is asked whether it answers, unless a run in ``folder`` was tracked there before.
    ``folder`` is None for a new run, also one that discards another.
    """
    federation.tracking.check_packages()
    if federation.tracking.mlflow:
        import_mlflow()
        from edgefl.tracking.mlflow_run import check_server

        check_server(federation, folder)


class TrackerThread:
    """Thread that feeds one tracker, so that a slow or failed tracker delays no round.

    The queue is the log on disk: the thread keeps its position there, and memory stays the same however long the tracker
    is away.

    Args:
        tracker: The tracker.
        log: File with one JSON object per finished round.
        kind: Type of these objects.
    """

    def __init__(self, tracker: Tracker, log: Path, kind: type[TrackedRow]) -> None:
        self._tracker = tracker
        self._log = log
        self._decoder = msgspec.json.Decoder(kind)
        self._position = 0
        self._files: deque[TrackedFile] = deque()
        self._failed_files: list[TrackedFile] = []
        self._problems: deque[str] = deque()
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._is_closing = self._is_finished = False
        self._limit_s = math.inf
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Make the thread read the log. Returns at once."""
        self._wake.set()

    def add_file(self, file: TrackedFile) -> None:
        """Queue a file. Rounds go first."""
        self._files.append(file)
        self._wake.set()

    def problems(self) -> Iterator[str]:
        """Yield the texts of new problems."""
        while self._problems:
            yield self._problems.popleft()

    def request_end(self, *, finished: bool) -> None:
        """Make the thread record what is left, and end. A run that was stopped records no more files; the process that
        resumes it does.
        """
        self._is_finished, self._is_closing = finished, True
        self._wake.set()
        self._limit_s = min(self._limit_s, _FINISH_S if finished else _STOP_S)

    def wait(self, began: float) -> None:
        """Wait for the end, that was requested at ``began``: for seconds, or minutes for uploads of a finished run."""
        while self._thread.is_alive():
            if time.monotonic() > began + self._limit_s:  # hurry() may lower the limit meanwhile
                self._problems.append(
                    f"{self._tracker.place} takes more than {self._limit_s:.0f} s: the rest is left out"
                )
                return
            self._thread.join(_POLL_S)

    def hurry(self) -> None:
        """Make :meth:`wait` end no later than for a run that is stopped. May be called from a signal handler."""
        self._limit_s = _STOP_S

    def _run(self) -> None:
        while not self._is_closing:
            if self._retry_at:
                self._wake.wait(max(0.0, self._retry_at - time.monotonic()))
            elif not self._files:
                self._wake.wait()
            self._wake.clear()
            if time.monotonic() >= self._retry_at and self._record_rounds():
                self._record_file()
        # One more attempt, also if the last one has just failed.
        if self._record_rounds() and self._is_finished:
            self._files.extend(self._failed_files)
            self._failed_files = []
            while self._files:
                self._record_file()
        lacking = sum(row.round > self._tracker.last for row, _ in self._rows())
        if lacking:
            self._problems.append(
                f"{self._tracker.place} lacks {lacking} rounds: a resumed simulation, or the next server of "
                "this folder, sends them"
            )
            return
        with suppress(Exception):  # all rounds are recorded; the run only stays marked as unfinished
            self._tracker.end(finished=self._is_finished)

    def _record_rounds(self) -> bool:
        """Record the rounds that the log has after the thread's position. Return False if the tracker fails.

        Of several failures in a row, the first is a problem.
        """
        try:
            for row, end in self._rows():
                if row.round > self._tracker.last:
                    self._tracker.record(row.round, scalars(row))
                self._position = end
        except Exception as error:  # of any type, from the tracker's package: the run does not depend on it
            if not self._retry_at:
                self._problems.append(
                    f"{self._tracker.place} takes no rounds now: {first_line(error)}; they are sent when it does"
                )
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        self._retry_at = 0.0
        return True

    def _record_file(self) -> None:
        """Record the first queued file. If that fails, all queued files wait for the end of the run."""
        if not self._files:
            return
        file = self._files.popleft()
        try:
            self._tracker.record_file(file)
        except Exception as error:
            self._problems.append(
                f"{self._tracker.place} does not take {file.name}: {first_line(error)}; "
                + ("it is left out" if self._is_closing else "it is tried again at the end of the run")
            )
            self._failed_files += [file, *self._files]
            self._files.clear()

    def _rows(self) -> Iterator[tuple[TrackedRow, int]]:
        """Yield (finished round, position behind its line) from the thread's position on. Incomplete lines, which a
        killed process left, are skipped.
        """
        if not self._log.exists():
            return
        position = self._position
        with self._log.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    yield self._decoder.decode(line), position


class Tracking:
    """All trackers of a run or simulation. Use it as a context, or call :meth:`close`.

    Args:
        trackers: The trackers.
        log: File with one JSON object per finished round.
        kind: Type of these objects.
    """

    def __init__(self, trackers: Sequence[Tracker], log: Path, kind: type[TrackedRow]) -> None:
        self._threads = [TrackerThread(tracker, log, kind) for tracker in trackers]

    @classmethod
    def open(
        cls,
        federation: Federation,
        folder: Path,
        log: str,
        kind: type[TrackedRow],
        tags: Mapping[str, str] | None = None,
    ) -> Tracking:
        """Open the trackers that the table ``tracking`` requests. There may be none.

        Args:
            federation: Configuration.
            folder: Folder of the run. A run that was tracked there before is continued.
            log: Name of the log of rounds in it.
            kind: Type of a line of the log.
            tags: Tags of a new MLflow run.

        Raises:
            ConfigError: If a tracker cannot be used, or its package is missing.
        """
        table = federation.tracking
        table.check_packages()
        trackers: list[Tracker] = []
        if table.mlflow:
            import_mlflow()
            from edgefl.tracking.mlflow_run import MlflowRun

            trackers.append(MlflowRun.open(folder, federation, tags or {}))
        if table.tensorboard:
            trackers.append(TensorboardFiles(folder, federation))
        return cls(trackers, folder / log, kind)

    def notify(self) -> None:
        """Report that the log has another round. Returns at once."""
        for thread in self._threads:
            thread.notify()

    def add_file(self, file: TrackedFile) -> None:
        """Queue a file to record. Returns at once."""
        for thread in self._threads:
            thread.add_file(file)

    def problems(self) -> Iterator[str]:
        """Yield the texts of new problems. None of them ends the run."""
        for thread in self._threads:
            yield from thread.problems()

    def hurry(self) -> None:
        """Make :meth:`close` wait no longer than for a run that is stopped. May be called from a signal handler."""
        for thread in self._threads:
            thread.hurry()

    def close(self, *, finished: bool) -> None:
        """Record what is left, and end all trackers. ``finished``: True if the run is over."""
        began = time.monotonic()
        for thread in self._threads:
            thread.request_end(finished=finished)
        for thread in self._threads:
            thread.wait(began)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)


class RunTracking:
    """Listener that tracks a server's run: bundles at the start, each finished round, and the model at the end.

    It reads what the server's history holds, so it follows the writer of that file (:class:`HistoryWriter`).

    Args:
        federation: Configuration.
        folder: Folder of the run.

    Raises:
        ConfigError: If a tracker cannot be used.
    """

    def __init__(self, federation: Federation, folder: Path) -> None:
        self._folder = folder
        self._tracking = Tracking.open(federation, folder, HISTORY_NAME, RoundClosed)
        self._is_finished = False

    def take(self, event: Event) -> Warned | None:
        """Note the event for the trackers. Return a warning about a new problem of theirs, or None. Returns at once."""
        match event:
            case Started():
                for path in sorted((self._folder / "bundles").glob("*.efl")):
                    self._tracking.add_file(TrackedFile(path, "bundles"))
                self._tracking.notify()
            case RoundClosed():
                self._tracking.notify()
            case Finished():
                self._is_finished = True
                if event.model:
                    self._tracking.add_file(TrackedFile(Path(event.model), "model"))
        return next(self.warnings(), None)

    def warnings(self) -> Iterator[Warned]:
        """Yield warnings about new problems of the trackers."""
        for text in self._tracking.problems():
            yield Warned(tier="", text=text)

    def hurry(self) -> None:
        """Make :meth:`close` wait no longer than for a run that is stopped. May be called from a signal handler."""
        self._tracking.hurry()

    def close(self) -> None:
        """Record what is left, and end the trackers. Waits for uploads if the run is finished."""
        self._tracking.close(finished=self._is_finished)
