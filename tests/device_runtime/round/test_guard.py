"""Between steps: whether a round goes on, and how long it rests."""

from __future__ import annotations

import pytest

from edgefl.errors import RoundDeclined
from edgefl.wire.limits import Limits
from edgefl_device.round.work import Guard


class Watch:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_device_rests_for_its_share_of_the_time() -> None:
    watch = Watch()
    guard = Guard(Limits(), duty=0.25, clock=watch, sleep=watch.sleep)
    for _ in range(10):
        watch.now += 1.0
        guard.worked(1000.0)
        guard.between_steps()
    assert watch.now == pytest.approx(40.0)


def test_a_rest_ends_with_the_round() -> None:
    watch = Watch()
    guard = Guard(Limits(), duty=0.01, aborted=lambda: watch.now > 5.0, clock=watch, sleep=watch.sleep)
    guard.worked(10_000.0)
    guard.between_steps()
    assert watch.now < 6.0


def test_a_step_and_a_round_that_take_too_long_are_declined() -> None:
    watch = Watch()
    guard = Guard(Limits(max_step_s=2.0, max_round_s=10.0), clock=watch, sleep=watch.sleep)
    guard.worked(2000.0)
    guard.between_steps()
    guard.worked(2001.0)
    with pytest.raises(RoundDeclined, match=r"a step took 2 s, and limits\.max_step_s is 2 here"):
        guard.between_steps()
    watch.now = 10.5
    with pytest.raises(RoundDeclined, match="max_round_s") as declined:
        guard.between_steps()
    assert declined.value.reason == "too-much-work"


def test_the_owner_is_asked_now_and_then() -> None:
    watch, asked = Watch(), []
    guard = Guard(Limits(), allowed=lambda: asked.append(watch.now), clock=watch, sleep=watch.sleep)
    for _ in range(100):
        watch.now += 0.25
        guard.between_steps()
    assert asked == [5.0, 10.0, 15.0, 20.0, 25.0]
