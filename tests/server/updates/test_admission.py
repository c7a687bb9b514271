"""Who is let in where more devices say hello than there are places."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.limits import Limits
from edgefl_server.coordinator import machine
from edgefl_server.coordinator.record import Participation, ParticipationRecord
from edgefl_server.coordinator.states import DeviceHello, DeviceLeft, State
from edgefl_server.updates.rate_limit import AdmissionControl
from tests.server.coordinator.test_selection import RULES

LIMITS = Limits(max_devices=4, come_later_s=60)
NAMES = st.lists(st.sampled_from([f"weak-{n}" for n in range(12)]), unique=True)


def come(admission: AdmissionControl, state: State, *names: str) -> State:
    for name in names:
        if name in state.devices:
            continue
        ruling = admission.decide(name, state)
        if ruling.replaces:
            state, _ = machine.step(RULES, state, DeviceLeft(ruling.replaces), 0.0)
        if ruling.is_admitted:
            state, _ = machine.step(RULES, state, DeviceHello(name, 8, 50), 0.0, settle=False)
    return state


def empty() -> State:
    return machine.initial("v" * 64, 0.0)


@given(NAMES, st.randoms(use_true_random=False), st.integers(0, 9))
def test_the_lot_decides_and_not_the_order(names: list[str], random: object, seed: int) -> None:
    shuffled = sorted(names, key=lambda _: random.random())  # type: ignore[attr-defined]
    one, other = AdmissionControl(seed, LIMITS), AdmissionControl(seed, LIMITS)
    first, second = come(one, empty(), *names), come(other, empty(), *shuffled)
    lowest = set(sorted(names, key=one.lot)[: LIMITS.max_devices])
    assert (
        set(first.devices)
        == set(second.devices)
        == lowest
        == set(one.select_admitted(empty(), names) if names else ())
    )


@given(NAMES, NAMES)
def test_whoever_had_a_task_keeps_its_place(first: list[str], later: list[str]) -> None:
    admission = AdmissionControl(1, LIMITS)
    state = come(admission, empty(), *first)
    served = sorted(state.devices)[:2]
    record = ParticipationRecord.read({name: Participation(1, 0, 1) for name in served}, ())
    state = come(admission, replace(state, record=record), *later)
    assert set(served) <= set(state.devices) and len(state.devices) <= LIMITS.max_devices
    others = {name for name in {*first, *later} if name not in served}
    room = LIMITS.max_devices - len(served)
    in_by_lot = set(state.devices) - set(served)
    assert in_by_lot == set(sorted(others, key=admission.lot)[:room])


def test_admitted_keeps_devices_with_tasks_then_the_lowest_lots() -> None:
    admission, names = AdmissionControl(1, LIMITS), [f"weak-{n}" for n in range(8)]
    state = empty()
    for name in names:
        state, _ = machine.step(RULES, state, DeviceHello(name, 8, 50), 0.0, settle=False)
    served = max(names, key=admission.lot)
    state = replace(state, record=ParticipationRecord.read({served: Participation(1, 1, 1)}, ()))
    others = sorted((name for name in names if name != served), key=admission.lot)
    assert set(admission.select_admitted(state, names)) == {served, *others[:3]}


def test_retries_spread_over_a_window_that_grows_with_their_number() -> None:
    admission = AdmissionControl(1, LIMITS)
    few = [admission.retry_after_s(f"weak-{n}") for n in range(50)]
    assert all(60 <= each < 120 for each in few) and len(set(few)) > 20
    assert admission.retry_after_s("weak-1") != few[1], "drawn anew each time"
    many = [admission.retry_after_s(f"strong-{n}") for n in range(2000)]
    assert 200 <= many[-1] < 420
    small = AdmissionControl(1, msgspec.structs.replace(LIMITS, max_strangers=10))
    assert max(small.retry_after_s(f"weak-{n}") for n in range(3000)) < 120, "memory of them is bounded"
