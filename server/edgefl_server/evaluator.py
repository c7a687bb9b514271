"""Evaluation of global models in parallel with the rounds: the next round begins while the last model is evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from edgefl.wire.mqtt.events import Inbox
from edgefl_server.coordinator.states import Outcome
from edgefl_server.events import DataStatistics, DeviceEvaluation, RoundClosed, TierResult
from edgefl_server.reporter import EventReporter
from edgefl_server.run_spec import RunSpec
from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.retry import RetryingJournal


@dataclass(frozen=True)
class EvaluationResult:
    """Result of the evaluation of the model after a round.

    Attributes:
        round: Number of the round.
        metrics: Metrics by name, including the loss; empty if the round was not due or the evaluation failed.
        error: Error of a failed evaluation; None otherwise.
    """

    round: int
    metrics: Mapping[str, float]
    error: Exception | None = None


def metric_fields(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the event fields ``accuracy``, ``loss`` (both may be None) and ``metrics``, which has all metrics but the
    loss.

    Values that are not finite are left out, because JSON has none.
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    loss = finite.pop("loss", None)
    return {"accuracy": finite.get("accuracy"), "loss": loss, "metrics": finite}


def round_closed(
    evaluation: EvaluationResult, outcome: str, details: Mapping[str, Any], metric: str
) -> RoundClosed:
    """Return the event of an evaluated round.

    Args:
        evaluation: Its evaluation.
        outcome: ``closed`` or ``abandoned``.
        details: Stored outcome of the round: its figures by name.
        metric: Name of the metric to show first.
    """
    text = details["text"] or (f"evaluation failed: {evaluation.error}" if evaluation.error else "")
    fields = {name: details[name] for name in RoundClosed.__struct_fields__ if name in details}
    fields |= metric_fields(evaluation.metrics) | {"text": text, "metric": metric}
    if found := fields.get("evaluation"):
        fields["evaluation"] = msgspec.convert(found, DeviceEvaluation)
    if found := fields.get("statistics"):
        fields["statistics"] = msgspec.convert(found, DataStatistics)
    fields["tiers"] = msgspec.convert(fields.get("tiers", {}), dict[str, TierResult])
    return RoundClosed(round=evaluation.round, outcome=outcome, **fields)


class Evaluator:
    """Evaluation of the model after each round, in one thread.

    A queued evaluation holds the number of its round; the model is loaded from its checkpoint when its turn comes.

    Args:
        spec: Specification of the run.
        journal: Journal of the rounds' outcomes.
        checkpoints: Models after each round.
        inbox: Receives an :class:`EvaluationResult` for each submitted round, in their order.
        reporter: Receives the event of each evaluated round.

    Attributes:
        pending: Rounds that ended and are not reported yet. Their checkpoints must stay.
    """

    def __init__(
        self,
        spec: RunSpec,
        journal: RetryingJournal,
        checkpoints: Checkpoints,
        inbox: Inbox[Any],
        reporter: EventReporter,
    ) -> None:
        self._spec = spec
        self._journal = journal
        self._checkpoints = checkpoints
        self._inbox = inbox
        self._reporter = reporter
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluate")
        self.pending: set[int] = set()

    def resume(self) -> None:
        """Submit the rounds that an earlier process ended but did not report as evaluated."""
        for number, outcome, details in self._journal.direct.outcomes(self._spec.rules.run):
            if outcome != "open" and not details.get("told"):
                self.submit(number, "closed" if outcome == "closed" else "abandoned")

    def submit(self, number: int, outcome: Outcome, known: Mapping[str, float] | None = None) -> None:
        """Queue the evaluation of round ``number``, which ended with ``outcome``.

        A round that is not due, or whose metrics are ``known`` already, is queued too, so that rounds are reported in
        order.
        """
        self.pending.add(number)
        is_due = known is None and self._spec.evaluates(number, outcome)
        self._executor.submit(self._evaluate, number, known or {}, is_due=is_due)

    def report(self, evaluation: EvaluationResult) -> None:
        """Emit the event of an evaluated round, then journal that it was reported.

        If the listener is gone, the round stays unreported, and the process that resumes the run reports it.

        Raises:
            StoreError: If the journal cannot be written while the server stops.
        """
        run, number = self._spec.rules.run, evaluation.round
        outcome, details = self._journal.outcome(run, number)
        self._reporter.emit(round_closed(evaluation, outcome, details, self._spec.metric))
        if self._reporter.is_open:
            self._journal.add_to_outcome(run, number, {**metric_fields(evaluation.metrics), "told": True})
            self.pending.discard(number)

    def stop(self) -> None:
        """Drop the queued evaluations, and wait for the one in progress."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _evaluate(self, number: int, metrics: Mapping[str, float], *, is_due: bool) -> None:
        error: Exception | None = None
        if is_due and self._spec.evaluate is not None:
            try:
                weights = self._spec.model_of(self._checkpoints.load(number))
                metrics = self._spec.evaluate(weights)
            except Exception as raised:  # a user's function: the round is reported without metrics
                error = raised
        self._inbox.put(EvaluationResult(number, metrics, error))
