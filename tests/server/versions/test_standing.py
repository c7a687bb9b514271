"""The journal knows at any instant what devices are at work on, and what each version has taken."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl_server.coordinator import fleet, machine, states
from edgefl_server.coordinator.fleet import Assignments
from edgefl_server.coordinator.states import Answered, Close, ModelReady, Open, Reassign, TaskDeclined
from edgefl_server.storage.journal import Journal, RunRecord
from edgefl_server.storage.update_storage import store_at
from edgefl_server.storage.update_table import AcceptedUpdate
from tests.server.coordinator.test_buffered import EVENTS, RULES, declining


class Server:
    """A coordinator whose decisions are journaled as the service does it."""

    def __init__(self, rules: states.Rules) -> None:
        self.rules, self.now = rules, 0.0
        self.state = machine.initial("v0", 0.0)
        self.folder = tempfile.TemporaryDirectory()
        self.journal = Journal(
            "sqlite://", "demo", store_at(self.folder.name), versions=1 + rules.max_staleness
        )
        self.journal.begin_run(RunRecord("run", "digest", 1))

    def take(self, event: Any) -> None:
        current = self.state.round
        task = current.assignments.open.get(getattr(event, "device", "")) if current else None
        if current is not None and task is not None:
            self._answered(current.number, task, event)
        self._do(event)

    def _answered(self, number: int, task: fleet.Assignment, event: Any) -> None:
        match event:
            case Answered(accepted=True):
                figures = {
                    "metrics": {},
                    "down": PublishTraffic(),
                    "up": PublishTraffic(),
                    "up_float32_bytes": 0,
                }
                update = AcceptedUpdate(task, sha256="s", weight=1, share=0.5, data=b"x", **figures)
                self.journal.accept("run", number, [update])
            case Answered():
                row = "run", task.round, task.device, task.nonce, "s", "nan", ""
                self.journal.reject(*row, step=number, final=task)
            case TaskDeclined(nonce=task.nonce):
                self.journal.decline("run", task, event.reason)

    def _do(self, event: Any) -> None:
        self.state, actions = machine.step(self.rules, self.state, event, self.now)
        for action in actions:
            match action:
                case Open(round=begun):
                    self.journal.open_round("run", begun, b"")
                case Reassign(over=over, tasks=tasks):
                    self.journal.reassign("run", over, tasks)
                case Close(round=ended):
                    self.journal.end_round("run", ended.number, state="closed", outcome={})
                    assert self.standing == self.stands  # what a server finds that is killed here
                    self._do(ModelReady(f"v{ended.number}"))

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
