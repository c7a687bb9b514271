"""Algorithms that need every device, under whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edgefl_server.coordinator import machine
from edgefl_server.coordinator.states import (
    AbandonRound,
    CloseRound,
    FinishRun,
    ModelReady,
    RefuseRun,
    Rules,
    StartRound,
)
from tests.server.aggregate.members import EVENTS, RULES, VERSION, addressed


class Watch:
    """What a state machine has done so far, and what it must not do next."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.state, self.now = rules, machine.initial(VERSION, 0.0), 0.0
        self.last = self.position = self.base = 0
        self.open = False
        self.members: tuple[str, ...] = ()

    def take(self, event: Any) -> None:
        self.state, actions = machine.step(self.rules, self.state, event, self.now)
        for action in actions:
            self._judge(action)
            if isinstance(action, CloseRound):
                self.take(ModelReady(VERSION))

    def _judge(self, action: Any) -> None:
        match action:
            case StartRound(round=begun):
                assert not self.open and (begun.number, begun.position) == (self.last + 1, self.position)
                self.open, self.last = True, begun.number
                if self.rules.all_needed:
                    assert set(begun.assignments) == set(self.members or begun.assignments)
                    self.members = tuple(sorted(begun.assignments))
                    assert begun.goal == len(self.members) >= self.rules.min_devices
            case CloseRound(round=ended):
                assert self.open and ended.number == self.last
                reports = {each.device for each in ended.with_status("accepted")}
                assert not self.rules.all_needed or reports == set(self.members)
                self.open, self.position, self.base = False, self.position + 1, ended.number
            case AbandonRound(round=ended, restart=restart):
                assert self.open and ended.number == self.last
                assert not restart or (self.rules.opening and ended.position > 0)
                self.open = False
                if restart:
                    self.position, self.members = 0, ()
            case RefuseRun():
                assert self.rules.absent != "partial" and self.state.phase == "done"
            case FinishRun():
                assert self.last == self.rules.rounds


@given(EVENTS, st.sampled_from(["wait", "refuse", "partial"]), st.integers(0, 1), st.integers(0, 3))
def test_positions_grow_by_one(events: list[Any], absent: Any, opening: int, pace: int) -> None:
    watch = Watch(replace(RULES, absent=absent, opening=opening, min_devices=2, deadline_s=20, rounds=9))
    for event in events:
        watch.now += pace
        for each in addressed(watch.state, event):
            watch.take(each)
        state = watch.state
        assert (state.position, state.base, state.members) == (watch.position, watch.base, watch.members)
        assert (state.phase == "open") == watch.open
        wake = machine.wake_at(watch.rules, state, watch.now)
        assert wake is None or wake > watch.now, "a wake that is due has been served"
