"""The journal knows at any instant where a method stands: what a killed server takes up is what it had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl_server.coordinator import machine, states
from edgefl_server.coordinator.states import AbandonRound, State
from edgefl_server.storage.round_table import MethodProgress
from tests.server.aggregate.members import EVENTS, NAMES, RULES, addressed, decline, hello
from tests.server.journaled import JournaledCoordinator


class Server(JournaledCoordinator):
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
    assert (
        (state, actions) == (told, expected) and isinstance(actions[0], AbandonRound) and actions[0].restart
    )


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
