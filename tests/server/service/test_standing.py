"""The journal knows at any instant where a method stands: what a killed server takes up is what it had."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl_server.coordinator import fleet, machine, states
from edgefl_server.coordinator.states import Abandon, Close, ModelReady, Open, Rules, State
from edgefl_server.storage.journal import Journal, RunRecord
from edgefl_server.storage.round_table import MethodProgress
from edgefl_server.storage.update_storage import UpdateFiles
from edgefl_server.storage.update_table import AcceptedUpdate
from tests.server.aggregate.members import EVENTS, NAMES, RULES, VERSION, addressed, decline, hello


class Server:
    """A coordinator whose decisions are journaled as the service does it."""

    def __init__(self, rules: Rules, url: str = "sqlite://") -> None:
        self.rules, self.now = rules, 0.0
        self.state = machine.initial(VERSION, 0.0)
        self.folder = tempfile.TemporaryDirectory()
        self.journal = Journal(url, "demo", UpdateFiles(Path(self.folder.name)))
        self.journal.begin_run(RunRecord("run", "digest", 1))

    def take(self, event: Any) -> None:
        current = self.state.round
        task = current.assignments.get(event.device) if current and hasattr(event, "device") else None
        if current is not None and task is not None and task.status == "open":
            self._answered(current.number, task, event)
        self._do(event)

    def _answered(self, number: int, task: fleet.Assignment, event: Any) -> None:
        match event:
            case states.Answered(accepted=True):
                none = PublishTraffic()
                figures = {"metrics": {}, "down": none, "up": none, "up_float32_bytes": 0}
                update = AcceptedUpdate(task, sha256="s", weight=1, share=1.0, data=b"", **figures)
                self.journal.accept("run", number, [update])
            case states.Answered():
                row = "run", task.round, task.device, task.nonce, "s", "nan", ""
                self.journal.reject(*row, step=number, final=task)
            case states.TaskDeclined(nonce=task.nonce):
                self.journal.decline("run", task, event.reason)

    def _do(self, event: Any) -> None:
        self.state, actions = machine.step(self.rules, self.state, event, self.now)
        for action in actions:
            match action:
                case Open(round=begun):
                    self.journal.open_round("run", begun, b"")
                case Close(round=ended):
                    self.journal.end_round("run", ended.number, state="closed", outcome={})
                    self._do(ModelReady(VERSION))
                case Abandon(round=ended, restart=restart):
                    if restart:
                        self.journal.begin_again("run", ended.number)
                    self.journal.end_round("run", ended.number, state="abandoned", outcome={})

    @property
    def resumed(self) -> State:
        """What another process would begin with, for what the journal has of it."""
        found, run = self.journal.progress("run"), self.journal.latest_run()
        assert run is not None
        opened = self.journal.current_round("run")
        fields = {"position": found.position, "base": found.base, "members": found.members, "round": opened}
        phase = self.state.phase if opened is None else "open"
        return replace(self.state, phase=phase, next_round=run.number, **fields)


@given(EVENTS, st.sampled_from(["wait", "refuse", "partial"]), st.integers(0, 1))
@settings(max_examples=10, deadline=None)
def test_the_journal_has_the_state(events: list[Any], absent: Any, opening: int) -> None:
    server = Server(replace(RULES, absent=absent, opening=opening, min_devices=2, deadline_s=20, rounds=5))
    for event in events:
        server.now += 1.0
        if not isinstance(event, states.Outage):  # it moves deadlines, which a restart sets anew
            for each in addressed(server.state, event):
                server.take(each)
                assert server.resumed == server.state
    server.journal.close()


@pytest.fixture
def losing() -> Server:
    """Three devices after two exchanges; ``b`` has declined round 3, and the server was killed before it ended it."""
    server = Server(RULES)
    for event in hello(*NAMES):
        server.take(event)
    for name in NAMES * 2:
        server.take(states.Answered(name, accepted=True))
    current = server.state.round
    assert current is not None
    server.journal.decline("run", current.assignments["b"], NO_CARRY)
    return server


def test_a_decline_survives_and_the_round_it_ends_ends_after_the_restart(losing: Server) -> None:
    state, actions = machine.step(RULES, losing.resumed, states.Outage(0.0), 1.0)
    told, expected = machine.step(RULES, losing.state, decline(losing.state, "b"), 1.0)
    assert (state, actions) == (told, expected) and isinstance(actions[0], Abandon) and actions[0].restart


def test_the_method_begins_again_when_the_round_ends_and_not_before(losing: Server) -> None:
    before = losing.resumed
    losing.journal.begin_again("run", 3)
    assert losing.resumed == before and losing.journal.progress("run") == MethodProgress(2, 2, NAMES)
    losing.journal.end_round("run", 3, state="abandoned", outcome={})
    assert losing.journal.progress("run") == MethodProgress(0, 2, ())


def test_a_closed_round_with_an_earlier_mark_counts_from_there(losing: Server) -> None:
    losing.take(decline(losing.state, "b"))
    for name in NAMES:
        losing.take(states.Answered(name, accepted=True))
    assert losing.journal.progress("run") == MethodProgress(1, 4, NAMES)


def test_another_run_of_the_federation_stands_at_its_own_beginning(losing: Server) -> None:
    assert losing.journal.progress("other") == MethodProgress()
