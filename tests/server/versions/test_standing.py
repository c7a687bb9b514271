"""The journal knows at any instant what devices are at work on, and what each version has taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_server.coordinator import fleet, states
from edgefl_server.coordinator.fleet import Assignments
from tests.server.coordinator.test_buffered import EVENTS, RULES, declining
from tests.server.journaled import JournaledCoordinator


class Server(JournaledCoordinator):
    def check_closed(self) -> None:
        assert self.standing == self.stands  # what a server finds that is killed here

    @property
    def standing(self) -> object:
        """What another process finds."""
        current, run = self.journal.current_round("run"), self.journal.latest_run()
        assert run is not None
        tasks = self.journal.open_tasks("run")
        return run.number, told(tasks), current and facts(current)

    @property
    def stands(self) -> object:
        """What this one has."""
        state = self.state
        if state.phase == "closing" and state.round is not None:
            return state.next_round + 1, told(state.round.assignments.open), None
        at_work = state.round.assignments.open if state.round is not None else state.carried.open
        return state.next_round, told(at_work), state.round and facts(state.round)


def told(tasks: Any) -> dict[str, fleet.Assignment]:
    """Without when their time is over: after a restart it begins anew."""
    return {name: replace(task, until=0.0) for name, task in tasks.items()}


def facts(opened: states.OpenRound) -> object:
    began = {task.round for task in opened.assignments.open.values()}
    older = {number: version for number, version in opened.older.items() if number in began}
    tasks = Assignments(dict(opened.assignments.open), accepted=opened.count("accepted"))
    fields = replace(opened, assignments=tasks, older={}, deadline=0.0)
    return replace(fields, assignments=Assignments({})), tasks.count("accepted"), older


@given(EVENTS, st.integers(0, 4), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_the_journal_has_the_state(events: list[Any], concurrency: int, buffer: int, late: int) -> None:
    server = Server(replace(RULES, concurrency=concurrency, buffer=buffer, max_staleness=late))
    for event in events:
        server.now += 1.0
        server.take(declining(server.state, event))
        if server.state.phase != "done":
            assert server.standing == server.stands
    server.journal.close()
