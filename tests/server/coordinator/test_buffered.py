"""Versions that wait for nobody: whoever comes, answers, goes or is silent, each task ends in one way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_server.coordinator import machine, states
from edgefl_server.coordinator.claims import find_task
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import (
    Answered,
    CloseRound,
    DeviceHello,
    DeviceStatus,
    FinishRun,
    ModelReady,
    Outage,
    ReassignTasks,
    Rules,
    StartRound,
    TaskDeclined,
    Tick,
)
from tests.support.errors import UpdateRejected, refuses

NAMES = ("a", "b", "c", "d", "e")
RULES = Rules(
    run="run",
    seed=3,
    rounds=6,
    tiers=(TierRule("strong", ("*",)),),
    buffer=2,
    concurrency=3,
    max_staleness=1,
    deadline_s=30.0,
    offline_grace_s=5.0,
)


@dataclass
class Run:
    """The machine, and what becomes of each task, by its nonce."""

    rules: Rules = RULES
    now: float = 0.0
    given: dict[str, Assignment] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[str, ...]] = field(default_factory=list)
    state: states.State = field(default_factory=lambda: machine.initial("v0", 0.0))
    finished: bool = False

    def take(self, event: Any, *, failed: str = "") -> None:
        self._answers(event)
        self.state, actions = machine.step(self.rules, self.state, event, self.now)
        pending = list(actions)
        while pending:
            action = pending.pop(0)
            match action:
                case StartRound(round=opened):
                    self._give(opened.began)
                    self.steps.append(())
                case ReassignTasks(over=over, tasks=tasks):
                    for each in over:
                        self._end(each.nonce, each.status)
                    self._give(tasks)
                case CloseRound(round=ended):
                    version = f"v{ended.number}" if not failed else self.state.model_version
                    ready = ModelReady(version, failed)
                    self.state, more = machine.step(self.rules, self.state, ready, self.now)
                    pending += more
                case FinishRun():
                    self.finished = True

    def _answers(self, event: Any) -> None:
        """What an answer says of the task that its device has; of others it says nothing."""
        current = self.state.round
        tasks = current.assignments.open if current is not None else {}
        task = tasks.get(getattr(event, "device", ""))
        if task is None or current is None:
            return
        match event:
            case Answered(accepted=True):
                assert current.number - task.round <= self.rules.max_staleness
                self._end(task.nonce, "accepted")
                self.steps[-1] += (task.nonce,)
            case Answered():
                self._end(task.nonce, "rejected")
            case TaskDeclined(nonce=task.nonce):
                self._end(task.nonce, "declined")

    def _give(self, tasks: tuple[Assignment, ...]) -> None:
        for each in tasks:
            assert each.nonce not in self.given
            self.given[each.nonce] = each

    def _end(self, nonce: str, fate: str) -> None:
        assert nonce in self.given and nonce not in self.fates
        self.fates[nonce] = fate

    @property
    def open(self) -> dict[str, Assignment]:
        current = self.state.round
        return dict(current.assignments.open) if current is not None else {}

    def check(self) -> None:
        """What holds at any time."""
        left = {nonce for nonce in self.given if nonce not in self.fates}
        at_work = self.open or dict(self.state.carried.open)
        if not self.finished:
            assert {task.nonce for task in at_work.values()} == left
        assert len(at_work) <= (self.rules.concurrency or len(NAMES))
        assert all(len(step) <= self.rules.buffer for step in self.steps)
        assert all(len(step) == self.rules.buffer for step in self.steps[:-1])
        accepted = [nonce for step in self.steps for nonce in step]
        assert len(accepted) == len(set(accepted))
        assert sorted(accepted) == sorted(n for n, fate in self.fates.items() if fate == "accepted")


@pytest.fixture
def run() -> Run:
    made = Run()
    for name in NAMES:
        made.take(DeviceHello(name, 1 << 30, 10))
    return made


DEVICES = st.sampled_from(NAMES)
EVENTS = st.lists(
    st.one_of(
        st.builds(DeviceHello, DEVICES, st.just(1 << 30), st.integers(1, 50)),
        st.builds(DeviceStatus, DEVICES, st.booleans()),
        st.builds(Answered, DEVICES, st.booleans()),
        st.builds(Answered, DEVICES, st.just(True)),
        st.tuples(st.just("decline"), DEVICES),
        st.just(Tick()),
        st.builds(Outage, st.floats(0, 9)),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(0, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 20))
def test_tasks_end_once(events: list[Any], concurrency: int, buffer: int, late: int, pace: int) -> None:
    run = Run(replace(RULES, concurrency=concurrency, buffer=buffer, max_staleness=late))
    for event in events:
        run.now += pace
        run.take(declining(run.state, event))
        run.check()
        if run.state.phase == "open" and run.state.round is not None:
            rounds = {task.round for task in run.open.values()}
            assert rounds <= {run.state.round.number, *run.state.round.older}
            assert min(rounds, default=run.state.round.number) >= run.state.round.number - late


def declining(state: states.State, event: Any) -> Any:
    """The event, where it is one; a device that declines means the task that it has."""
    if not isinstance(event, tuple):
        return event
    task = state.round.assignments.get(event[1]) if state.round is not None else None
    return TaskDeclined(event[1], task.nonce if task else "?", "policy")


def test_who_has_answered_is_given_work_in_the_same_step(run: Run) -> None:
    (first, *_) = run.open
    before = set(run.open)
    run.take(Answered(first, accepted=True))
    assert len(run.open) == 3 and len(set(run.open) - (before - {first})) == 1


def test_a_version_follows_every_full_buffer(run: Run) -> None:
    early, *others = run.open
    for _ in range(2):
        run.take(Answered(others[0], accepted=True))
        others = [name for name in run.open if name != early]
    assert run.state.round is not None and run.state.round.number == 2
    assert run.open[early].round == 1 and set(run.state.round.older) == {1}
    assert run.state.round.version_of(1) == "v0" and run.state.round.version_of(2) == "v1"
    run.take(Answered(early, accepted=True))
    assert [len(step) for step in run.steps] == [2, 1]


def test_a_task_older_than_max_staleness_is_stale(run: Run) -> None:
    slow, *_ = run.open
    nonce = run.open[slow].nonce
    while nonce not in run.fates:
        run.take(Answered(next(name for name in run.open if name != slow), accepted=True))
    assert run.fates[nonce] == "stale" and run.state.round is not None and run.state.round.number == 3
    assert len(run.open) == 3
    with refuses(UpdateRejected, round=1, reason="closed-round"):
        find_task(run.state, slow, 1, nonce)


def test_a_silent_device_makes_place_when_its_time_is_over(run: Run) -> None:
    nonces = {task.nonce for task in run.open.values()}
    run.now = machine.wake_at(RULES, run.state, run.now) or 0.0
    assert run.now == 30.0
    run.take(Tick())
    assert {run.fates[nonce] for nonce in nonces} == {"expired"} and len(run.open) == 3


def test_a_device_that_is_away_keeps_its_place_for_the_grace(run: Run) -> None:
    gone, *_ = run.open
    run.take(DeviceStatus(gone, online=False))
    assert machine.wake_at(RULES, run.state, run.now) == 5.0
    run.now = 5.0
    run.take(Tick())
    assert gone not in run.open and len(run.open) == 3


def test_an_outage_of_the_server_costs_no_device_its_time(run: Run) -> None:
    run.now = 29.0
    run.take(Outage(29.0))
    assert machine.wake_at(RULES, run.state, run.now) == 59.0 and len(run.open) == 3


def test_who_declines_is_not_asked_again_at_once(run: Run) -> None:
    for _ in range(len(NAMES)):
        for name, task in run.open.items():
            run.take(TaskDeclined(name, task.nonce, "policy"))
    assert run.open == {} and sorted(run.fates.values()) == ["declined"] * len(NAMES)
    run.now = machine.wake_at(RULES, run.state, run.now) or 0.0
    run.take(Tick())
    assert len(run.open) == 3


def test_one_device_alone_fills_the_buffer() -> None:
    run = Run(replace(RULES, concurrency=0, rounds=2))
    run.take(DeviceHello("a", 1 << 30, 10))
    for _ in range(4):
        run.take(Answered("a", accepted=True))
    assert run.finished and [len(step) for step in run.steps] == [2, 2]


def test_a_step_that_fails_leaves_the_model_and_devices_go_on(run: Run) -> None:
    early, *others = run.open
    run.take(Answered(others[0], accepted=True))
    run.take(Answered(next(n for n in run.open if n != early), accepted=True), failed="NaN")
    assert run.state.round is not None
    assert (run.state.round.number, run.state.model_version, run.state.position) == (2, "v0", 0)
    assert run.open[early].round == 1


def test_weights_by_samples_are_capped_as_a_version_opens() -> None:
    run = Run(replace(RULES, weighted=True, weight_cap=2.0, concurrency=5))
    for name, samples in zip(NAMES, (10, 12, 14, 1000, 16), strict=True):
        run.take(DeviceHello(name, 1 << 30, samples))
    assert run.state.round is not None and run.state.round.weight_cap == 20  # of the first, which was alone


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        ("sqrt", [1.0, 2**-0.5, 0.5]),
        ("inverse", [1.0, 0.5, 0.25]),
        ("constant", [1.0, 1.0, 1.0]),
        ("hinge", [1.0, 1.0, 1.0]),
    ],
)
def test_the_share_of_a_late_change(rule: states.Rule, shares: list[float]) -> None:
    assert [states.share(rule, late) for late in (0, 1, 3)] == pytest.approx(shares)
    assert states.share("hinge", 8) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="-1"):
        states.share(rule, -1)
