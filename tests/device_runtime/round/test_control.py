"""Between steps: whether a round goes on, and how long it rests."""

from __future__ import annotations

import pytest

from edgefl.errors import RoundAborted, RoundDeclined
from edgefl.wire.limits import Limits
from edgefl_device.policy import OwnerRules, Policy, SystemQueries
from edgefl_device.round import control
from edgefl_device.round.control import RoundControl
from tests.device_runtime.policies import NO_TRAFFIC


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
    return OwnerRules(Policy(duty=duty), SystemQueries(), NO_TRAFFIC)


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
