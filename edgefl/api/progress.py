"""Progress of long calls: a line in a terminal or a notebook, and the rounds of a run as a table."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from edgefl.wire.text import printable, round_result

if TYPE_CHECKING:
    from rich.console import Console

    from edgefl.config import Federation
    from edgefl.data.dataset import Dataset
    from edgefl.wire.tensors import Array

MOST_ROUNDS = 12

# Held by the outermost long call. Calls within it, in other threads and in forked children show nothing of their own.
_outermost = threading.Lock()


class ProgressLine:
    """Display of a long call: newest text, elapsed time, and a bar if ``total``, the amount of work, is known.

    In a terminal the line disappears at the end; in a notebook its last state stays. Nothing is shown before the
    first text.
    """

    def __init__(self, total: int | None, console: Console) -> None:
        from rich import progress
        from rich.table import Column

        text = progress.TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        columns = [progress.TimeElapsedColumn(), text]
        if total is not None:
            columns += [progress.BarColumn(), progress.MofNCompleteColumn()]
        if not console.is_jupyter:
            columns.insert(0, progress.SpinnerColumn())
        self._progress = progress.Progress(
            *columns,
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what a script prints into a file stays there
        )
        self._task = self._progress.add_task("", total=total)
        self._cell: Any = None

    def show(self, text: str, completed: int | None = None) -> None:
        self._progress.update(self._task, description=printable(text), completed=completed)
        if self._cell is not None:
            self._cell.update(self._progress)
        elif self._progress.console.is_jupyter:
            # rich alone needs ipywidgets in a notebook; a display that is updated needs IPython only.
            from IPython.display import display

            self._cell = display(self._progress, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._progress.start()

    def total(self, units: int) -> None:
        """Set the number of units of work, which was an estimate so far."""
        self._progress.update(self._task, total=units)

    def close(self) -> None:
        self._progress.stop_task(self._task)
        if self._cell is None:
            self._progress.stop()
        else:
            self._cell.update(self._progress)


class Reporter:
    """Receiver of the progress texts of one long call.

    Calls the user's function ``progress`` if there is one. Otherwise shows the text on ``line``, or ignores it if that is
    None.
    """

    def __init__(self, progress: Callable[[str], None] | None, line: ProgressLine | None) -> None:
        self._progress = progress
        self._line = line

    def __call__(self, text: str, completed: int | None = None) -> None:
        """Report progress.

        Args:
            text: The current work.
            completed: Number of finished units of work; None if unknown.
        """
        if self._progress is not None:
            self._progress(text)
        elif self._line is not None:
            self._line.show(text, completed)

    def report_event(self, event: Mapping[str, Any]) -> None:
        """Report an event of a run: an export, an open round, or a finished round. Other events are ignored.

        ``event`` is the event as plain values; its key ``event`` names the kind.
        """
        match event.get("event"):
            case "started" if self._line is not None:
                self._line.total(event["rounds"])
            case "exporting":
                self(f"exporting and checking {event['text']}")
            case "roundopened":
                self(opened_text(event))
            case "roundclosed":
                self(round_text(event), event["round"])


@contextmanager
def reporting(
    text: str = "",
    *,
    progress: Callable[[str], None] | None = None,
    total: int | None = None,
    console: Console | None = None,
) -> Iterator[Reporter]:
    """Show the progress of the ``with`` block on a line: in a terminal on standard error, in a notebook below the cell.

    Elsewhere, and within the block of another long call, nothing is shown.

    Args:
        text: shown at once; "" shows nothing before the first report.
        progress: the user's own function, called with each report instead of the line. It is called within another
            long call too.
        total: units of work, such as rounds; None shows no bar.
        console: rich console that prints other lines meanwhile; None for one of its own.

    Yields:
        The function to call with each text.
    """
    outermost = _outermost.acquire(blocking=False)
    line = _line(total, console) if outermost and progress is None else None
    reporter = Reporter(progress, line)
    try:
        if line and text:
            reporter(text)
        yield reporter
    finally:
        if line:
            line.close()
        if outermost:
            _outermost.release()


def _line(total: int | None, console: Console | None) -> ProgressLine | None:
    if not (sys.stderr and sys.stderr.isatty()) and "ipykernel" not in sys.modules:
        return None
    from rich.console import Console as RichConsole

    own = console or RichConsole(stderr=True)
    return ProgressLine(total, own) if own.is_jupyter or own.is_terminal else None


def planned_rounds(federation: Federation, dataset: Dataset | None = None) -> int:
    """Return the number of rounds of a run: training rounds, evaluation rounds, and rounds that measure statistics for
    an evaluation.

    Without the ``dataset``, rounds that measure statistics are not counted.
    """
    # Many commands end before they need these.
    from edgefl.setup.model import federation_model
    from edgefl.setup.norm_statistics import norm_measurement
    from edgefl_server.coordinator.states import EvaluationSchedule

    every, measures = federation.evaluate.every, False
    if every and dataset is not None:
        measures = norm_measurement(federation, federation_model(federation, dataset)) is not None
    return EvaluationSchedule(every, measures=measures).planned_rounds(federation.federation.rounds)


def purpose_of(event: Mapping[str, Any]) -> str:
    """Return the purpose of a round without training as an addition to a sentence, such as ``, which evaluate the model``.

    Return "" for a training round. ``event`` is the event of the round's opening.
    """
    if event.get("measures"):
        return ", which measure the statistics of batch norm"
    return ", which evaluate the model" if event.get("evaluates") else ""


def opened_text(event: Mapping[str, Any]) -> str:
    """Return the line ``round 3 is open for 4 devices`` for ``event``, a round's opening, with the purpose of the round."""
    return f"round {event['round']} is open for {event['goal']} devices{purpose_of(event)}"


def round_text(finished: Any) -> str:
    """Return a line about a finished round: number, main metric, and number of updates.

    ``finished`` is an event ``RoundClosed`` of a run, also as plain values, or a row of a simulation.
    """
    row = msgspec.to_builtins(finished)
    reports = "" if row.get("evaluation") else f", {row['reports']} reports"
    return f"round {row['round']}: {round_result(row)}{reports}"


def curves_of(history: Iterable[Any], names: Iterable[str]) -> dict[str, Array]:
    """Return columns of a run's or simulation's history by name: float64 (rounds,), with NaN for missing values.

    Args:
        history: Finished rounds, in order.
        names: Fields of a round to return. All metrics of the rounds are returned too, by their names, and the results of
            evaluation rounds as ``devices.accuracy``, ``devices.accuracy.median``, ``tier.NAME.accuracy`` and the like.
    """
    import numpy as np  # many commands end before they need it

    from edgefl_server.device_evaluation import flat_evaluation

    rows = list(history)
    metrics = [{**row.metrics, **(flat_evaluation(row.evaluation) if row.evaluation else {})} for row in rows]
    values = {name: [getattr(row, name) for row in rows] for name in names}
    values |= {
        name: [own.get(name) for own in metrics]
        for name in dict.fromkeys(name for own in metrics for name in own)
    }
    return {
        name: np.array([np.nan if each is None else each for each in column], np.float64)
        for name, column in values.items()
    }


def round_rows(history: Iterable[Any]) -> list[dict[str, object]]:
    """Return the last 12 rounds of a run's or simulation's history as rows of a table, each by column."""
    return [
        {
            "round": row["round"],
            "metric": round_result(row),
            "training loss": "" if row["train_loss"] is None else f"{row['train_loss']:.4g}",
            "reports": row["reports"],
        }
        for row in map(msgspec.to_builtins, list(history)[-MOST_ROUNDS:])
    ]
