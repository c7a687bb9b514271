"""``python -m benchmarks coordinator``: time of the coordinator's step for one event, without broker or processes."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Sequence

import msgspec

from benchmarks.options import Json
from benchmarks.results import print_rows
from edgefl.errors import EdgeflError
from edgefl_server.coordinator.machine import initial, step, wake_at
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import Answered, DeviceHello, DeviceStatus, Event, Rules, State, Tick


class CoordinatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one step, mean and median over ``events`` of a kind, in a round with so many ``assignments``.

    Wake is the time of ``wake_at``, which the server calls after each event to set its timer.
    """

    assignments: int
    event: str
    events: int
    us_per_event: float
    us_median: float


def coordinator(as_json: Json = False) -> None:
    """Time of the coordinator's step for one event, while a round with 100, 1,000 and 10,000 assignments is open.

    Events are answers of devices, hellos, statuses and ticks. Neither a broker nor another process is involved.

    Example:

      python -m benchmarks coordinator --json
    """

    print_rows("coordinator", measure([100, 1000, 10_000], events=500), as_json)


_VERSION = "0" * 64
_MEMORY, _SAMPLES = 1 << 30, 100


def measure(assignments: Sequence[int], events: int) -> list[CoordinatorRow]:
    """Measure each number of assignments and each kind of event."""
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
    """Return the state in a round in which all devices of these names have a task."""
    state = initial(_VERSION, 0.0)
    for name in names:
        state, _ = step(rules, state, DeviceHello(name, _MEMORY, _SAMPLES), 0.0, settle=False)
    state, _ = step(rules, state, Tick(), 1.0)
    if state.round is None or len(state.round.assignments) != len(names):
        found = 0 if state.round is None else len(state.round.assignments)
        raise EdgeflError(f"expected a round with {len(names)} assignments, found {found}")
    return state


def _timed(rules: Rules, state: State, events: Sequence[Event], *, settle: bool) -> tuple[State, list[float]]:
    """Return the state after the events, and the seconds of each step."""
    times = []
    for event in events:
        began = time.perf_counter()
        state, _ = step(rules, state, event, 2.0, settle=settle)
        times.append(time.perf_counter() - began)
    return state, times
