"""What each round's model is worth: judged beside the rounds, told once, and journaled as told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from edgefl.wire.tensors import Arrays
from server import events
from server.coordinator.states import Outcome, Rules
from server.patience import Persist
from server.run_spec import RunSpec
from server.scoring import Scored, Scorer, round_closed
from server.storage.journal import Journal


class Verdicts:
    """``load`` reads the model after a round, ``done`` is handed each verdict, on another thread; ``emit`` tells people."""

    def __init__(
        self,
        spec: RunSpec,
        rules: Rules,
        journal: Journal,
        persist: Persist,
        emit: Callable[[events.Event], None],
        *,
        load: Callable[[int], Arrays],
        done: Callable[[Scored], None],
    ) -> None:
        self._spec = spec
        self._rules = rules
        self._journal = journal
        self._persist = persist
        self._emit = emit
        self._scorer = Scorer(spec.evaluate, load, done)

    @property
    def pending(self) -> Collection[int]:
        """Rounds that are over and not yet told of; their checkpoints must stay."""
        return self._scorer.pending

    def take_up(self) -> None:
        """Rounds that ended while a killed process had not yet told of them."""
        for number, outcome, details in self._journal.outcomes(self._rules.run):
            if outcome != "open" and not details.get("told"):
                self.judge(number, "closed" if outcome == "closed" else "abandoned")

    def judge(self, number: int, outcome: Outcome, known: Mapping[str, float] | None = None) -> None:
        """A round is over; its metrics may be ``known``."""
        self._scorer.submit(number, due=self._spec.evaluates(number, outcome), known=known)

    def tell(self, scored: Scored, *, heard: Callable[[], bool]) -> None:
        """A verdict is in: tell of the round, then journal that it was told, if it was ``heard``."""
        run = self._rules.run
        outcome, details = self._persist(lambda: self._journal.outcome(run, scored.round))
        self._emit(round_closed(scored, outcome, details, self._spec.metric))
        if not heard():  # whoever takes up the run tells of it
            return
        told = {**scored.told, "told": True}
        self._persist(lambda: self._journal.add_to_outcome(run, scored.round, told))
        self._scorer.pending.discard(scored.round)

    def stop(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._scorer.stop()
