"""Algorithms that need every device: who must take part, and what becomes of a round that lacks one. Pure state machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgefl.wire.mqtt.messages import NO_CARRY
from edgefl_server.coordinator import attendance, machine, states
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import AbandonRound, CloseRound, RefuseRun, SendTask, StartRound, Warn
from tests.server.aggregate.members import (
    NAMES,
    RULES,
    VERSION,
    accepted,
    back,
    begun,
    decline,
    hello,
    kinds,
    left,
    play,
)

# -- opening ---------------------------------------------------------------------------------------------------


def test_the_first_round_waits_for_all_devices_however_long_that_takes() -> None:
    state, actions = play(RULES, machine.initial(VERSION, 0.0), *hello("a", "b"), now=0.0)
    state, more = play(RULES, state, states.Tick(), now=1e6)
    assert not actions and not more and machine.wake_at(RULES, state, 1e6) is None
    assert attendance.presence(RULES, state, 1e6) == attendance.Presence(2, 3)
    state, actions = play(RULES, state, *hello("c"), now=1e6)
    assert kinds(actions) == [StartRound] and state.members == NAMES


def test_partial_rounds_continue_with_fewer_after_the_timeout() -> None:
    rules = replace(RULES, absent="partial")
    state, _ = play(rules, machine.initial(VERSION, 0.0), *hello("a", "b"), now=0.0)
    state, actions = play(rules, state, states.Tick(), now=20.0)
    assert kinds(actions) == [StartRound] and state.members == () and not actions[0].round.whole


def test_every_present_device_becomes_a_member() -> None:
    rules = replace(RULES, min_devices=2, fraction=0.5, over_selection=1.0)
    state, _ = play(rules, machine.initial(VERSION, 0.0), *hello("a"), *left("a"), *hello("b", "c"), now=0.0)
    assert state.phase == "waiting", "a has gone just now and may come back"
    assert machine.wake_at(rules, state, 0.0) == 5.0
    state, actions = play(rules, state, *back("a"), now=1.0)
    assert state.members == NAMES and actions[0].round.goal == len(actions[0].round.assignments) == 3


def test_a_device_that_does_not_come_back_within_the_grace_is_no_member() -> None:
    rules = replace(RULES, min_devices=2)
    state, _ = play(rules, machine.initial(VERSION, 0.0), *hello("a"), *left("a"), *hello("b", "c"), now=0.0)
    state, actions = play(rules, state, states.Tick(), now=5.0)
    assert kinds(actions) == [StartRound] and state.members == ("b", "c")


def test_newcomers_wait_and_the_members_stay() -> None:
    rules, state = begun()
    state, actions = play(rules, state, *hello("d"), *accepted(*NAMES))
    assert kinds(actions) == [CloseRound, StartRound] and set(actions[1].round.assignments) == set(NAMES)
    assert state.members == NAMES


def test_no_round_opens_while_a_member_is_away_and_it_is_named() -> None:
    rules, state = begun()
    state, actions = play(rules, state, *accepted("a", "b"), *left("c"), *accepted("c"))
    assert kinds(actions) == [CloseRound] and state.phase == "waiting"
    assert attendance.presence(rules, state, 1e5) == attendance.Presence(2, 3, ("c",))
    state, actions = play(rules, state, states.Tick(), *hello("d"), now=1e5)
    assert not actions and machine.wake_at(rules, state, 1e5) is None
    state, actions = play(rules, state, *back("c"), now=2e5)
    assert kinds(actions) == [StartRound] and state.position == 1 and state.next_round == 2


def test_a_member_that_fits_no_tier_any_more_is_waited_for() -> None:
    rules, state = begun(tiers=(TierRule("all", (), 4),))
    state, actions = play(rules, state, states.DeviceHello("c", 1, 50), *accepted(*NAMES))
    assert kinds(actions) == [SendTask, CloseRound] and attendance.presence(rules, state, 1.0).missing == (
        "c",
    )


# -- closing ---------------------------------------------------------------------------------------------------


def test_position_and_base_follow_the_rounds_that_closed() -> None:
    rules, state = begun(2)
    assert (state.position, state.base, state.round and state.round.number) == (2, 2, 3)
    state, actions = play(rules, state, states.Answered("b", False))
    assert kinds(actions) == [AbandonRound, StartRound]
    assert (state.position, state.base, state.round and state.round.number) == (2, 2, 4)
    assert state.round is not None and state.round.position == 2
    state, _ = play(rules, state, *accepted(*NAMES))
    assert (state.position, state.base, state.next_round) == (3, 4, 5)


def test_an_algorithm_without_members_counts_its_exchanges() -> None:
    rules, state = begun(whole=False, opening=0)
    state, actions = play(rules, state, *accepted("a", "b"), states.Answered("c", False))
    assert kinds(actions) == [CloseRound, StartRound] and (state.position, state.base, state.members) == (
        1,
        1,
        (),
    )


def test_a_declined_task_ends_the_devices_part_like_a_refusal() -> None:
    rules, state = begun(whole=False)
    state, actions = play(rules, state, *accepted("a", "b"), decline(state, "c"))
    assert kinds(actions) == [CloseRound, StartRound]
    assert actions[0].round.assignments["c"].status == "declined"
    assert actions[0].round.assignments["c"].reason == NO_CARRY


@pytest.mark.parametrize("nonce", ["?", ""])
def test_a_decline_of_another_task_changes_nothing(nonce: str) -> None:
    rules, state = begun()
    assert machine.step(rules, state, states.TaskDeclined("a", nonce, NO_CARRY), 1.0) == (state, ())
    assert machine.step(rules, state, states.TaskDeclined("z", nonce, NO_CARRY), 1.0) == (state, ())


def test_a_decline_after_the_answer_changes_nothing() -> None:
    rules, state = begun(1)
    word = decline(state, "a")
    state, _ = play(rules, state, *accepted("a"))
    assert machine.step(rules, state, word, 1.0) == (state, ())


def test_when_all_decline_the_abandoned_round_says_so() -> None:
    rules, state = begun(whole=False, opening=0)
    words = [decline(state, name, "busy") for name in NAMES]
    _, actions = play(rules, state, *words)
    assert isinstance(actions[0], AbandonRound) and "declined: a, b, c (busy)" in actions[0].text


# -- a member is missing: wait ---------------------------------------------------------------------------------


def test_a_missed_deadline_repeats_the_exchange_and_names_the_device() -> None:
    rules, state = begun(1)
    state, _ = play(rules, state, *accepted("a", "b"))
    state, actions = play(rules, state, states.Tick(), now=100.0)
    assert kinds(actions) == [AbandonRound, StartRound]
    assert "c (it did not report in time)" in actions[0].text and "all 3 devices" in actions[0].text
    assert (actions[1].round.number, actions[1].round.position, state.base) == (3, 1, 1)


def test_a_refused_update_ends_the_round_at_once() -> None:
    rules, state = begun(1)
    _, actions = play(rules, state, states.Answered("b", False))
    assert kinds(actions) == [AbandonRound, StartRound] and "b (its update was refused)" in actions[0].text


def test_a_member_offline_beyond_the_grace_ends_the_round_once() -> None:
    rules, state = begun(1)
    state, _ = play(rules, state, *accepted("a"), *left("c"), now=10.0)
    assert machine.wake_at(rules, state, 10.0) == 15.0
    assert play(rules, state, states.Tick(), now=14.9)[1] == []
    state, actions = play(rules, state, states.Tick(), now=15.0)
    assert kinds(actions) == [AbandonRound] and "c (it has been offline for over 5 s)" in actions[0].text
    for now in (16.0, 1e3, 1e6):
        state, actions = play(rules, state, states.Tick(), now=now)
        assert not actions and machine.wake_at(rules, state, now) is None
    state, actions = play(rules, state, *back("c"), now=1e6)
    assert kinds(actions) == [StartRound] and (state.position, actions[0].round.number) == (1, 3)


def test_the_grace_of_a_round_begins_anew_after_a_restart_or_an_outage() -> None:
    rules, state = begun(1)
    state, _ = play(rules, state, *left("c"), now=10.0)
    delayed, actions = play(rules, state, states.Outage(30.0), now=40.0)
    assert not actions and machine.wake_at(rules, delayed, 40.0) == 45.0
    assert state.round is not None
    resumed = replace(state, round=replace(state.round, deadline=60.0 + 100))
    assert machine.step(rules, resumed, states.Tick(), 60.0)[1] == ()
    assert machine.wake_at(rules, resumed, 60.0) == 65.0


def test_a_lost_carry_restarts_the_method_with_present_devices() -> None:
    rules, state = begun(2)
    state, _ = play(rules, state, *hello("d"), *accepted("a"))
    state, actions = play(rules, state, decline(state, "b"))
    assert kinds(actions) == [AbandonRound, Warn, StartRound]
    assert actions[0].restart and actions[1].text == actions[0].text
    assert "b has lost what it kept of round 2" in actions[1].text
    assert (state.position, state.base, state.members) == (0, 2, (*NAMES, "d"))
    assert (actions[2].round.number, actions[2].round.position) == (4, 0)


def test_a_restarted_method_needs_as_many_devices_as_at_first() -> None:
    rules, state = begun(2)
    state, actions = play(rules, state, *left("c"), decline(state, "b"), now=2.0)
    assert kinds(actions) == [AbandonRound, Warn] and state.members == ()
    assert machine.wake_at(rules, state, 2.0) == 7.0
    state, actions = play(rules, state, states.Tick(), now=7.0)
    assert not actions and attendance.presence(rules, state, 7.0) == attendance.Presence(2, 3)
    state, actions = play(rules, state, *hello("e"), now=8.0)
    assert kinds(actions) == [StartRound] and state.members == ("a", "b", "e")


def test_a_decline_for_another_reason_does_not_make_it_begin_again() -> None:
    rules, state = begun(2)
    state, actions = play(rules, state, decline(state, "b", "busy"))
    assert kinds(actions) == [AbandonRound, StartRound] and "b (it declined (busy))" in actions[0].text
    assert state.position == 2 and not actions[0].restart


@pytest.mark.parametrize(("opening", "position"), [(0, 2), (1, 0)])
def test_what_cannot_be_made_again_ends_the_run(opening: int, position: int) -> None:
    rules, state = begun(position, opening=opening)
    state, actions = play(rules, state, decline(state, "b"))
    assert kinds(actions) == [AbandonRound, RefuseRun] and state.phase == "done"
    assert "b (it declined (no-carry))" in actions[1].text and "cannot be made again" in actions[1].text
    assert machine.step(rules, state, states.Tick(), 1e9) == (state, ())
    assert machine.wake_at(rules, state, 1e9) is None


def test_three_attempts_with_refused_updates_end_the_run() -> None:
    rules, state = begun(1)
    for name in ("b", "c"):
        state, actions = play(rules, state, states.Answered(name, False, "diverged"))
        assert kinds(actions) == [AbandonRound, StartRound]
    state, actions = play(rules, state, states.Answered("b", False, "diverged"))
    assert kinds(actions) == [AbandonRound, RefuseRun] and state.phase == "done"
    assert "b (its update was refused: diverged)" in actions[1].text and "3 tries in a row" in actions[1].text
    assert (state.position, state.next_round, rules.rounds) == (1, 5, 6), "rounds were left"
    assert machine.step(rules, state, states.Tick(), 1e9) == (state, ())


@pytest.mark.parametrize("between", ["closed", "late", "offline"])
def test_tries_that_end_otherwise_in_between_begin_the_count_anew(between: str) -> None:
    rules, state = begun(1, rounds=20)
    for _ in range(2):
        state, _ = play(rules, state, states.Answered("b", False))
    match between:
        case "closed":
            state, _ = play(rules, state, *accepted(*NAMES))
        case "late":
            state, _ = play(rules, state, states.Tick(), now=101.0)
        case "offline":
            state, _ = play(rules, state, *left("c"), now=1.0)
            state, _ = play(rules, state, states.Tick(), *back("c"), now=6.0)
    later = 102.0 if between == "late" else 7.0
    for _ in range(2):
        state, actions = play(rules, state, states.Answered("b", False), now=later)
        assert kinds(actions) == [AbandonRound, StartRound], between
    assert kinds(play(rules, state, states.Answered("b", False), now=later)[1]) == [AbandonRound, RefuseRun]


def test_declined_tasks_count_like_refused_updates() -> None:
    rules, state = begun(1, rounds=20)
    state, _ = play(rules, state, states.Answered("b", False))
    state, actions = play(rules, state, decline(state, "a", "busy"))
    assert kinds(actions) == [AbandonRound, StartRound]
    state, actions = play(rules, state, decline(state, "a", "busy"))
    assert kinds(actions) == [AbandonRound, RefuseRun] and "a (it declined (busy))" in actions[1].text


@pytest.mark.parametrize("whole", [False, True])
def test_a_failed_server_step_completes_nothing_and_ends_the_run_thrice(whole: bool) -> None:
    rules = replace(RULES, whole=whole, rounds=20)
    state, _ = play(rules, machine.initial(VERSION, 0.0), *hello(*NAMES))
    for tries in (1, 2, 3):
        for name in NAMES:
            state, _ = machine.step(rules, state, states.Answered(name, True), 1.0)
        assert state.phase == "closing"
        state, actions = machine.step(rules, state, states.ModelReady(VERSION, failed="the step failed"), 1.0)
        assert (state.position, state.base) == (0, 0)
        assert kinds(actions) == ([StartRound] if tries < 3 else [RefuseRun])
    assert "the step failed; it failed 3 times in a row" in actions[0].text and state.phase == "done"


def test_where_others_can_take_part_refused_updates_never_end_the_run() -> None:
    rules, state = begun(whole=False, opening=0, rounds=5)
    for _ in range(4):
        state, actions = play(rules, state, *(states.Answered(name, False) for name in NAMES))
        assert kinds(actions) == [AbandonRound, StartRound]


# -- a member is missing: refuse -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (states.Answered("b", False), "its update was refused"),
        (states.Tick(), "did not report in time"),
        ("decline", "it declined"),
    ],
)
def test_absent_refuse_ends_the_run_after_the_round_is_journaled(event: Any, why: str) -> None:
    rules, state = begun(1, absent="refuse")
    event = decline(state, "b") if event == "decline" else event
    state, actions = play(rules, state, *accepted("a", "c"), now=1.0)
    state, actions = play(rules, state, event, now=100.0)
    assert kinds(actions) == [AbandonRound, RefuseRun]
    assert why in actions[1].text and "start the server again" in actions[1].text
    assert (state.phase, state.round, state.position, state.next_round) == ("done", None, 1, 3)


def test_a_member_has_the_grace_between_rounds_before_the_run_ends() -> None:
    rules, state = begun(1, absent="refuse")
    state, _ = play(rules, state, *accepted("a", "b"), *left("c"), now=1.0)
    state, actions = play(rules, state, *accepted("c"), now=3.0)
    assert kinds(actions) == [CloseRound] and machine.wake_at(rules, state, 3.0) == 8.0
    assert machine.step(rules, state, states.Tick(), 7.9)[1] == ()
    assert kinds(play(rules, state, *back("c"), now=7.9)[1]) == [StartRound]
    state, actions = play(rules, state, states.Tick(), now=8.0)
    assert kinds(actions) == [RefuseRun] and state.phase == "done"
    assert "round 3 cannot open" in actions[0].text and "c (it has been offline" in actions[0].text


def test_a_refused_run_gives_members_the_grace_after_a_restart() -> None:
    rules, state = begun(1, absent="refuse")
    state, _ = play(rules, state, *left("c"), now=1.0)
    resumed = replace(state, phase="waiting", round=None, waiting_since=1e6)
    assert machine.step(rules, resumed, states.Tick(), 1e6)[1] == ()
    assert machine.wake_at(rules, resumed, 1e6) == 1e6 + 5
    assert kinds(play(rules, resumed, *back("c"), now=1e6 + 1)[1]) == [StartRound]


def test_before_the_first_round_nobody_is_missing() -> None:
    rules = replace(RULES, absent="refuse")
    state, _ = play(rules, machine.initial(VERSION, 0.0), *hello("a"), *left("a"), now=0.0)
    assert play(rules, state, states.Tick(), now=1e6)[1] == []


# -- a member is missing: partial ------------------------------------------------------------------------------


def test_partial_rounds_warn_once_about_missing_devices() -> None:
    rules, state = begun(1, absent="partial")
    state, _ = play(rules, state, *hello("d"), *left("d"), *accepted("a"))
    state, actions = play(rules, state, decline(state, "b"), states.Tick(), now=100.0)
    assert kinds(actions) == [Warn, CloseRound, StartRound]
    assert "round 2 goes on without" in actions[0].text and "guarantees do not hold" in actions[0].text
    for why in ("b (it declined (no-carry))", "c (it did not report in time)", "d (it was not there)"):
        assert why in actions[0].text
    assert "a (" not in actions[0].text


def test_a_partial_round_with_everyone_gives_no_warning() -> None:
    rules, state = begun(1, absent="partial")
    assert kinds(play(rules, state, *accepted(*NAMES))[1]) == [CloseRound, StartRound]


@pytest.mark.parametrize(("opening", "again"), [(1, True), (0, False)])
def test_partial_rounds_without_any_carry_begin_again(opening: int, again: bool) -> None:
    rules, state = begun(1, absent="partial", opening=opening)
    words = [decline(state, name) for name in NAMES]
    state, actions = play(rules, state, *words)
    assert kinds(actions) == ([AbandonRound, Warn, StartRound] if again else [AbandonRound, StartRound])
    assert state.position == (0 if again else 1)
