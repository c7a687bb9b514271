"""Devices that spoil rounds are left out for a while; the run goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl_server.coordinator import states
from edgefl_server.coordinator.states import OpenRound, RefuseRun, Rules, StartRound, State, Warn
from tests.server.aggregate.members import NAMES, RULES, accepted, back, begun, decline, left, play

PLAIN = replace(RULES, whole=False, opening=0, rounds=40, min_devices=2, strikes=3, bench_rounds=4)


def opened(state: State) -> OpenRound:
    assert state.round is not None
    return state.round


def test_a_silent_device_is_suspended_after_a_few_deadlines() -> None:
    state = begun(**vars(replace(PLAIN, min_devices=3)))[1]
    now, seen = 0.0, []
    for _ in range(12):
        current = opened(state)
        seen.append("c" in current.assignments)
        state, _ = play(PLAIN, state, *accepted("a", "b"), now=now)
        if opened(state).number == current.number:  # it waits for c
            now = current.deadline
            state, _ = play(PLAIN, state, states.Tick(), now=now)
    assert seen == [True] * 3 + [False] * 4 + [True] + [False] * 4


def test_a_device_that_does_well_again_is_forgiven() -> None:
    state = begun(**vars(replace(PLAIN, min_devices=3)))[1]
    for refused in (True, True, False, True, True):
        state, _ = play(PLAIN, state, *accepted("a", "b"), states.Answered("c", not refused))
    assert state.strikes == {"c": 2} and "c" in opened(state).assignments


def test_where_too_few_would_remain_nobody_is_left_out() -> None:
    rules = replace(PLAIN, min_devices=3)
    state = begun(**vars(rules))[1]
    for _ in range(5):
        assert set(opened(state).assignments) == set(NAMES)
        state, _ = play(rules, state, *accepted("a", "b"), states.Answered("c", False))


def whole(**changes: object) -> tuple[Rules, State]:
    rules, state = begun(1, rounds=40, **changes)
    return replace(rules, min_devices=2), state


def test_refused_updates_of_one_device_restart_the_method_without_it() -> None:
    rules, state = whole()
    warned, refused = [], []
    for _ in range(6):
        bad = [states.Answered("b", False)] if "b" in opened(state).assignments else []
        state, actions = play(rules, state, *accepted("a", "c"), *bad)
        warned += [action for action in actions if isinstance(action, Warn)]
        refused += [action for action in actions if isinstance(action, RefuseRun)]
    assert not refused and state.members == ("a", "c") and state.phase == "open"
    assert any("b (until round" in warning.text for warning in warned)


def test_repeated_losses_of_one_carry_do_not_restart_without_end() -> None:
    rules, state = whole()
    restarts = 0
    for _ in range(30):
        current = opened(state)
        if "b" in current.assignments and current.position:
            state, actions = play(rules, state, *accepted("a", "c"), decline(state, "b", NO_CARRY))
            restarts += any(isinstance(action, StartRound) for action in actions)
        else:
            state, _ = play(rules, state, *accepted(*sorted(current.assignments)))
    assert restarts <= rules.strikes and "b" not in opened(state).assignments and state.base > 20


def test_a_device_that_wastes_turns_is_suspended_without_any_update() -> None:
    state = begun(**vars(replace(PLAIN, min_devices=3)))[1]
    seen = []
    for _ in range(7):
        current = opened(state)
        seen.append("c" in current.assignments)
        if "c" in current.assignments:
            nonce = current.assignments["c"].nonce
            state, _ = play(PLAIN, state, states.TurnLost("c", nonce), states.TurnLost("a", "another task"))
        state, actions = play(PLAIN, state, *left("c"), states.Tick(), now=current.deadline)
        assert any(isinstance(action, states.AbandonRound) for action in actions)
        state, _ = play(PLAIN, state, *back("c"), now=current.deadline)
    assert seen == [True] * 3 + [False] * 4 and set(state.strikes) == {"c"}


def test_a_slow_device_that_finishes_in_a_later_turn_has_no_strike() -> None:
    state = begun(**vars(replace(PLAIN, min_devices=3)))[1]
    nonce = opened(state).assignments["c"].nonce
    state, _ = play(PLAIN, state, states.TurnLost("c", nonce), *accepted("a", "b", "c"))
    assert opened(state).number == 2 and not state.strikes


@pytest.mark.parametrize("excuse", ["offline", "declined", "none"])
def test_a_turn_lost_by_a_broken_link_is_no_strike(excuse: str) -> None:
    state = begun(**vars(replace(PLAIN, min_devices=3)))[1]
    current = opened(state)
    after: dict[str, list[Any]] = {
        "offline": left("c"),
        "declined": [decline(state, "c", "busy")],
        "none": [],
    }
    events = [states.TurnLost("c", current.assignments["c"].nonce), *after[excuse], *accepted("a", "b")]
    state, _ = play(PLAIN, state, *events)
    state, _ = play(PLAIN, state, states.Tick(), now=current.deadline)
    assert opened(state).number == 2 and state.strikes == ({"c": 1} if excuse == "none" else {})
