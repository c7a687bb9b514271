"""A round whose updates are too many bytes for all at once: devices offer, and the server asks one after the other."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Task, encode
from edgefl_server.events import Finished, RoundClosed
from edgefl_server.updates.reassembly import MIN_CHUNK_BYTES
from tests.server.fleet import (
    PATIENCE_S,
    MakeDevice,
    ScriptedDevice,
    Serve,
    assert_mean,
    chunks_of,
    silent,
    trained,
    update_for,
)

NAMES = ("strong-0", "strong-1", "strong-2")


class Offering:
    """A device that offers its update, and sends what it is asked for."""

    def __init__(self, device: ScriptedDevice, number: int = 1) -> None:
        self.device = device
        opened = device.wait_open(number)
        tasks = iter(lambda: device.tasks.get(timeout=PATIENCE_S), None)
        self.task: Task = next(task for task in tasks if task.round == number)
        arrays = trained(device.name, self.task)
        self.data = encode(update_for(device.name, self.task, opened.model_version, arrays))

    def offer(self) -> None:
        first = next(iter(chunks_of(self.data, self.task.nonce, self.device.limits.chunk_bytes)))
        self.device.say(self.device.mine.update(self.task.round, 0), msgspec.structs.replace(first, data=b""))

    def word(self) -> Any:
        return self.device.acks.get(timeout=PATIENCE_S)

    def send(self, indices: list[int]) -> None:
        self.device.send(self.data, self.task, indices=indices)


def _settled(each: Offering) -> Any:
    """Its next word that is not the same request once more."""
    return next(word for word in iter(each.word, None) if word.status != "missing")


def _asked_one(waiting: list[Offering]) -> Offering:
    """The one of these that is asked next."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for each in waiting:
            if not each.device.acks.empty():
                return each
        time.sleep(0.005)
    raise AssertionError("nobody is asked")


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return msgspec.structs.replace(limits, asked_bytes=4000)


@pytest.fixture
def scripted(device: MakeDevice) -> list[ScriptedDevice]:
    return [device(name, silent) for name in NAMES]


def test_devices_are_asked_in_turn(scripted: list[ScriptedDevice], serve: Serve, tmp_path: Path) -> None:
    server = serve(rounds=1, min_devices=3)
    devices = [Offering(each) for each in scripted]
    assert all(each.task.ask is True for each in devices)

    devices[0].offer()
    asked = devices[0].word()
    for each in devices:
        each.offer()
        each.offer()  # a copy changes nothing
    order: list[Offering] = []
    while waiting := [each for each in devices if each not in order]:
        current = _asked_one(waiting) if order else devices[0]
        current.send(asked.missing)
        assert _settled(current).status == "accepted"
        order.append(current)

    assert server.wait_for(RoundClosed).reports == 3
    server.wait_for(Finished)
    server.join()
    assert_mean(tmp_path / "out", [(name, "strong", 1) for name in NAMES])


def test_a_silent_device_holds_nobody_up(scripted: list[ScriptedDevice], serve: Serve) -> None:
    server = serve(rounds=1, min_devices=3)
    dead, lossy, old = (Offering(each) for each in scripted)
    dead.offer()
    assert dead.word().status == "missing"
    lossy.offer()
    old.send(list(range(9)))  # it knows no offers
    assert old.word().status == "accepted"
    asked = lossy.word()  # once the first one's turn is over
    lossy.send(asked.missing[:1] + asked.missing[-1:])
    again = lossy.word()
    assert (again.status, again.missing) == ("missing", asked.missing[1:-1])
    lossy.send(again.missing)
    assert lossy.word().status == "accepted"
    dead.offer()
    dead.send(dead.word().missing)
    assert server.wait_for(RoundClosed).reports == 3
    server.join()


def test_an_offer_that_is_too_large_is_refused(scripted: list[ScriptedDevice], serve: Serve) -> None:
    server = serve(rounds=1, min_devices=3)
    large = Offering(scripted[0])
    large.data = large.data + bytes(1 << 20)
    large.offer()
    refused = large.word()
    assert (refused.status, refused.reason) == ("rejected", "too-large")
    server.stop()


def _trickle(attacker: Offering, stopped: threading.Event) -> None:
    """Send small pieces of an update, so that it is never whole and never silent."""
    for chunk in chunks_of(attacker.data, attacker.task.nonce, MIN_CHUNK_BYTES)[:-1]:
        attacker.device.say(attacker.device.mine.update(attacker.task.round, chunk.index), chunk)
        if stopped.wait(1.8):
            return


def test_a_device_that_sends_drop_by_drop_stops_no_round(
    scripted: list[ScriptedDevice], serve: Serve
) -> None:
    """One of three has its turn first in each round; two reports close a round."""
    server = serve(fraction=0.6, over_selection=1.5, deadline_s=20.0, rounds=3, min_devices=3)
    for number in range(1, 4):
        attacker, *honest = (Offering(each, number) for each in scripted)
        [head, *_] = chunks_of(attacker.data, attacker.task.nonce, MIN_CHUNK_BYTES)
        topic = attacker.device.mine.update(number, 0)
        attacker.device.say(topic, msgspec.structs.replace(head, data=b""))
        assert attacker.word().status == "missing"
        stopped = threading.Event()
        trickle = threading.Thread(target=_trickle, args=(attacker, stopped))
        trickle.start()
        for each in honest:
            each.offer()
        for each in honest:
            each.send(each.word().missing)
            assert _settled(each).status == "accepted"
        closed = server.wait_for(RoundClosed)
        stopped.set()
        trickle.join()
        assert (closed.outcome, closed.reports) == ("closed", 2)
        while not attacker.device.acks.empty():
            attacker.word()
    server.join()
