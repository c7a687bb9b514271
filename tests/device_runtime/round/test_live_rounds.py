"""A device at work goes on while later rounds are announced, as long as its own takes updates."""

from __future__ import annotations

import msgspec
import pytest

from edgefl.errors import RoundAborted, RoundDeclined
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import LiveRound, Round, Task
from edgefl_device.policy import OwnerPolicy, OwnerRules, SystemQueries
from edgefl_device.round import control
from edgefl_device.round.control import RoundControl
from edgefl_device.round.job import Job
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.device_runtime.policies import NO_TRAFFIC
from tests.device_runtime.tiny import World
from tests.wire.make_golden import LIVE


def later(world: World, *live: int, number: int = 2) -> Round:
    """Round ``number``, with earlier ones that take updates too."""
    announced = world.announcement(number=number)
    older = {each: LiveRound(model_version=f"v{each}", units=world.unit_refs, hyper={}) for each in live}
    return msgspec.structs.replace(announced, live=older)


def test_it_goes_on_with_its_round_until_it_is_given_another_task(
    server: ScriptedServer, start: StartAgent, world: World, endless: World
) -> None:
    agent = start()
    server.open(endless)
    at = server.progress().step

    server.announce(later(endless, 1))
    at = server.progress(at + 1).step
    server.announce(later(endless, 1, 2, number=3))
    server.progress(at + 1)

    server.publish_blobs(world)
    server.announce(later(world, 1, 2, number=3))
    server.assign(world.task(number=3))
    assert agent.event("aborted").details["round"] == 1
    assert server.update(3).nonce == "n3"


def test_it_stops_when_its_round_is_closed(server: ScriptedServer, start: StartAgent, endless: World) -> None:
    agent = start()
    server.open(endless)
    server.progress()
    server.announce(later(endless, 2, number=3))
    assert agent.event("aborted").details["round"] == 1


def test_it_begins_a_round_before_the_newest(server: ScriptedServer, start: StartAgent, world: World) -> None:
    start()
    server.hello()
    server.publish_blobs(world)
    server.announce(later(world, 1, number=2))
    server.assign(world.task(number=1, nonce="n1"))
    first = server.update(1)
    assert (first.round, first.model_version) == (1, "v1")
    server.ack(first)
    server.assign(world.task(number=1, nonce="again"))  # a task more, of the same round
    assert server.update(1).nonce == "again"


# -- which announcement a task's job goes by, and when it is of no use any more ----------------------------


TASK = Task(run="run-7", round=3, tier="weak", seed=1, nonce="a" * 24)
NOW = msgspec.structs.replace(TASK, round=5, nonce="b" * 24)


def job_of(task: Task, announced: Round = LIVE) -> Job:
    job = Job.of(task, announced)
    assert job is not None
    return job


def test_a_task_of_an_earlier_round_begins_from_that_rounds_model() -> None:
    job, now = job_of(TASK), job_of(NOW)
    assert (job.round, job.model_version, job.units, job.hyper) == (
        3, LIVE.live[3].model_version, LIVE.live[3].units, {"lr": 0.1},
    )  # fmt: skip
    assert (now.model_version, now.units, now.hyper) == (LIVE.model_version, LIVE.units, LIVE.hyper)
    assert job.bundle == now.bundle and job.base == now.base == 5


def test_a_round_that_takes_no_updates_is_over() -> None:
    job = job_of(TASK)
    assert job.is_open(LIVE) and LIVE.takes == (3, 5)
    assert not job.is_open(msgspec.structs.replace(LIVE, live={}))
    assert not job.is_open(msgspec.structs.replace(LIVE, state="closed"))
    assert not job.is_open(msgspec.structs.replace(LIVE, run="run-8"))
    assert Job.of(msgspec.structs.replace(TASK, round=4), LIVE) is None


def test_a_page_has_the_units_of_earlier_rounds_too() -> None:
    paged = LIVE.paged(job_of(TASK).bundle)
    assert paged.live[3].units == {} and paged.whole(LIVE.page) == msgspec.structs.replace(LIVE, v=paged.v)


@pytest.mark.parametrize(
    ("changes", "replaced"),
    [
        ({}, False),
        ({"nonce": "c" * 24}, True),
        ({"nonce": "c" * 24, "round": 5}, True),
        ({"nonce": "c" * 24, "round": 2}, False),  # an old one
        ({"nonce": "", "round": 5}, False),  # a call to look where the run is
        ({"nonce": "c" * 24, "run": "run-8"}, False),  # its announcement comes first
    ],
)
def test_a_device_has_one_task_at_a_time(changes: dict[str, object], replaced: bool) -> None:
    assert job_of(TASK).is_replaced(msgspec.structs.replace(TASK, **changes)) is replaced
    assert not job_of(TASK).is_replaced(None)


# -- between steps: whether a round goes on, and how long it rests -----------------------------------------


class FakeTime:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(control, "time", fake)
    return fake


def rules(duty: float = 1.0) -> OwnerRules:
    return OwnerRules(OwnerPolicy(duty=duty), SystemQueries(), NO_TRAFFIC)


def test_a_device_rests_for_its_share_of_the_time(clock: FakeTime) -> None:
    control = RoundControl(limits=Limits(), rules=rules(duty=0.25))
    for _ in range(10):
        clock.now += 1.0
        control.worked(1000.0)
        control.check()
    assert clock.now == pytest.approx(40.0)


def test_a_rest_ends_with_the_round(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    control = RoundControl(limits=Limits(), rules=rules(duty=0.01))

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 5.0:
            control.cancel()

    monkeypatch.setattr(clock, "sleep", sleep)
    control.worked(10_000.0)
    control.check()
    assert clock.now < 6.0
    with pytest.raises(RoundAborted):
        control.check()


def test_a_step_and_a_round_that_take_too_long_are_declined(clock: FakeTime) -> None:
    control = RoundControl(limits=Limits(max_step_s=2.0, max_round_s=10.0))
    control.worked(2000.0)
    control.check()
    control.worked(2001.0)
    with pytest.raises(RoundDeclined, match=r"a step took 2 s, and limits\.max_step_s is 2 here"):
        control.check()
    clock.now = 10.5
    with pytest.raises(RoundDeclined, match="max_round_s") as declined:
        control.check()
    assert declined.value.reason == "too-much-work"


def test_the_owner_is_asked_now_and_then(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(OwnerRules, "check", lambda _rules, _work: asked.append(clock.now))
    control = RoundControl(limits=Limits(), rules=rules())
    for _ in range(100):
        clock.now += 0.25
        control.check()
    assert asked == [5.0, 10.0, 15.0, 20.0, 25.0]
