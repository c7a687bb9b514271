"""Requests for profiles whose asker has left: nothing is measured for nobody."""

from __future__ import annotations

import pytest

from edgefl.wire.limits import Limits
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.asking import Asker, Scripted
from tests.device_runtime.profile.asked import STALE, next_text, patient, ready
from tests.device_runtime.tiny import World
from tests.wire.mqtt.events import wait_until


@pytest.mark.parametrize(("patience_s", "within_s"), [(0.5, 60.0), (5.0, 0.5)])
def test_a_request_of_an_asker_that_left_is_dropped(
    start_scripted: StartAgent,
    asker: Asker,
    world: World,
    script: Scripted,
    limits: Limits,
    patience_s: float,
    within_s: float,
) -> None:
    agent = ready(start_scripted, asker, limits=patient(limits, fetch_timeout_s=patience_s))
    script.go.set()
    ref = asker.publish(world.bundle)

    asker.send(ref, within_s=within_s)

    assert "nobody waits" in agent.event("profile").text
    agent.stop()
    ready(start_scripted, asker)
    asker.ask(ref)
    assert [asker.answer().state for _ in range(2)] == ["taken", "done"]  # nothing was said before
    assert len(script.files) == 1


def test_a_repeated_request_waits_for_a_slow_offer(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted, limits: Limits
) -> None:
    agent = ready(start_scripted, asker, limits=patient(limits, fetch_timeout_s=1.5))
    script.go.set()
    ref = asker.publish(world.bundle)
    asker.send(ref)
    asker.send(ref, nonce=STALE)

    while "nobody waits" not in (text := next_text(agent, within_s=0.1)):
        asker.send(ref)

    assert STALE in text
    asker.offer()
    assert asker.last_word().state == "done"


def test_requests_without_an_asker_keep_no_other_from_being_measured(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted
) -> None:
    agent = ready(start_scripted, asker)
    script.go.set()
    ref = asker.publish(world.bundle)
    for number in range(4):
        asker.send(ref, nonce=f"{number:016x}")

    asker.ask(ref)

    assert asker.last_word().state == "done"
    assert "nobody waits for it any more (0000000000000000)" in agent.event("profile").text


def test_a_measurement_whose_asker_leaves_is_stopped(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted
) -> None:
    agent = ready(start_scripted, asker)
    ref = asker.publish(world.bundle)
    asker.ask(ref)
    wait_until(lambda: len(script.files) == 1, "the measurement begins")

    asker.leave()

    while "nobody waits" not in agent.event("profile").text:
        pass
    script.go.set()
    asker.ask(ref)
    assert asker.last_word().state == "done"
