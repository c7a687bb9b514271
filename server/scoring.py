"""Evaluates global models beside the rounds: the next round is under way while the last model is being tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from edgefl.wire.tensors import Arrays
from server.plan import Evaluate


@dataclass(frozen=True)
class Scored:
    """The metrics of the model after a round; empty if it was not to be evaluated. ``error`` is what went wrong."""

    round: int
    metrics: Mapping[str, float]
    error: Exception | None = None


class Scorer:
    """One worker thread; results reach ``done`` in the order of :meth:`submit`."""

    def __init__(self, evaluate: Evaluate | None, done: Callable[[Scored], None]) -> None:
        self._evaluate = evaluate
        self._done = done
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluate")
        self.pending = 0

    def submit(self, number: int, weights: Arrays | None) -> None:
        """Score ``weights`` as the model after round ``number``; None: only keep the order."""
        self.pending += 1
        self._pool.submit(self._score, number, weights)

    def stop(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _score(self, number: int, weights: Arrays | None) -> None:
        metrics: Mapping[str, float] = {}
        error: Exception | None = None
        if weights is not None and self._evaluate is not None:
            try:
                metrics = self._evaluate(weights)
            except Exception as raised:  # handed to the main thread, which raises it there
                error = raised
        self._done(Scored(number, metrics, error))
