"""Evaluates global models beside the rounds: the next round is under way while the last model is being tested."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from edgefl.wire.tensors import Arrays
from server.events import RoundClosed
from server.run_spec import Evaluate


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


class Scorer:
    """One worker thread; results reach ``done`` in the order of :meth:`submit`.

    What waits is a number: ``load`` reads the model after a round when its turn comes. ``pending`` are the rounds
    submitted and not yet told of, whose checkpoints must stay; whoever tells of one takes it out.
    """

    def __init__(
        self, evaluate: Evaluate | None, load: Callable[[int], Arrays], done: Callable[[Scored], None]
    ) -> None:
        self._evaluate = evaluate
        self._load = load
        self._done = done
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluate")
        self.pending: set[int] = set()

    def submit(self, number: int, *, due: bool, known: Mapping[str, float] | None = None) -> None:
        """Score the model after round ``number``; not ``due``, or its metrics ``known``: only keep the order."""
        self.pending.add(number)
        self._pool.submit(self._score, number, due, known)

    def stop(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _score(self, number: int, due: bool, known: Mapping[str, float] | None) -> None:
        metrics: Mapping[str, float] = known or {}
        error: Exception | None = None
        if due and known is None and self._evaluate is not None:
            try:
                metrics = self._evaluate(self._load(number))
            except Exception as raised:  # the round is told of without metrics, and with this
                error = raised
        self._done(Scored(number, metrics, error))
