"""What the coordinator itself takes for an event while many devices have a task: the pure machine, nothing around it."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Sequence

import msgspec

from edgefl.errors import EdgeflError
from edgefl_server.coordinator.machine import initial, step, wake_at
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import Answered, DeviceHello, DeviceStatus, Event, Rules, State, Tick

_VERSION = "0" * 64
_MEMORY, _SAMPLES = 1 << 30, 100


class CoordinatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one step, mean and median over ``events`` of a kind, in a round with so many ``assignments``.

    ``event`` wake is no event: it asks when time alone may change something, which the server does after each of them.
    """

    assignments: int
    event: str
    events: int
    us_per_event: float
    us_median: float


def measure(assignments: Sequence[int], events: int) -> list[CoordinatorRow]:
    """Rows for each number of assignments and each kind of event."""
    return [row for count in assignments for row in _rows(count, events)]


def _rows(count: int, most: int) -> list[CoordinatorRow]:
    rules = Rules(
        run="bench", seed=0, rounds=1, tiers=(TierRule("all", ("*",)),), min_devices=count, deadline_s=3600.0
    )
    names = [f"fleet-{number:06}" for number in range(count)]
    state = _opened(rules, names)
    some = names[:: max(1, count // most)][:most]
    if len(some) == count:  # the last answer would close the round
        some = some[:-1] or some
    kinds: dict[str, tuple[list[Event], bool]] = {
        "hello": ([DeviceHello(name, _MEMORY, _SAMPLES) for name in some], False),
        "status": ([DeviceStatus(some[at // 2], at % 2 > 0) for at in range(len(some))], False),
        "tick": ([Tick()] * len(some), True),
        "answer": ([Answered(name, accepted=True) for name in some], True),
    }
    rows = []
    for kind, (events, settle) in kinds.items():
        state, times = _timed(rules, state, events, settle=settle)
        rows.append(_row(count, kind, times))
    wakes = timeit.repeat(lambda: wake_at(rules, state, 2.0), number=1, repeat=len(some))
    return [*rows, _row(count, "wake", wakes)]


def _row(count: int, kind: str, times: Sequence[float]) -> CoordinatorRow:
    return CoordinatorRow(
        assignments=count,
        event=kind,
        events=len(times),
        us_per_event=round(1e6 * statistics.fmean(times), 2),
        us_median=round(1e6 * statistics.median(times), 2),
    )


def _opened(rules: Rules, names: Sequence[str]) -> State:
    """A round in which all devices of these names have a task."""
    state = initial(_VERSION, 0.0)
    for name in names:
        state, _ = step(rules, state, DeviceHello(name, _MEMORY, _SAMPLES), 0.0, settle=False)
    state, _ = step(rules, state, Tick(), 1.0)
    if state.round is None or len(state.round.assignments) != len(names):
        raise EdgeflError(f"no round opened for {len(names)} devices: the coordinator has other rules now")
    return state


def _timed(rules: Rules, state: State, events: Sequence[Event], *, settle: bool) -> tuple[State, list[float]]:
    """The state after the events, and the seconds of each step."""
    times = []
    for event in events:
        began = time.perf_counter()
        state, _ = step(rules, state, event, 2.0, settle=settle)
        times.append(time.perf_counter() - began)
    return state, times
