"""The coordinator at its edges: the instants at which something changes, and what must not change anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgefl.errors import DIVERGED, DivergedError, UpdateRejected
from edgefl_server.coordinator import attendance, claims, machine, roster, states
from edgefl_server.coordinator.roster import RosterEntry, TierRule
from edgefl_server.coordinator.states import AbandonRound, CloseRound, FinishRun, RefuseRun, Rules, StartRound
from tests.server.aggregate.members import NAMES, accepted, begun, kinds, left, play
from tests.server.coordinator.test_coordinator import RULES, VERSION, answer, claim, hello, opened


def test_a_run_takes_all_devices_and_any_report_unless_told_otherwise() -> None:
    rules = Rules("run", 0, 1, ())
    assert (rules.min_devices, rules.min_reports, rules.fraction, rules.over_selection) == (1, 1, 1.0, 1.0)
    assert (rules.deadline_s, rules.ready_timeout_s, rules.offline_grace_s) == (120.0, 120.0, 30.0)
    assert (rules.weighted, rules.samples, rules.most_samples) == (False, 0, 1 << 20)
    assert (rules.whole, rules.absent, rules.opening, rules.all_needed) == (False, "wait", 0, False)
    assert states.MOST_SAMPLES == 1 << 24


def test_names_and_numbers_of_tasks_are_the_same_in_every_release() -> None:
    """A server that is updated in mid-run gives the tasks that it gave before."""
    assert roster.task_seed(1, 2, "a") == 5947705263599773572
    assert roster.task_nonce("r", 1, 2, "a") == "8c09b4b99e33825c07e4f2c6"
    assert roster.sample(3, 1, [f"d{number}" for number in range(8)], 3) == ["d1", "d4", "d7"]


def test_the_longest_pattern_decides_and_the_first_of_equals() -> None:
    tiers = (TierRule("one", ("half-*",)), TierRule("two", ("half-slow-*", "x?")), TierRule("three", ("x*",)))
    assert roster.tier_of(tiers, "half-slow-1", 0) == "two"
    assert roster.tier_of(tiers, "half-1", 0) == "one"
    assert roster.tier_of(tiers, "xy", 0) == "two"


def test_memory_as_large_as_a_tier_asks_for_is_enough() -> None:
    tiers = (TierRule("small", (), 4), TierRule("large", (), 8))
    assert [roster.tier_of(tiers, "d", memory) for memory in (3, 4, 7, 8)] == ["", "small", "small", "large"]


def test_a_device_is_eligible_until_the_grace_is_over() -> None:
    device = RosterEntry("d", "weak", 1, online=False, seen=10.0)
    assert device.eligible(14.9, 5.0) and not device.eligible(15.0, 5.0)
    assert replace(device, online=True).eligible(1e9, 5.0)
    assert not replace(device, online=True, tier="").eligible(10.0, 5.0)


def test_the_first_round_needs_as_many_devices_as_must_report() -> None:
    rules = replace(RULES, min_devices=1, min_reports=3)
    state, _ = hello(rules, machine.initial(VERSION, 0.0), "strong-0", "strong-1")
    assert attendance.presence(rules, state, 0.0) == attendance.Presence(2, 3)
    assert kinds(machine.step(rules, state, states.DeviceHello("weak-0", 8, 5), 1.0)[1]) == [StartRound]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [("wrong-data", "correct the rows"), ("no-memory", "give it more"), ("busy", "then start over")],
)
def test_a_run_that_every_device_declined_ends_with_their_reason(reason: str, remedy: str) -> None:
    rules, state = opened(("strong-0", "weak-0"), rounds=2)
    actions: Any = ()
    for number in (1, 2):
        assert state.round is not None and state.round.number == number
        for device, task in state.round.assignments.items():
            declined = states.TaskDeclined(device, task.nonce, reason)
            state, actions = machine.step(rules, state, declined, float(number))

    refuse = actions[-1]
    assert isinstance(refuse, RefuseRun) and f"strong-0, weak-0 ({reason})" in refuse.text
    assert remedy in refuse.text and "more rounds" not in refuse.text


def test_without_a_number_of_reports_one_is_needed() -> None:
    rules = replace(RULES, min_devices=0, min_reports=0)
    assert attendance.presence(rules, machine.initial(VERSION, 0.0), 0.0) == attendance.Presence(0, 1)
    state, _ = hello(rules, machine.initial(VERSION, 0.0), "strong-0")
    state, actions = answer(rules, state, "strong-0", accepted=False)
    assert isinstance(actions[0], AbandonRound) and "it needs 1 reports, 0 of 1 devices" in actions[0].text


def test_from_the_second_round_on_nobody_waits_for_min_devices() -> None:
    rules, state = opened()
    state, _ = answer(rules, state, "strong-0", "strong-1", "weak-0")
    for name in ("strong-1", "weak-0"):
        state, _ = machine.step(rules, state, states.DeviceStatus(name, online=False), 1.0)
    state, actions = machine.step(rules, state, states.ModelReady("w" * 64), 6.0)
    assert isinstance(actions[0], StartRound) and set(actions[0].round.assignments) == {"strong-0"}
    assert machine.wake_at(rules, replace(state, phase="waiting", round=None), 6.0) is None


@pytest.mark.parametrize(
    ("changes", "goal", "chosen"),
    [
        ({"fraction": 0.1}, 1, 1),
        ({"fraction": 0.1, "min_reports": 4}, 4, 4),
        ({"fraction": 0.3, "over_selection": 2.0}, 3, 6),
        ({"fraction": 0.9, "over_selection": 3.0}, 9, 10),
    ],
)
def test_as_many_are_chosen_as_the_goal_needs_at_least(changes: Any, goal: int, chosen: int) -> None:
    _, state = opened(tuple(f"strong-{number}" for number in range(10)), **changes)
    assert state.round is not None and (state.round.goal, len(state.round.assignments)) == (goal, chosen)


def test_a_round_has_its_deadline_from_when_it_opened() -> None:
    state, _ = machine.step(RULES, machine.initial(VERSION, 0.0), states.DeviceHello("strong-0", 8, 50), 7.0)
    assert state.round is not None and (state.round.opened, state.round.deadline) == (7.0, 17.0)
    assert state.round.position == 0 and not state.round.whole


def test_a_device_without_samples_weighs_one_at_most() -> None:
    rules = replace(RULES, weighted=True)
    state, _ = machine.step(rules, machine.initial(VERSION, 0.0), states.DeviceHello("strong-0", 8, 0), 0.0)
    assert state.round is not None and state.round.assignments["strong-0"].weight_limit == 1


def test_claims_weigh_what_is_allowed() -> None:
    rules, state = opened(weighted=True, most_samples=40)
    assert claims.weigh(rules, state, claim(rules, state, samples=1)) == 1
    assert claims.weigh(rules, state, claim(rules, state, samples=41)) == 40, "by its hello it has 50"
    rules, state = opened()
    assert claims.weigh(rules, state, claim(rules, state, samples=0)) == 1


def test_an_update_after_the_round_closes_finds_no_round_open() -> None:
    rules, state = opened(("strong-0",))
    honest = claim(rules, state)
    state, _ = answer(rules, state, "strong-0")
    with pytest.raises(UpdateRejected, match="no round is open"):
        claims.weigh(rules, state, honest)


def test_hellos_of_a_device_that_is_there_renew_what_is_known_of_it() -> None:
    state, _ = hello(RULES, machine.initial(VERSION, 0.0), "weak-0")
    state, _ = machine.step(RULES, state, states.DeviceHello("weak-0", 9, 60), 3.0)
    assert state.devices["weak-0"] == RosterEntry("weak-0", "weak", 60, online=True, seen=3.0)


def test_nobody_is_known_by_a_status_alone() -> None:
    state = machine.initial(VERSION, 0.0)
    for online in (True, False):
        assert machine.step(RULES, state, states.DeviceStatus("x", online), 3.0) == (state, ())


def test_a_status_that_is_no_news_changes_nothing() -> None:
    rules, state = opened()
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 1.0)
    assert machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 3.0) == (state, ())
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=True), 3.0)
    assert state.devices["weak-0"].seen == 3.0


def test_a_device_that_is_gone_for_good_has_no_grace() -> None:
    state, _ = hello(RULES, machine.initial(VERSION, 0.0), "weak-0")
    state, _ = machine.step(RULES, state, states.DeviceStatus("weak-0", online=False), 100.0)
    assert roster.eligible(state.devices, 101.0, RULES.offline_grace_s) == ["weak-0"]
    gone = states.DeviceStatus("weak-0", online=False, for_good=True)
    for _ in range(2):
        state, _ = machine.step(RULES, state, gone, 101.0)
        assert roster.eligible(state.devices, 101.0, RULES.offline_grace_s) == []


def test_an_outage_moves_every_clock_that_runs_and_no_other() -> None:
    rules, state = opened()
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 1.0)
    state, _ = machine.step(rules, state, states.Outage(30.0), 31.0)
    assert state.round is not None and (state.round.opened, state.round.deadline) == (0.0, 40.0)
    assert [state.devices[name].seen for name in ("strong-0", "strong-1", "weak-0")] == [0.0, 0.0, 31.0]
    waiting, _ = machine.step(RULES, machine.initial(VERSION, 5.0), states.Outage(30.0), 35.0)
    assert waiting.waiting_since == 35.0 and machine.wake_at(RULES, waiting, 35.0) == 135.0


def test_the_first_answer_stands() -> None:
    rules, state = opened()
    state, _ = machine.step(rules, state, states.Answered("strong-0", False, "why"), 1.0)
    after, actions = machine.step(rules, state, states.Answered("strong-0", True), 1.0)
    assert after == state and not actions and state.round is not None
    task = state.round.assignments["strong-0"]
    assert (task.status, task.reason) == ("rejected", "why")
    assert machine.step(rules, state, states.Answered("nobody", True), 1.0) == (state, ())
    # Nor that of a task that is over: the round may have ended while its device's update was refused.
    old = states.Answered("strong-1", False, nonce="of the round before")
    assert machine.step(rules, state, old, 1.0) == (state, ())


@pytest.mark.parametrize("event", [states.ModelReady("w" * 64), states.ModelReady("w" * 64, failed="why")])
def test_a_model_that_no_round_waits_for_changes_nothing(event: states.ModelReady) -> None:
    rules, state = opened()
    assert machine.step(rules, state, event, 1.0) == (state, ())


def test_while_the_model_is_computed_answers_and_time_change_nothing() -> None:
    rules, state = opened(("strong-0", "strong-1"), min_devices=2, fraction=0.5, over_selection=2.0)
    assert state.round is not None
    late = state.round.assignments["strong-1"]
    state, actions = answer(rules, state, "strong-0")
    assert kinds(actions) == [CloseRound] and machine.wake_at(rules, state, 1.0) is None  # type: ignore[arg-type]
    for event in (states.Tick(), states.TaskDeclined("strong-1", late.nonce, "busy")):
        assert machine.step(rules, state, event, 1e6) == (state, ())


def test_what_a_round_takes_over_from_the_one_before() -> None:
    rules, state = opened(("strong-0",))
    state, _ = answer(rules, state, "strong-0")
    state, _ = machine.step(rules, state, states.ModelReady("w" * 64), 4.0)
    assert (state.next_round, state.model_version, state.position, state.base) == (2, "w" * 64, 1, 1)
    assert (state.waiting_since, state.refused) == (4.0, 0)


@pytest.mark.parametrize(
    ("rounds", "opening", "end"), [(1, 1, RefuseRun), (2, 1, FinishRun), (1, 0, FinishRun), (2, 2, RefuseRun)]
)
def test_a_run_of_openings_trains_nothing(rounds: int, opening: int, end: type) -> None:
    rules, state = begun(rounds - 1, rounds=rounds, opening=opening)
    for event in accepted(*NAMES):
        state, actions = machine.step(rules, state, event, 1.0)
    state, actions = machine.step(rules, state, states.ModelReady(VERSION), 1.0)
    assert kinds(list(actions)) == [end] and state.phase == "done"


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_in_which_no_round_closed_has_trained_nothing(whole: bool) -> None:
    rules, state = begun(whole=whole, rounds=1, opening=0)
    state, actions = machine.step(rules, state, states.Tick(), 100.0)
    assert kinds(list(actions)) == [AbandonRound, RefuseRun]
    assert "all 1 rounds are over" in actions[1].text and "only begin" not in actions[1].text  # type: ignore[union-attr]


@pytest.mark.parametrize("rounds", [2, 10])
def test_a_run_whose_updates_are_not_finite_has_diverged(rounds: int) -> None:
    """After three rounds in a row, or at the end."""
    rules, state = begun(whole=False, rounds=rounds, opening=0)
    actions: states.Actions = ()
    why = f"NaN: {DIVERGED}"
    while state.phase == "open":
        for name in NAMES:
            refused = states.Answered(name, accepted=False, reason=why)
            state, actions = machine.step(rules, state, refused, 1.0)
        assert why in actions[0].text and "deadline" not in actions[0].text  # type: ignore[union-attr]
    refuse = actions[-1]
    assert isinstance(refuse, RefuseRun) and isinstance(refuse.error, DivergedError)
    assert state.next_round == min(rounds, 3) + 1


@pytest.mark.parametrize("rounds", [5, 20])
def test_devices_that_are_away_hide_no_divergence(rounds: int) -> None:
    """One of three is away in each round, and in every third round all are."""
    rules, state = begun(whole=False, rounds=rounds, opening=0)
    actions: list[Any] = []
    while (current := state.round) is not None:
        there = NAMES[: -1 if current.number % 3 else 0]
        diverged = [states.Answered(name, accepted=False, reason=DIVERGED) for name in there]
        state, _ = play(rules, state, *diverged, now=current.opened)
        state, actions = play(rules, state, states.Tick(), now=current.deadline)
    refuse = actions[-1]
    assert isinstance(refuse, RefuseRun) and isinstance(refuse.error, DivergedError)
    assert state.next_round == 5


def test_asynchronous_rounds_end_when_all_online_devices_diverge() -> None:
    rules, state = begun(whole=False, rounds=9, opening=0, buffer=2, concurrency=3)
    state, _ = play(rules, state, *left("c"), now=1.0)
    state, _ = play(rules, state, states.Tick(), now=7.0)
    diverged = [states.Answered(name, accepted=False, reason=DIVERGED) for name in ("a", "b")]
    state, actions = play(rules, state, *diverged, now=8.0)
    assert isinstance(actions[-1], RefuseRun) and isinstance(actions[-1].error, DivergedError)


def test_one_device_that_sends_nan_while_others_are_away_ends_no_run() -> None:
    rules, state = begun(whole=False, rounds=9, opening=0)
    for _ in range(6):
        assert state.round is not None
        now = state.round.deadline
        nan = states.Answered("a", accepted=False, reason=DIVERGED)
        state, _ = play(rules, state, nan, states.Tick(), now=now)
    assert state.phase == "open"


def test_a_message_names_twenty_devices_and_counts_the_others() -> None:
    names = {f"d{number:02}": "why" for number in range(21)}
    assert attendance.format_devices(names).endswith("d19 (why) and 1 more")
    del names["d20"]
    assert (
        attendance.format_devices(names).endswith(", d19 (why)")
        and attendance.format_devices({"a": "b"}) == "a (b)"
    )


def test_grace_runs_from_the_later_of_both_instants() -> None:
    rules, device = replace(RULES, offline_grace_s=5), RosterEntry("d", "weak", 1, online=False, seen=7.0)
    assert attendance.grace_ends(rules, device, 3.0) == 12.0
    assert attendance.grace_ends(rules, device, 9.0) == 14.0
    assert attendance.grace_ends(rules, None, 9.0) == 14.0


def test_a_whole_round_ends_for_the_first_offline_device() -> None:
    rules, state = begun(1)
    state, _ = machine.step(rules, state, left("a")[0], 10.0)
    state, _ = machine.step(rules, state, left("b")[0], 12.0)
    assert state.round is not None and attendance.given_up_at(rules, state, state.round) == 15.0
    partial, state = begun(1, absent="partial")
    for event, now in ((accepted("c")[0], 1.0), (left("a")[0], 10.0), (left("b")[0], 12.0)):
        state, _ = machine.step(partial, state, event, now)
    assert state.round is not None and attendance.given_up_at(partial, state, state.round) == 17.0
