"""Evaluates global models beside the rounds: the next round is under way while the last model is being tested."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any

from edgefl.wire.tensors import Arrays
from edgefl_server import events
from edgefl_server.coordinator.states import Outcome, Rules
from edgefl_server.events import RoundClosed
from edgefl_server.patience import Persist
from edgefl_server.run_spec import RunSpec
from edgefl_server.storage.journal import Journal


@dataclass(frozen=True)
class Scored:
    """The metrics of the model after a round, and its loss; empty if it was not to be evaluated. ``error`` is what went
    wrong."""

    round: int
    metrics: Mapping[str, float]
    error: Exception | None = None

    @property
    def told(self) -> dict[str, Any]:
        """The fields of events that tell of it."""
        return told_of(self.metrics)


def told_of(metrics: Mapping[str, float]) -> dict[str, Any]:
    """The fields of events that tell of an evaluation. Only numbers: JSON has neither infinity nor NaN."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    loss = finite.pop("loss", None)
    return {"accuracy": finite.get("accuracy"), "loss": loss, "metrics": finite}


def round_closed(scored: Scored, outcome: str, details: Mapping[str, Any], metric: str) -> RoundClosed:
    """What people are told of a round: its ``outcome`` and ``details`` of the journal, and its evaluation, of which
    ``metric`` is shown first."""
    text = details["text"] or (f"evaluation failed: {scored.error}" if scored.error else "")
    fields = {name: details[name] for name in RoundClosed.__struct_fields__ if name in details}
    return RoundClosed(
        round=scored.round, outcome=outcome, **fields | scored.told | {"text": text, "metric": metric}
    )


def last_words(details: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """The same fields at the end of a run, from the journal's ``details`` of its last round."""
    metrics = details.get("metrics", {})
    return {
        "accuracy": details.get("accuracy"),
        "loss": details.get("loss"),
        "metrics": metrics,
        "metric": metric,
    }


@dataclass(eq=False)
class Verdicts:
    """Evaluation of the model after each round, on one worker thread, and its report to people and the journal.

    A waiting job is a number: ``load`` reads the model after a round when its turn comes. ``done`` receives the results on
    the worker thread, in the order of :meth:`judge`. ``pending`` holds the rounds that ended and are not reported yet; their
    checkpoints must stay.
    """

    spec: RunSpec
    rules: Rules
    journal: Journal
    persist: Persist
    emit: Callable[[events.Event], None]
    _: KW_ONLY
    load: Callable[[int], Arrays]
    done: Callable[[Scored], None]

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluate")
        self.pending: set[int] = set()

    def take_up(self) -> None:
        """Judge the rounds that a killed process ended and did not report."""
        for number, outcome, details in self.journal.outcomes(self.rules.run):
            if outcome != "open" and not details.get("told"):
                self.judge(number, "closed" if outcome == "closed" else "abandoned")

    def judge(self, number: int, outcome: Outcome, known: Mapping[str, float] | None = None) -> None:
        """Queue the evaluation of round ``number``. One that needs none, or has ``known`` metrics, only keeps its turn."""
        self.pending.add(number)
        self._pool.submit(self._score, number, self.spec.evaluates(number, outcome), known)

    def tell(self, scored: Scored, *, heard: Callable[[], bool]) -> None:
        """Report a round, then journal that it was reported, if it was ``heard``."""
        run = self.rules.run
        outcome, details = self.persist(lambda: self.journal.outcome(run, scored.round))
        self.emit(round_closed(scored, outcome, details, self.spec.metric))
        if not heard():  # whoever takes up the run tells of it
            return
        told = {**scored.told, "told": True}
        self.persist(lambda: self.journal.add_to_outcome(run, scored.round, told))
        self.pending.discard(scored.round)

    def stop(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _score(self, number: int, due: bool, known: Mapping[str, float] | None) -> None:
        metrics: Mapping[str, float] = known or {}
        error: Exception | None = None
        if due and known is None and self.spec.evaluate is not None:
            try:
                metrics = self.spec.evaluate(self.load(number))
            except Exception as raised:  # the round is told of without metrics, and with this
                error = raised
        self.done(Scored(number, metrics, error))
