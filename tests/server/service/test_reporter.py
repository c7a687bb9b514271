"""A server that loses a device, or waits for one, says which, why and for how long; and who came under another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import client_id
from edgefl.wire.mqtt.messages import FAILED, Hello, UpdateChunk
from edgefl.wire.mqtt.reasons import TEXTS
from edgefl_server import events
from edgefl_server.coordinator.roster import TierRule, describe_tiers
from edgefl_server.coordinator.states import Rules
from edgefl_server.events import (
    Awaiting,
    DeviceFailed,
    DeviceJoined,
    DeviceLost,
    ParticipationDeclined,
    Rejected,
    RoundClosed,
    RoundEnded,
    RoundOpened,
    Waiting,
    Warned,
)
from edgefl_server.memory_plans import MemoryPlans
from edgefl_server.message_handler import tier_objection
from edgefl_server.reporter import EventReporter
from tests import needs
from tests.conftest import Mosquitto, SessionFactory
from tests.server import fleet
from tests.server.fleet import (
    PATIENCE_S,
    MakeDevice,
    RunningServer,
    ScriptedDevice,
    plan_for,
    progress,
    silent,
)
from tests.support.listeners import CallingListener
from tests.wire.mqtt.events import wait_up
from tests.wire.mqtt.test_neighbours import announce

RULES = Rules(
    run="",
    seed=1,
    rounds=1,
    tiers=(TierRule("strong", ("strong-*",)), TierRule("weak", (), 32 << 20), TierRule("any")),
)


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return msgspec.structs.replace(limits, notice_s=0.1)


def test_a_device_that_vanishes_is_named_with_its_deadline(device: MakeDevice, serve: Any) -> None:
    device("strong-0")
    device("strong-1", lambda device, task, opened: device.vanish())
    server = serve(rounds=1, min_devices=2, offline_grace_s=0.5)

    assert {server.wait_for(DeviceJoined).device for _ in range(2)} == {"strong-0", "strong-1"}
    opened = server.wait_for(RoundOpened)
    lost = server.wait_for(DeviceLost)
    assert (lost.device, lost.tier, lost.round) == ("strong-1", "strong", 1)
    assert 0 < lost.until < opened.deadline
    ended = server.wait_for(RoundEnded)
    server.join()

    assert (ended.outcome, ended.reports) == ("closed", 1)
    assert list(ended.missing) == ["strong-1"] and "offline for over 0.5 s" in ended.missing["strong-1"]


def test_a_round_in_which_nothing_comes_tells_whom_it_waits_for(device: MakeDevice, serve: Any) -> None:
    device("strong-0")
    slow = device("strong-1", silent)
    server = serve(rounds=1, min_devices=2)

    awaiting = server.wait_for(Awaiting, lambda event: len(event.devices) == 1)
    [awaited] = awaiting.devices
    assert (awaiting.round, awaited.device, awaited.online) == (1, "strong-1", True)
    assert (awaited.stage, awaited.since) == ("", 0.0), "it has said nothing"

    slow.say(slow.mine.progress, progress("train", step=3, steps=10))
    awaiting = server.wait_for(Awaiting, lambda event: event.devices[0].stage)
    assert awaiting.devices[0].stage == "train 3/10" and awaiting.devices[0].since > 0

    nonce = slow.tasks.get(timeout=PATIENCE_S).nonce
    chunk = UpdateChunk(nonce=nonce, sha256="0" * 64, index=0, count=3, size=900, data=bytes(256))
    slow.say(slow.mine.update(1, 0), chunk)
    server.wait_for(Awaiting, lambda event: event.devices[0].stage == "sending its update, chunk 1 of 3")
    slow.session.publish(slow.mine.update(1, 0), b"\x00")
    server.wait_for(Awaiting, lambda event: event.devices[0].stage == "sent what cannot be read")

    slow.vanish()
    awaiting = server.wait_for(Awaiting, lambda event: not event.devices[0].online)
    assert awaiting.devices[0].device == "strong-1"
    server.stop()


def test_an_attempt_that_fails_is_told_once_for_each_reason(device: MakeDevice, serve: Any) -> None:
    broken = device("strong-0", silent)
    server = serve(rounds=1)
    server.wait_for(RoundOpened)
    for reason in ("no space\x07left", "no space\x07left", "no graph"):
        failed = progress(FAILED + reason, loss=float("nan"))
        broken.session.publish(broken.mine.progress, msgspec.msgpack.encode(failed), qos=0)

    for text in ("no space left", "no graph"):
        failure = server.wait_for(DeviceFailed)
        assert (failure.device, failure.round, failure.text) == ("strong-0", 1, text)
    server.stop()


def test_a_decline_ends_the_waiting_with_its_reason(device: MakeDevice, serve: Any) -> None:
    def declines(device: ScriptedDevice, task: Any, opened: Any) -> None:
        decline = {"v": 1, "round": 1, "nonce": task.nonce, "reason": "wrong-data"}
        device.session.publish(device.mine.declines, msgspec.msgpack.encode(decline))

    device("strong-0")
    device("strong-1", declines)
    server = serve(rounds=1, min_devices=2)

    declined = server.wait_for(ParticipationDeclined)
    assert (declined.device, declined.reason) == ("strong-1", "wrong-data")
    assert declined.text == TEXTS["wrong-data"]
    ended = server.wait_for(RoundEnded)
    assert ended.missing == {"strong-1": "it declined (wrong-data)"}
    server.join()


def test_events_come_in_the_order_in_which_things_happened(device: MakeDevice, serve: Any) -> None:
    device("strong-0")
    server = serve(rounds=3)
    server.join()

    happened = [(type(event), event.round) for event in server.seen_of((RoundOpened, RoundEnded))]
    assert happened == [(kind, number) for number in (1, 2, 3) for kind in (RoundOpened, RoundEnded)]
    closed = [event.round for event in server.seen_of(RoundClosed)]
    assert closed == [1, 2, 3], "each evaluation comes when it is there, and in order"


def test_a_hello_for_an_unknown_tier_is_answered_with_the_known_ones(device: MakeDevice, serve: Any) -> None:
    weak = device("weak-0", silent, tier="weka")
    server = serve(rounds=1)

    refused = server.wait_for(Rejected)
    assert refused.reason == "unknown-tier"
    assert "'weka'" in refused.text and "strong (devices strong-*), weak (devices weak-*)" in refused.text
    ack = weak.acks.get(timeout=PATIENCE_S)
    assert (ack.round, ack.nonce, ack.status, ack.reason) == (0, "", "rejected", "unknown-tier")
    assert ack.text == refused.text
    assert weak.tasks.get(timeout=PATIENCE_S).tier == "weak"
    server.stop()


def test_a_device_that_fits_no_tier_hears_it(device: MakeDevice, serve: Any) -> None:
    stranger = device("toaster")
    tiers = tuple(TierRule(name, (f"{name}-*",), 2 << 30) for name in ("strong", "weak"))
    server = serve(rounds=1, tiers=tiers)

    assert server.wait_for(Rejected).reason == "no-tier"
    text = stranger.acks.get(timeout=PATIENCE_S).text
    assert "toaster fits no tier by its name or its 1024.0 MiB of memory" in text
    assert "strong (devices strong-* or 2048.0 MiB or more)" in text
    server.stop()


def test_a_server_that_lacks_devices_names_those_under_other_names(
    own_mosquitto: Mosquitto, connect: SessionFactory, federation: str, limits: Limits, tmp_path: Path
) -> None:
    session = connect(own_mosquitto.address)
    wait_up(session)
    announce(session, f"{federation}-typo", "", online=("phone-1", "phone-2"))
    announce(session, "others", "open", online=("theirs",))
    server = RunningServer.start(plan_for(federation, limits), own_mosquitto.address, tmp_path / "out")

    server.wait_for(Waiting)
    warned = server.wait_for(Warned)

    assert f"'{federation}-typo' (phone-1, phone-2)" in warned.text
    assert f"--federation {federation}" in warned.text and "theirs" not in warned.text
    server.stop()


def test_two_devices_of_one_name_are_named(device: MakeDevice, serve: Any, monkeypatch: Any) -> None:
    """As where a device's folder was copied: the broker takes both for one client."""
    needs.require("mosquitto")  # the embedded broker may leave two such clients connected
    monkeypatch.setattr(fleet, "client_id", lambda _secret, *who: client_id(b"copied", *who))
    device("strong-0", silent)
    device("strong-0", silent)
    server = serve(rounds=1)

    warned = server.wait_for(Warned, lambda event: "two devices run under this name" in event.text)
    assert "strong-0" in warned.text and "its own name (`edgefl device --id`)" in warned.text
    server.stop()


# -- without a broker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "reconnects", "count"),
    [(range(0, 100, 5), False, 0), ((100, 100.5, 101, 101.5, 102, 102.5), False, 1), (range(10), True, 0)],
    ids=["slow", "quick", "retained"],
)
def test_quick_hellos_are_reported_once(seconds: Any, reconnects: bool, count: int, tmp_path: Path) -> None:
    reported: list[events.Event] = []
    now = 0.0
    plans = MemoryPlans(tmp_path, {})
    reporter = EventReporter(plan_for("demo", Limits()), CallingListener(reported.append), plans, lambda: now)
    for now in seconds:  # noqa: B007 - the clock of the reporter
        if reconnects:
            reporter.report_online("broker")
        reporter.count_hello("phone")
    assert len(reported) == count


@pytest.mark.parametrize(
    ("device", "memory", "wish", "reason"),
    [
        ("strong-1", 1, "", ""),
        ("strong-1", 1, "strong", ""),
        ("strong-1", 1, "any", "wrong-tier"),
        ("strong-1", 1, "srtong", "unknown-tier"),
        ("x", 1, "", ""),
        ("x", 64 << 20, "any", "wrong-tier"),
    ],
)
def test_what_a_hello_is_answered(device: str, memory: int, wish: str, reason: str) -> None:
    hello = Hello(agent="a", memory_bytes=memory, cores=1, samples=1, engines={}, tier=wish)
    found = tier_objection(RULES, device, hello)
    assert (found[0] if found else "") == reason


def test_tiers_are_described_by_who_belongs_to_them() -> None:
    told = "strong (devices strong-*), weak (32.0 MiB or more), any (every device)"
    assert describe_tiers(RULES.tiers) == told
    both = TierRule("both", ("a-*", "b"), 1 << 20)
    assert describe_tiers([both]) == "both (devices a-* or devices b or 1.0 MiB or more)"
