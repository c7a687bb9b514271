"""The coordinator as a pure machine: events in, state and actions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_server.coordinator import claims, machine, states
from edgefl_server.coordinator.roster import TierRule, sample, share, task_nonce, task_seed, tier_of
from edgefl_server.coordinator.states import (
    AbandonRound,
    Answered,
    CloseRound,
    FinishRun,
    ModelReady,
    Rules,
    SendTask,
    StartRound,
    State,
)
from tests.support.errors import UpdateRejected, refuses

TIERS = (TierRule("strong", ("strong-*",), 8), TierRule("moderate", (), 4), TierRule("weak", ("weak-*",), 1))
RULES = Rules(run="run", seed=3, rounds=3, tiers=TIERS, deadline_s=10, ready_timeout_s=100, offline_grace_s=5)
VERSION = "v" * 64


def hello(rules: Rules, state: State, *names: str, now: float = 0.0) -> tuple[State, list[states.Action]]:
    actions: list[states.Action] = []
    for name in names:
        state, more = machine.step(rules, state, states.DeviceHello(name, 8, 50), now)
        actions += more
    return state, actions


def opened(
    names: tuple[str, ...] = ("strong-0", "strong-1", "weak-0"), **changes: Any
) -> tuple[Rules, State]:
    rules = replace(RULES, **{"min_devices": len(names), **changes})
    state, actions = hello(rules, machine.initial(VERSION, 0.0), *names)
    assert isinstance(actions[-1], StartRound) and state.phase == "open"
    return rules, state


def answer(
    rules: Rules, state: State, *names: str, accepted: bool = True, now: float = 1.0
) -> tuple[State, list[states.Action]]:
    actions: list[states.Action] = []
    for name in names:
        state, more = machine.step(rules, state, Answered(name, accepted), now)
        actions += more
    return state, actions


def claim(rules: Rules, state: State, **changes: Any) -> claims.UpdateClaim:
    assert state.round is not None
    task = state.round.assignments["strong-0"]
    honest = claims.UpdateClaim("strong-0", rules.run, state.round.number, task.nonce, task.tier, VERSION, 50)
    return replace(honest, **changes)


def test_the_first_round_waits_for_min_devices() -> None:
    rules = replace(RULES, min_devices=2)
    state, actions = hello(rules, machine.initial(VERSION, 0.0), "strong-0")
    assert state.phase == "waiting" and not actions
    state, actions = hello(rules, state, "weak-0")
    assert isinstance(actions[0], StartRound) and set(actions[0].round.assignments) == {"strong-0", "weak-0"}


def test_after_the_ready_timeout_min_reports_devices_are_enough() -> None:
    rules = replace(RULES, min_devices=9, min_reports=1)
    state, _ = hello(rules, machine.initial(VERSION, 0.0), "strong-0")
    wake = machine.wake_at(rules, state, 0.0)
    assert wake == 100.0
    state, actions = machine.step(rules, state, states.Tick(), wake)
    assert isinstance(actions[0], StartRound)


def test_waiting_has_no_deadline_once_the_timeout_has_passed() -> None:
    assert machine.wake_at(RULES, machine.initial(VERSION, 0.0), 100.0) is None


def test_a_round_closes_when_all_reported_and_the_next_opens() -> None:
    rules, state = opened()
    state, actions = answer(rules, state, "strong-0", "strong-1")
    assert state.phase == "open" and not actions
    state, actions = answer(rules, state, "weak-0")
    assert state.phase == "closing" and isinstance(actions[0], CloseRound)
    state, actions = machine.step(rules, state, ModelReady("w" * 64), 2.0)
    assert isinstance(actions[0], StartRound) and actions[0].round.number == 2
    assert state.round is not None and state.round.model_version == "w" * 64


def test_over_selection_closes_at_the_goal() -> None:
    names = tuple(f"strong-{n}" for n in range(10))
    rules, state = opened(names, fraction=0.5, over_selection=1.5)
    assert state.round is not None and state.round.goal == 5 and len(state.round.assignments) == 8
    chosen = sorted(state.round.assignments)
    state, actions = answer(rules, state, *chosen[:5])
    assert isinstance(actions[-1], CloseRound) and len(actions[-1].round.with_status("accepted")) == 5


def test_at_the_deadline_a_round_closes_with_what_it_has() -> None:
    rules, state = opened()
    state, _ = answer(rules, state, "weak-0")
    deadline = machine.wake_at(rules, state, 1.0)
    assert deadline == 10.0
    assert machine.step(rules, state, states.Tick(), deadline - 0.1)[1] == ()
    state, actions = machine.step(rules, state, states.Tick(), deadline)
    assert isinstance(actions[0], CloseRound)


def test_too_few_reports_at_the_deadline_abandon_the_round() -> None:
    rules, state = opened(min_reports=2)
    state, _ = answer(rules, state, "weak-0")
    state, actions = machine.step(rules, state, states.Tick(), 10.0)
    assert isinstance(actions[0], AbandonRound) and "1 of 3" in actions[0].text
    assert isinstance(actions[1], StartRound) and actions[1].round.number == 2
    assert actions[1].round.model_version == VERSION


def test_when_all_are_refused_the_round_ends_before_its_deadline() -> None:
    rules, state = opened()
    state, _ = answer(rules, state, "strong-0", accepted=False)
    state, actions = answer(rules, state, "strong-1", "weak-0", accepted=False)
    assert isinstance(actions[0], AbandonRound) and "every device has answered" in actions[0].text


def test_a_vanished_device_blocks_until_the_deadline_only() -> None:
    rules, state = opened()
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 1.0)
    state, actions = answer(rules, state, "strong-0", "strong-1")
    assert state.phase == "open" and not actions
    state, actions = machine.step(rules, state, states.Tick(), 10.0)
    state, actions = machine.step(rules, state, ModelReady("w" * 64), 10.0)
    assert isinstance(actions[0], StartRound) and set(actions[0].round.assignments) == {
        "strong-0",
        "strong-1",
    }


def test_a_round_waits_no_longer_than_the_grace_for_offline_devices() -> None:
    rules, state = opened(deadline_s=100)
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 1.0)
    state, _ = answer(rules, state, "strong-0")
    assert machine.wake_at(rules, state, 1.0) == 100.0, "another device is online and has not answered"
    state, actions = answer(rules, state, "strong-1", now=2.0)
    assert not actions and machine.wake_at(rules, state, 2.0) == 6.0
    back, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=True), 3.0)
    assert machine.wake_at(rules, back, 3.0) == 100.0
    assert machine.step(rules, state, states.Tick(), 5.9)[1] == ()
    state, actions = machine.step(rules, state, states.Tick(), 6.0)  # type: ignore[assignment]
    assert isinstance(actions[0], CloseRound)


def test_too_few_reports_wait_for_offline_devices_until_the_deadline() -> None:
    rules, state = opened(deadline_s=100, min_reports=3)
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 1.0)
    state, _ = answer(rules, state, "strong-0", "strong-1")
    assert machine.wake_at(rules, state, 2.0) == 100.0
    assert machine.step(rules, state, states.Tick(), 50.0)[1] == ()


def test_offline_devices_have_the_grace_after_an_outage_or_a_restart() -> None:
    rules, state = opened(deadline_s=100)
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 1.0)
    state, _ = answer(rules, state, "strong-0", "strong-1", now=2.0)
    delayed, actions = machine.step(rules, state, states.Outage(30.0), 33.0)
    assert not actions and machine.wake_at(rules, delayed, 33.0) == 36.0
    assert state.round is not None
    restarted = replace(state, round=replace(state.round, deadline=60.0 + 100))
    assert machine.step(rules, restarted, states.Tick(), 60.0)[1] == ()
    assert machine.wake_at(rules, restarted, 60.0) == 65.0


def test_a_device_that_blinks_is_still_selected() -> None:
    rules, state = opened()
    state, _ = answer(rules, state, "strong-0", "strong-1")
    state, _ = machine.step(rules, state, states.DeviceStatus("strong-0", online=False), 1.0)
    state, _ = answer(rules, state, "weak-0")
    state, actions = machine.step(rules, state, ModelReady("w" * 64), 5.9)
    assert isinstance(actions[0], StartRound) and "strong-0" in actions[0].round.assignments


def test_a_hello_repeats_the_task_until_it_is_answered() -> None:
    rules, state = opened()
    state, actions = hello(rules, state, "strong-1", now=1.0)
    assert [type(action) for action in actions] == [SendTask]
    assert state.round is not None and actions[0].assignment == state.round.assignments["strong-1"]  # type: ignore[union-attr]
    state, _ = answer(rules, state, "strong-1")
    assert hello(rules, state, "strong-1", now=2.0)[1] == []


def test_a_retained_hello_of_a_device_that_is_gone_does_not_bring_it_back() -> None:
    gone = states.DeviceHello("strong-0", 8, 50, online=False)
    state, actions = machine.step(RULES, machine.initial(VERSION, 0.0), gone, 100.0)
    assert state.phase == "waiting" and not actions
    assert not state.devices["strong-0"].online and state.devices["strong-0"].seen == 0.0
    state, actions = machine.step(RULES, state, states.DeviceStatus("strong-0", online=True), 101.0)  # type: ignore[assignment]
    assert isinstance(actions[0], StartRound)


def test_a_retained_hello_does_not_renew_the_grace_of_a_device_that_left() -> None:
    rules, state = opened()
    state, _ = machine.step(rules, state, states.DeviceStatus("weak-0", online=False), 1.0)
    state, _ = hello(rules, state, "weak-0", now=5.0)
    assert not state.devices["weak-0"].online and state.devices["weak-0"].seen == 1.0


def test_after_the_last_round_it_is_done() -> None:
    rules, state = opened(("strong-0",), rounds=1)
    state, _ = answer(rules, state, "strong-0")
    state, actions = machine.step(rules, state, ModelReady("w" * 64), 1.0)
    assert state.phase == "done" and isinstance(actions[0], FinishRun)
    assert machine.step(rules, state, states.Tick(), 9e9) == (state, ())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "strong-9"}, "unknown-device"),
        ({"device": "late"}, "not-selected"),
        ({"round": 2}, "closed-round"),
        ({"nonce": "?"}, "wrong-nonce"),
        ({"run": "other"}, "wrong-run"),
        ({"tier": "weak"}, "wrong-tier"),
        ({"model_version": "0" * 64}, "wrong-model"),
    ],
)
def test_a_claim_that_is_not_the_devices_task_is_refused(changes: dict[str, Any], reason: str) -> None:
    rules, state = opened()
    state, _ = hello(rules, state, "late")
    with refuses(UpdateRejected, reason=reason):
        claims.weigh(rules, state, claim(rules, state, **changes))


def test_weights_are_one_or_the_samples_that_the_device_has() -> None:
    rules, state = opened()
    assert claims.weigh(rules, state, claim(rules, state, samples=10**9)) == 1
    rules, state = opened(weighted=True)
    assert claims.weigh(rules, state, claim(rules, state, samples=50)) == 50
    for samples in (0, 51):
        with refuses(UpdateRejected, samples=samples, reason="wrong-samples"):
            claims.weigh(rules, state, claim(rules, state, samples=samples))


def test_a_tier_is_given_by_name_then_by_memory() -> None:
    assert tier_of(TIERS, "weak-7", 1 << 40) == "weak"
    assert tier_of(TIERS, "phone", 9) == "strong"
    assert tier_of(TIERS, "phone", 5) == "moderate"
    assert tier_of(TIERS, "phone", 0) == ""
    assert tier_of((TierRule("one"), TierRule("two")), "phone", 0) == "one"


def test_a_device_without_a_tier_is_never_selected() -> None:
    small = states.DeviceHello("phone", 0, 5)
    state, actions = machine.step(RULES, machine.initial(VERSION, 0.0), small, 0.0)
    assert state.phase == "waiting" and not actions


def test_tasks_follow_from_the_seed() -> None:
    _, one = opened()
    _, two = opened()
    assert one == two
    assert task_seed(1, 2, "a") == task_seed(1, 2, "a") != task_seed(1, 3, "a")
    assert task_nonce("r", 1, 2, "a") != task_nonce("q", 1, 2, "a")
    assert 0 <= task_seed(1, 2, "a") < 2**63


@given(
    st.sets(st.text("abcdef", min_size=1), min_size=1, max_size=40), st.floats(0.01, 1.0), st.integers(0, 99)
)
def test_a_sample_is_a_share_of_the_devices(names: set[str], fraction: float, seed: int) -> None:
    count = share(fraction, len(names))
    chosen = sample(seed, 1, names, count)
    assert len(set(chosen)) == count and set(chosen) <= names
    assert chosen == sample(seed, 1, sorted(names, reverse=True), count)
    assert share(0.1, 30) == 3 and share(1.0, 7) == 7


EVENTS = st.lists(
    st.one_of(
        st.builds(
            states.DeviceHello, st.sampled_from(["strong-0", "weak-0", "weak-1"]), st.just(8), st.just(50)
        ),
        st.builds(states.DeviceStatus, st.sampled_from(["strong-0", "weak-0", "x"]), st.booleans()),
        st.builds(Answered, st.sampled_from(["strong-0", "weak-0", "weak-1"]), st.booleans()),
        st.just(states.Tick()),
        st.builds(states.Outage, st.floats(0, 5)),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 2), st.integers(0, 4))
def test_rounds_open_in_order_and_end_once(events: list[Any], reports: int, pace: int) -> None:
    rules = replace(RULES, min_reports=reports, rounds=4)
    state, now, open_now, last = machine.initial(VERSION, 0.0), 0.0, 0, 0
    for event in events:
        now += pace
        state, actions = machine.step(rules, state, event, now)
        pending = list(actions)
        while pending:
            match pending.pop(0):
                case StartRound(round=begun):
                    assert not open_now and begun.number == last + 1 <= rules.rounds
                    assert begun.goal <= len(begun.assignments)
                    open_now = last = begun.number
                case CloseRound(round=ended):
                    assert ended.number == open_now and len(ended.with_status("accepted")) >= reports
                    open_now = 0
                    state, more = machine.step(rules, state, ModelReady(VERSION), now)
                    pending += more
                case AbandonRound(round=ended):
                    assert ended.number == open_now and len(ended.with_status("accepted")) < reports
                    open_now = 0
        assert (state.phase == "open") == bool(open_now)
        assert state.phase != "open" or state.round is None or now < state.round.deadline
