"""What the service tells people by itself, each thing once: that it is up, whom it waits for, which round began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from server import events
from server.aggregate.robust import unprotected
from server.coordinator.attendance import Presence, presence
from server.coordinator.states import OpenRound, Rules, State
from server.run_spec import RunSpec


class Announcer:
    """Remembers what has been said, and says what is new to ``emit``."""

    def __init__(self, spec: RunSpec, rules: Rules, emit: Callable[[events.Event], None]) -> None:
        self._spec = spec
        self._rules = rules
        self._emit = emit
        self._waiting: Presence | None = None
        self._newcomers: set[str] = set()
        self._unprotected: set[tuple[str, int]] = set()

    def started(self, state: State, *, resumed: bool, device: str, server_key: str) -> None:
        self._emit(
            events.Started(
                federation=self._spec.federation,
                run=self._rules.run,
                rounds=self._rules.rounds,
                next_round=state.next_round,
                resumed=resumed,
                model_version=state.model_version,
                device=device,
                server_key=server_key,
            )
        )

    def opened(self, opened: OpenRound) -> None:
        self._emit(
            events.RoundOpened(
                round=opened.number,
                goal=opened.goal,
                devices=tuple(opened.assignments),
                deadline=opened.deadline,
            )
        )
        holders = Counter(assignment.tier for assignment in opened.assignments.values())
        rule = self._spec.aggregate.rule
        for tier, count in sorted(holders.items()):
            if unprotected(rule, count) and (tier, count) not in self._unprotected:
                self._unprotected.add((tier, count))
                text = f"the rule {rule.name} leaves nothing out of {count} updates of tier {tier!r}; raise aggregate.trim"
                self._emit(events.Warned(tier=tier, text=text))

    def waiting(self, state: State, now: float) -> None:
        """Whenever it waits for others than before."""
        if state.phase != "waiting":
            self._waiting = None
            return
        there = presence(self._rules, state, now)
        if there.known < there.needed and state.next_round <= self._rules.rounds and there != self._waiting:
            self._waiting = there
            self._emit(events.Waiting(next_round=state.next_round, **vars(there)))

    def newcomer(self, state: State, device: str, tier: str) -> None:
        """A device that no round will select before the method begins again."""
        if not state.members or device in state.members or device in self._newcomers:
            return
        self._newcomers.add(device)
        text = (
            f"device {device} came after the method began and has nothing of its earlier rounds, which the program needs; "
            "it takes part if the method begins again"
        )
        self._emit(events.Warned(tier=tier, text=text))
