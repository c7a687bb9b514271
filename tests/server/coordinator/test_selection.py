"""Which devices a round may select, whom it takes of them, how many, and when it may expect to have its reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import LINK, POWER, THERMAL, Conditions, known_conditions
from edgefl_server.coordinator import attendance, machine, selection, states
from edgefl_server.coordinator.eligibility import SelectionRules, unfit
from edgefl_server.coordinator.record import Participation, ParticipationRecord, Turnout
from edgefl_server.coordinator.roster import TierRule, sample, share
from edgefl_server.coordinator.states import (
    Answered,
    DeviceHello,
    ModelReady,
    Rules,
    State,
    TaskDeclined,
    Tick,
)

TIERS = (TierRule("strong", ("strong-*",)), TierRule("weak", ("weak-*",)))
RULES = Rules(
    run="run", seed=3, rounds=1000, tiers=TIERS, deadline_s=10, offline_grace_s=0, ready_timeout_s=5
)
WORDS = st.sampled_from(("", *POWER, *LINK, *THERMAL, "nuclear"))
CONDITIONS = st.builds(
    Conditions, power=WORDS, link=WORDS, thermal=WORDS, available=st.sampled_from((None, True, False))
)


def fleet(rules: Rules, *names: str, conditions: Conditions | None = None) -> State:
    """The state before the first round, whose devices have said hello."""
    state = machine.initial("v" * 64, 0.0)
    for name in names:
        hello = DeviceHello(name, 8, 50, conditions=conditions or Conditions())
        state, _ = machine.step(rules, state, hello, 0.0, settle=False)
    return state


def names(strong: int, weak: int) -> list[str]:
    return [*(f"strong-{n}" for n in range(strong)), *(f"weak-{n}" for n in range(weak))]


def rounds(
    rules: Rules, state: State, count: int, answers: Callable[[str], bool] = lambda _: True
) -> tuple[State, list[list[str]]]:
    """So many rounds, of whose devices those answer for which ``answers`` holds: the others decline. Whom each selected."""
    now, selected = 0.0, []
    for _ in range(count):
        state, _ = machine.step(rules, state, Tick(), now)
        assert state.round is not None, "no round opened"
        tasks = list(state.round.assignments.values())
        selected.append([task.device for task in tasks])
        for task in tasks:
            declined = TaskDeclined(task.device, task.nonce, "policy")
            said = Answered(task.device, True) if answers(task.device) else declined
            state, _ = machine.step(rules, state, said, now)
        if state.phase == "closing":
            state, _ = machine.step(rules, state, ModelReady("w" * 64), now)
        now += 1.0
    return state, selected


# -- eligibility ------------------------------------------------------------------------------------------------


@given(CONDITIONS, st.sampled_from(("out", "in")))
def test_a_device_is_selected_if_it_meets_all_conditions(told: Conditions, unknown: str) -> None:
    conditions = known_conditions(told)
    for power, link, thermal in product(("any", "charging"), ("any", "unmetered"), ("any", "warm", "cool")):
        rule = SelectionRules(power=power, link=link, thermal=thermal, unknown=unknown)  # type: ignore[arg-type]
        lenient = [""] if unknown == "in" else []
        heats = {"any": ["", *THERMAL], "warm": ["cool", "warm", *lenient], "cool": ["cool", *lenient]}
        expected = (
            (power == "any" or conditions.power in ("charging", *lenient))
            and (link == "any" or conditions.link in ("unmetered", *lenient))
            and conditions.thermal in heats[thermal]
            and conditions.available is not False
        )
        assert (unfit(rule, conditions) == "") is expected


def test_unknown_values_are_dropped_and_equal_conditions_shared() -> None:
    assert known_conditions(Conditions(power="nuclear", thermal="hot")) == Conditions(thermal="hot")
    assert known_conditions(Conditions(link="metered")) is known_conditions(
        Conditions(power="wind", link="metered")
    )


def test_a_round_selects_a_device_from_when_it_charges_until_it_does_not() -> None:
    rules = replace(RULES, selection=SelectionRules(power="charging"))
    state = fleet(rules, "strong-0", conditions=Conditions(power="charging"))
    state, _ = machine.step(
        rules, state, DeviceHello("strong-1", 8, 50, True, Conditions(power="battery")), 0.0
    )
    assert state.round is not None and set(state.round.assignments) == {"strong-0"}
    assert "battery" in attendance.find_unreported(rules, state, state.round, 0.0)["strong-1"]

    for name, power in (("strong-0", "battery"), ("strong-1", "charging")):
        state, _ = machine.step(rules, state, DeviceHello(name, 8, 50, True, Conditions(power=power)), 1.0)
    state, _ = machine.step(rules, state, Answered("strong-0", True), 2.0)
    state, _ = machine.step(rules, state, ModelReady("w" * 64), 2.0)
    assert state.round is not None and set(state.round.assignments) == {"strong-1"}


def test_who_waits_is_told_how_many_are_left_out() -> None:
    rules = replace(RULES, selection=SelectionRules(link="unmetered"))
    state = fleet(rules, *names(2, 1), conditions=Conditions(link="metered"))
    there = attendance.presence(rules, state, 0.0)
    assert (there.known, there.needed) == (0, 1) and "3 more are online" in there.reason


# -- whom it takes ----------------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.sets(st.integers(0, 99), min_size=1), st.floats(0.05, 1), st.floats(1, 3))
def test_the_default_draws_a_sample(seed: int, numbers: set[int], fraction: float, over: float) -> None:
    rules = replace(RULES, seed=seed, fraction=fraction, over_selection=over)
    all_names = [f"weak-{n}" for n in sorted(numbers)]
    state = fleet(rules, *all_names)
    count = max(1, share(fraction, len(all_names)), share(fraction * over, len(all_names)))
    assert selection.select_devices(rules, state, all_names) == sample(seed, 1, all_names, count)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0, 5)),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20), min_size=1),
    st.integers(0, 60),
)
def test_seats_are_dealt_by_weight(weights: dict[str, float], room: dict[str, int], count: int) -> None:
    dealt = selection.seats(weights, room, count)
    assert sum(dealt.values()) == min(count, sum(room.values()))
    assert all(0 <= dealt[name] <= room[name] for name in room)
    for name, other in product(room, room):  # none has a seat that another with room has more right to
        if dealt[name] and dealt[other] < room[other]:
            mine, theirs = weights.get(name, 0.0), weights.get(other, 0.0)
            assert mine / (2 * dealt[name] - 1) >= theirs / (2 * dealt[other] + 1)


def test_tiers_take_part_by_their_quotas() -> None:
    rule = SelectionRules(policy="tiers", quotas=(("strong", 1.0), ("weak", 3.0)))
    rules = replace(RULES, fraction=0.2, selection=rule)
    _, selected = rounds(rules, fleet(rules, *names(20, 20)), 5)
    tiers = [Counter(name.partition("-")[0] for name in each) for each in selected]
    assert tiers == [{"strong": 2, "weak": 6}] * 5
    assert len({tuple(each) for each in selected}) > 1, "each round draws anew"


def test_the_longest_idle_are_selected_so_that_all_take_part() -> None:
    rules = replace(RULES, fraction=0.25, selection=SelectionRules(policy="longest-idle"))
    state, selected = rounds(rules, fleet(rules, *names(8, 4)), 8)
    assert all(set().union(*selected[n : n + 4]) == set(names(8, 4)) for n in range(0, 8, 4))
    assert state.record.fairness(12) == 1.0

    drawn, _ = rounds(replace(RULES, fraction=0.25), fleet(RULES, *names(8, 4)), 8)
    fair = drawn.record.fairness(12)
    assert fair is not None and fair < 1.0


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=12))
def test_what_is_recorded_of_devices_is_what_counting_anew_gives(reporting: list[set[int]]) -> None:
    state, names_, now = fleet(RULES, *names(6, 0)), names(6, 0), 0.0
    counts = Counter({name: 0 for name in names_})
    for each in reporting:
        wanted = {f"strong-{n}" for n in each}
        state, _ = rounds(RULES, state, 1, wanted.__contains__)
        counts.update(wanted)
        now += 1.0
    record = state.record
    assert {name: each.reports for name, each in record.of.items()} == counts
    assert {each.tasks for each in record.of.values()} == {len(reporting)}
    total, squares = sum(counts.values()), sum(n * n for n in counts.values())
    assert record.fairness(6) == pytest.approx(total**2 / (6 * squares))
    again = ParticipationRecord.read(record.of, record.turnouts)
    assert replace(again, newest=record.newest) == record


# -- how many ---------------------------------------------------------------------------------------------------


def lossy(lost: float, **changes: object) -> tuple[Rules, State]:
    """Twenty devices after a round of a hundred tasks of which that share was lost."""
    rules = replace(RULES, **{"fraction": 0.5, **changes})  # type: ignore[arg-type]
    turnout = {"strong": Turnout(100, round(100 * lost))}
    state = replace(
        fleet(rules, *names(20, 0)), next_round=2, record=ParticipationRecord(turnouts=(turnout,))
    )
    return rules, state


@pytest.mark.parametrize(("lost", "selected"), [(0.0, 10), (0.2, 13), (0.5, 20), (1.0, 20)])
def test_as_many_more_are_selected_as_the_last_rounds_lost(lost: float, selected: int) -> None:
    for policy in ("uniform", "tiers", "longest-idle"):
        rules, state = lossy(lost, selection=SelectionRules(policy=policy, measured=True))  # type: ignore[arg-type]
        state, _ = machine.step(rules, state, Tick(), 0.0)
        assert state.round is not None and (state.round.goal, len(state.round.assignments)) == (10, selected)


def test_however_many_are_lost_the_factor_is_bounded() -> None:
    rules, state = lossy(0.9, fraction=0.1, selection=SelectionRules(measured=True, most_over_selection=3.0))
    state, _ = machine.step(rules, state, Tick(), 0.0)
    assert state.round is not None and (state.round.goal, len(state.round.assignments)) == (2, 6)


def test_the_losses_of_each_tier_are_its_own() -> None:
    rules = replace(RULES, fraction=0.5, selection=SelectionRules(policy="tiers", measured=True))
    state, _ = rounds(rules, fleet(rules, *names(20, 20)), 3, lambda name: name.startswith("strong"))
    assert state.record.lost_share("strong") == 0.0 and state.record.lost_share("weak") == 1.0
    state, _ = machine.step(rules, state, Tick(), 9.0)
    assert state.round is not None
    assert Counter(task.tier for task in state.round.assignments.values()) == {"strong": 10, "weak": 20}


def test_who_was_cut_off_by_others_is_not_lost_and_who_went_offline_is() -> None:
    rules = replace(RULES, fraction=0.5, over_selection=2.0)
    state = fleet(rules, *names(4, 0))
    state, _ = machine.step(rules, state, Tick(), 0.0)
    state, _ = machine.step(rules, state, states.DeviceStatus("strong-3", online=False), 1.0)
    for name in ("strong-0", "strong-1"):
        state, _ = machine.step(rules, state, Answered(name, True), 1.0)
    assert state.phase == "closing" and state.record.turnout(1) == {"strong": Turnout(3, 1)}


# -- when it opens ----------------------------------------------------------------------------------------------


def tail(tasks: int, wanted: int, lost: float) -> float:
    """The probability that ``wanted`` or more of the tasks are answered."""
    return sum(math.comb(tasks, n) * (1 - lost) ** n * lost ** (tasks - n) for n in range(wanted, tasks + 1))


@given(st.integers(1, 40), st.floats(0.01, 0.66), st.floats(0.5, 0.99))
def test_so_many_tasks_are_enough_and_one_less_is_not(wanted: int, lost: float, probability: float) -> None:
    tasks = selection.trials(wanted, lost, probability)
    assume(abs(tail(tasks, wanted, lost) - probability) > 1e-9)
    assert tail(tasks, wanted, lost) >= probability
    assert tasks == wanted or tail(tasks - 1, wanted, lost) < probability + 1e-9


def test_trials_handles_ten_thousand_reports_with_high_loss() -> None:
    assert 30_000 < selection.trials(10_000, 2 / 3, 0.9) < 31_000


def test_a_round_waits_for_its_quorum_up_to_its_patience() -> None:
    rule = SelectionRules(quorum=0.95, patience_s=60)
    rules, state = lossy(0.5, fraction=1.0, min_reports=10, selection=rule)
    state = replace(state, waiting_since=100.0)
    wanted = selection.trials(10, 0.5, 0.95)
    state, actions = machine.step(rules, state, Tick(), 101.0)
    there = attendance.presence(rules, state, 101.0)
    assert not actions and (there.known, there.needed) == (20, wanted) and "50% of the tasks" in there.reason
    assert machine.wake_at(rules, state, 101.0) == 160.0

    late, _ = machine.step(rules, state, Tick(), 160.0)
    assert late.round is not None and len(late.round.assignments) == 20
    state, _ = machine.step(rules, state, Tick(), 102.0)
    for n in range(20, wanted):
        assert state.phase == "waiting"
        state, _ = machine.step(rules, state, DeviceHello(f"strong-{n}", 8, 50), 103.0)
    assert state.round is not None and len(state.round.assignments) == wanted


def test_a_likely_quorum_takes_as_many_as_it_was_reckoned_with() -> None:
    rules, state = lossy(0.3, fraction=0.1, min_reports=5, selection=SelectionRules(quorum=0.9))
    state, _ = machine.step(rules, state, Tick(), 0.0)
    assert state.round is not None and len(state.round.assignments) == selection.trials(5, 0.3, 0.9) > 5


def test_participation_rows_are_those_of_the_round_that_ended() -> None:
    state, _ = rounds(RULES, fleet(RULES, *names(2, 0)), 2)
    assert state.record.of_round(2, ["strong-0", "weak-9"]) == {"strong-0": Participation(2, 2, 2)}
    assert state.record.of_round(1, ["strong-0"]) == {}
