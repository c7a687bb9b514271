"""An operator's hold: the open round ends, and no other begins until it is lifted."""

from __future__ import annotations

from edgefl_server.coordinator import machine as coordinator
from edgefl_server.coordinator import states
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import (
    Answered,
    CloseRound,
    DeviceHello,
    FinishRun,
    Hold,
    ModelReady,
    Rules,
    StartRound,
    State,
    Tick,
)

RULES = Rules(run="r", seed=1, rounds=2, tiers=(TierRule("strong", ("strong-*",)),), ready_timeout_s=5.0)


def stepped(state: State, *events: states.Event, now: float = 1.0) -> tuple[State, list[str]]:
    told: list[str] = []
    for event in events:
        state, actions = coordinator.step(RULES, state, event, now)
        told += [type(action).__name__ for action in actions]
    return state, told


def hello() -> DeviceHello:
    return DeviceHello("strong-0", memory_bytes=1 << 30, samples=10)


def test_a_round_that_is_open_ends_and_no_other_opens() -> None:
    state, told = stepped(coordinator.initial("v", 0.0), hello())
    assert told == [StartRound.__name__]

    state, told = stepped(state, Hold(True), Answered("strong-0", accepted=True), ModelReady("w"), Tick())
    assert (told, state.phase, state.next_round) == ([CloseRound.__name__], "waiting", 2)
    assert coordinator.wake_at(RULES, state, 100.0) is None, "nobody waits for time to pass"

    state, told = stepped(state, Hold(False))
    assert told == [StartRound.__name__] and state.phase == "open"


def test_a_hold_before_the_first_round_outlasts_the_wait_for_devices() -> None:
    state, told = stepped(coordinator.initial("v", 0.0), Hold(True), hello(), Tick(), now=1000.0)
    assert (told, state.phase) == ([], "waiting")


def test_a_run_whose_rounds_are_over_ends_though_it_is_held() -> None:
    state = coordinator.initial("v", 0.0)
    for _ in range(2):
        state, _ = stepped(state, hello(), Answered("strong-0", accepted=True))
        state, told = stepped(state, Hold(state.next_round == 2), ModelReady("w"))
    assert (told, state.phase) == ([FinishRun.__name__], "done")
