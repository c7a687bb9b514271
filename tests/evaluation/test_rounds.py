"""Evaluation rounds as the coordinator sees them: their numbers, their devices, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgefl_server.coordinator import attendance, machine, states
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import EvaluationSchedule, Rules, State

RULES = Rules(
    run="run",
    seed=3,
    rounds=4,
    tiers=(TierRule("all", ("d-*",)),),
    deadline_s=10,
    min_devices=6,
    min_reports=2,
)
NAMES = tuple(f"d-{number}" for number in range(6))


@pytest.mark.parametrize(
    ("every", "rounds", "evaluations"),
    [(5, 10, [6, 12]), (5, 12, [6, 12, 15]), (1, 3, [2, 4, 6]), (7, 3, [4]), (0, 3, [])],
)
def test_evaluation_rounds_come_between_training_rounds_and_at_the_end(
    every: int, rounds: int, evaluations: list[int]
) -> None:
    rules = replace(RULES, rounds=rounds, evaluation=EvaluationSchedule(every))
    numbers = range(1, rules.last_round + 1)
    assert [number for number in numbers if rules.is_evaluation(number)] == evaluations
    assert rules.last_round == rounds + len(evaluations)
    training = [number for number in numbers if number not in evaluations]
    assert [rules.trained_rounds(number) for number in training] == list(range(1, rounds + 1))
    assert rules.last_training == training[-1]
    more = replace(rules, evaluation=EvaluationSchedule(every, extra=2))
    assert more.last_round == rules.last_round + 2
    assert more.is_evaluation(more.last_round) and more.trained_rounds(more.last_round) == rounds


def play(
    rules: Rules, answers: dict[int, int] | None = None
) -> tuple[State, list[states.OpenRound], list[states.Action]]:
    """Return the state at the end, all rounds and all actions, if each device answers (or so many in these rounds)."""
    state, rounds, every, now = machine.initial("v0", 0.0), [], list[states.Action](), 0.0
    queue: list[states.Event] = [states.DeviceHello(name, 8, 50) for name in NAMES]
    while queue:
        state, actions = machine.step(rules, state, queue.pop(0), now)
        every += actions
        for action in actions:
            if isinstance(action, states.StartRound):
                rounds.append(action.round)
                count = (answers or {}).get(action.round.number, len(NAMES))
                queue += [states.Answered(name, True) for name in sorted(action.round.assignments)[:count]]
                if count < len(action.round.assignments):
                    now = action.round.deadline
                    queue.append(states.Tick())
            if isinstance(action, states.CloseRound):
                version = state.model_version if action.round.evaluates else f"v{action.round.number}"
                queue = [states.ModelReady(version)]
    return state, rounds, every


def test_an_evaluation_completes_no_exchange_and_changes_no_model() -> None:
    rules = replace(RULES, evaluation=EvaluationSchedule(every=2, devices=3), over_selection=1.5)
    state, rounds, actions = play(rules)
    assert [opened.evaluates for opened in rounds] == [False, False, True, False, False, True]
    assert [opened.position for opened in rounds] == [0, 1, states.EVALUATION, 2, 3, states.EVALUATION]
    assert [opened.goal for opened in rounds] == [6, 6, 3, 6, 6, 3]
    assert [len(opened.assignments) for opened in rounds] == [6, 6, 5, 6, 6, 5]
    assert rounds[2].assignments.keys() != rounds[5].assignments.keys(), "devices are drawn anew"
    assert [opened.model_version for opened in rounds] == ["v0", "v1", "v2", "v2", "v4", "v5"]
    assert (state.phase, state.position, state.base, state.model_version) == ("done", 4, 5, "v5")
    assert isinstance(actions[-1], states.FinishRun)


@pytest.mark.parametrize(("reports", "closes"), [(1, True), (0, False)])
def test_an_evaluation_takes_what_comes_and_never_ends_the_run(reports: int, closes: bool) -> None:
    rules = replace(RULES, evaluation=EvaluationSchedule(every=2))
    state, _, actions = play(rules, {3: reports})
    abandoned = [action.round.number for action in actions if isinstance(action, states.AbandonRound)]
    assert abandoned == ([] if closes else [3])
    assert (state.phase, state.position) == ("done", 4)


def test_a_round_that_gathers_takes_all_devices_that_connect_in_time() -> None:
    rules = replace(
        RULES, rounds=0, min_devices=1, min_reports=1, gather_s=10.0, evaluation=EvaluationSchedule(extra=1)
    )
    state = machine.initial("v0", 0.0)
    for now, name in enumerate(NAMES):
        state, actions = machine.step(rules, state, states.DeviceHello(name, 8, 50), float(now))
        assert not [each for each in actions if isinstance(each, states.StartRound)]
    assert attendance.opens_at(rules, state, 6.0) == 10.0
    state, (started,) = machine.step(rules, state, states.Tick(), 10.0)
    assert isinstance(started, states.StartRound)
    assert started.round.assignments.keys() == set(NAMES) and started.round.evaluates


def test_an_evaluation_waits_for_no_member_of_an_algorithm_that_needs_all() -> None:
    rules = replace(
        RULES, rounds=1, whole=True, absent="refuse", min_reports=6, evaluation=EvaluationSchedule(every=1)
    )
    state, _, _ = play(replace(rules, evaluation=EvaluationSchedule()))
    state, _ = machine.step(rules, replace(state, phase="waiting"), states.Hold(True), 0.0)
    for name in NAMES[1:]:
        state, _ = machine.step(rules, state, states.DeviceStatus(name, online=False), 0.0)
    later = rules.offline_grace_s + 1
    state, actions = machine.step(rules, state, states.Hold(False), later)
    [opened] = [action.round for action in actions if isinstance(action, states.StartRound)]
    assert opened.evaluates and opened.assignments.keys() == {NAMES[0]} and opened.goal == 1
    state, actions = machine.step(rules, state, states.Answered(NAMES[0], True), later)
    assert isinstance(actions[0], states.CloseRound)


def test_an_evaluation_neither_suspends_devices_nor_forgives_them() -> None:
    rules = replace(RULES, strikes=2, evaluation=EvaluationSchedule(every=1))
    state, _, _ = play(replace(rules, rounds=1, evaluation=EvaluationSchedule()))
    before = replace(state, phase="waiting", strikes={NAMES[0]: 1}, next_round=2)
    state, actions = machine.step(rules, before, states.Tick(), 0.0)
    assert state.round is not None and state.round.evaluates
    for number, name in enumerate(NAMES):
        state, actions = machine.step(rules, state, states.Answered(name, number != 1), 0.0)
    assert isinstance(actions[-1], states.CloseRound)
    assert state.strikes == {NAMES[0]: 1} and state.record == before.record


def test_an_evaluation_without_a_report_says_so() -> None:
    rules = replace(RULES, evaluation=EvaluationSchedule(every=2))
    _, _, actions = play(rules, {3: 0})
    [abandoned] = [action for action in actions if isinstance(action, states.AbandonRound)]
    assert "no device sent a report" in abandoned.text and "min_reports" not in abandoned.text
