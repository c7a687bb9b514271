"""A candidate on trial: who tries it, for how long, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_server.coordinator import machine, rollout
from edgefl_server.coordinator.fleet import Devices
from edgefl_server.coordinator.record import Turnout
from edgefl_server.coordinator.rollout import ReportMedians, RolloutRules, Trial, TrialArm
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.states import Answered, ModelReady, State, Tick, TrialCounted
from tests.server.coordinator.test_selection import RULES, fleet, names

RULE = RolloutRules(
    seed=5,
    tiers=("strong", "weak"),
    share=0.25,
    rounds=3,
    most_loss_increase=0.1,
    most_failures=0.2,
    most_slowdown=1.5,
)
SAME = {"strong": ReportMedians(1.0, 100.0), "strong@candidate": ReportMedians(1.0, 100.0)}
ALL_CAME = {"strong": Turnout(6, 0), "strong@candidate": Turnout(2, 0)}


def trying(state: State) -> set[str]:
    assert state.round is not None
    return {name for name, task in state.round.assignments.items() if task.tier.endswith("@candidate")}


@given(st.integers(0, 99), st.floats(0.01, 0.99), st.integers(0, 30), st.integers(0, 30))
def test_shares_are_rounded_up(seed: int, share: float, strong: int, weak: int) -> None:
    rule = replace(RULE, seed=seed, share=share)
    devices = Devices(
        {name: RosterEntry(name, name.partition("-")[0], 1, True, 0.0) for name in names(strong, weak)}
    )
    trial = rollout.begin_trial(rule, 1, devices, devices)
    for tier, count in (("strong", strong), ("weak", weak)):
        own = [each for each in devices.values() if each.tier == tier]
        tried = sum(rollout.tier_for(rule, trial, each) == f"{tier}@candidate" for each in own)
        assert tried == max(0, min(-int(-share * count // 1), count - 1))


def test_the_same_devices_try_it_until_the_trial_is_judged() -> None:
    rules = replace(RULES, rollout=RULE)
    state = fleet(rules, *names(8, 4))
    seen = []
    for number in range(1, 5):
        state, _ = machine.step(rules, state, Tick(), float(number))
        assert state.round is not None and state.trial is not None and state.trial.began == 1
        seen.append(trying(state))
        for name in state.round.assignments:
            state, _ = machine.step(rules, state, Answered(name, True), float(number))
        turnout = state.record.turnout(number)
        if not state.trial.verdict:
            assert turnout["strong@candidate"] == Turnout(2, 0) and turnout["weak"] == Turnout(3, 0)
            trial = rollout.count_round(RULE, state.trial, turnout, SAME)
            state, _ = machine.step(rules, state, TrialCounted(trial), float(number))
        state, _ = machine.step(rules, state, ModelReady("w" * 64), float(number))
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 3
    assert state.trial is not None and state.trial.verdict == "promoted" and seen[3] == set(names(8, 4))
    assert state.record.lost_share("weak") == 0.0
    back = msgspec.structs.replace(state.trial, verdict="taken back")
    assert rollout.tier_for(RULE, back, state.devices["weak-0"]) == "weak"


def test_no_other_tier_tries_it() -> None:
    rules = replace(RULES, rollout=replace(RULE, tiers=("weak",), share=0.9))
    state, _ = machine.step(rules, fleet(rules, *names(8, 4)), Tick(), 0.0)
    assert {name.partition("-")[0] for name in trying(state)} == {"weak"} and len(trying(state)) == 3


def after(rounds: int, reports: dict[str, ReportMedians], turnout: dict[str, Turnout] = ALL_CAME) -> Trial:
    trial = Trial(1, {})
    for _ in range(rounds):
        assert not trial.verdict, "it was judged before its time"
        trial = rollout.count_round(RULE, trial, turnout, reports)
    return trial


@pytest.mark.parametrize(
    ("candidate", "verdict", "told"),
    [
        (ReportMedians(1.0, 100.0), "promoted", "loss 1, 100 ms before"),
        (ReportMedians(1.09, 149.0), "promoted", "loss 1.09"),
        (ReportMedians(1.2, 100.0), "taken back", "most_loss_increase"),
        (ReportMedians(None, 100.0), "taken back", "no finite loss"),
        (ReportMedians(0.5, 151.0), "taken back", "most_slowdown"),
        (ReportMedians(0.5, None), "promoted", "loss 0.5 with it"),
    ],
)
def test_a_trial_is_judged_by_loss_and_time(candidate: ReportMedians, verdict: str, told: str) -> None:
    trial = after(3, {**SAME, "strong@candidate": candidate})
    assert trial.verdict == verdict and told in trial.text


def test_one_that_fails_often_is_taken_back_as_soon_as_it_is_known() -> None:
    failing = {"strong": Turnout(40, 2), "strong@candidate": Turnout(5, 2)}
    trial = after(2, SAME, failing)
    assert trial.rounds == 2 and trial.verdict == "taken back" and "4 of 10 tasks" in trial.text
    few = {"strong": Turnout(3, 0), "strong@candidate": Turnout(1, 1)}
    assert after(3, SAME, few).verdict == "taken back", "three tasks are few, and all there are"
    as_ever = {"strong": Turnout(40, 16), "strong@candidate": Turnout(5, 2)}
    assert after(3, SAME, as_ever).verdict == "promoted"


def test_what_nobody_tried_is_not_promoted() -> None:
    trial = after(3, {"strong": ReportMedians(1.0, 100.0)}, {"strong": Turnout(6, 0)})
    assert trial.verdict == "taken back" and "nothing can be compared" in trial.text


def test_negative_losses_are_compared_by_how_far_they_are_from_0() -> None:
    worse = {"strong": ReportMedians(-2.0, None), "strong@candidate": ReportMedians(-1.7, None)}
    assert after(3, worse).verdict == "taken back"
    near = {"strong": ReportMedians(-2.0, None), "strong@candidate": ReportMedians(-1.9, None)}
    assert after(3, near).verdict == "promoted"


def test_a_trial_survives_as_json() -> None:
    trial = after(2, SAME)
    assert msgspec.convert(msgspec.to_builtins(trial), Trial) == trial
    assert trial.arms["strong@candidate"] == TrialArm(4, 0, (ReportMedians(1.0, 100.0),) * 2)
