"""Asking a fleet for profiles: scripted devices on a real broker that answer, decline, fall silent or send garbage."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import msgspec
import pytest

from edgefl.errors import BrokerError
from edgefl.wire.blobs import describe
from edgefl.wire.bundle import profiles
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import ProfileAnswer, ProfileOffer, ProfileRequest, Status, encode
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.profiling.fleet import FleetProfiler, ProfilingOptions
from edgefl_server.profiling.reports import FleetReport
from tests.conftest import BrokerProcess, SessionFactory, on_each_broker
from tests.server.profiling.phones import (
    WEAK,
    Behaviour,
    MakePhone,
    Phone,
    Profile,
    by_name,
    ignores,
    measures,
    takes,
)
from tests.wire.bundle.example_profile import example_profile
from tests.wire.mqtt.events import PATIENCE_S, wait_for, wait_up


@on_each_broker
def test_each_device_is_profiled(phones: MakePhone, profile: Profile, wanted: ProfilingOptions) -> None:
    phones("phone-1", measures)
    phones("phone-2", measures)

    report = profile()

    assert [row.device for row in report.answered] == ["phone-1", "phone-2"]
    assert {row.profile for row in report.devices} == {example_profile(WEAK.ref(1024).sha256)}
    assert report.devices[0].engines == {"onnxruntime": "1"}
    assert report.seconds < wanted.timeout_s
    assert msgspec.json.decode(msgspec.json.encode(report), type=FleetReport) == report


def test_missing_profiles_have_a_reason(phones: MakePhone, profile: Profile) -> None:
    def declines(phone: Phone, request: ProfileRequest) -> None:
        phone.answer(
            ProfileAnswer(
                nonce=request.nonce, state="declined", reason="no-memory", text="9 of 8\x1b[31m MiB"
            )
        )

    phones("able", measures)
    phones("small", declines)
    phones("old", ignores)
    phones("gone", ignores).leave()

    found = by_name(profile())

    assert {name: (row.state, row.reason) for name, row in found.items()} == {
        "able": ("done", ""),
        "small": ("declined", "no-memory"),
        "old": ("silent", ""),
        "gone": ("offline", ""),
    }
    assert found["small"].text == "9 of 8 [31m MiB"
    assert all(row.text for name, row in found.items() if name != "able")


def test_a_device_that_leaves_while_it_measures_is_offline(phones: MakePhone, profile: Profile) -> None:
    def leaves(phone: Phone, request: ProfileRequest) -> None:
        takes(phone, request)
        phone.leave()

    phones("phone", leaves)

    assert profile().devices[0].state == "offline"


def test_a_device_that_is_not_done_in_time_is_late(phones: MakePhone, profile: Profile) -> None:
    phones("phone", takes)

    row = profile(timeout_s=1.0).devices[0]

    assert row.state == "late"
    assert "1 s" in row.text


def test_a_device_without_a_hello_is_not_waited_for_to_the_end(
    profile: Profile, broker: BrokerProcess, connect: SessionFactory, wanted: ProfilingOptions
) -> None:
    session = connect(broker.address)
    wait_up(session)
    topics = Topics(wanted.federation).device("mute")
    assert session.publish(topics.status, encode(Status(online=True)), retain=True).wait(PATIENCE_S)

    report = profile(answer_s=0.5)

    assert [(row.device, row.state) for row in report.devices] == [("mute", "silent")]
    assert "hello is missing" in report.devices[0].text
    assert report.seconds < wanted.timeout_s


def test_a_command_that_is_stopped_does_not_blame_the_time(
    broker: BrokerProcess, phones: MakePhone, wanted: ProfilingOptions
) -> None:
    phones("phone", takes)
    profiler = FleetProfiler(broker.address, wanted)

    def stop(report: FleetReport) -> None:
        if report.devices[0].state == "measuring":
            profiler.stop()

    row = profiler.run(stop).devices[0]

    assert (row.state, "was stopped" in row.text) == ("late", True)


def test_a_request_that_was_not_heard_is_sent_again(phones: MakePhone, profile: Profile) -> None:
    def second_time(phone: Phone, request: ProfileRequest) -> None:
        if len(phone.requests) > 1:
            measures(phone, request)

    phone = phones("phone", second_time)

    assert profile(answer_s=20.0).devices[0].state == "done"
    assert len({request.nonce for request in phone.requests}) == 1


def _garbage(phone: Phone, request: ProfileRequest) -> None:
    phone.session.publish(phone.mine.profiles, b"\xc1")
    phone.answer(ProfileAnswer(nonce="somebody else's", state="declined"))
    phone.answer(ProfileAnswer(nonce=request.nonce, state="done", profile=b"\xc1"))


def _other_bundle(phone: Phone, request: ProfileRequest) -> None:
    data = profiles.encode(example_profile("cd" * 32))
    phone.answer(ProfileAnswer(nonce=request.nonce, state="done", profile=data))


def _not_a_number(phone: Phone, request: ProfileRequest) -> None:
    odd = msgspec.structs.replace(example_profile(request.bundles["onnx"].sha256), open_ms=math.nan)
    phone.answer(ProfileAnswer(nonce=request.nonce, state="done", profile=profiles.encode(odd)))


@pytest.mark.parametrize(
    ("behave", "reason"),
    [(_garbage, "malformed"), (_not_a_number, "malformed"), (_other_bundle, "wrong-bundle")],
)
def test_an_answer_that_is_none_is_reported_and_the_others_stand(
    phones: MakePhone, profile: Profile, behave: Behaviour, reason: str
) -> None:
    phones("able", measures)
    phones("odd", behave)

    found = by_name(profile())

    assert found["able"].state == "done"
    assert (found["odd"].state, found["odd"].reason) == ("declined", reason)


def test_the_last_word_stands(phones: MakePhone, profile: Profile) -> None:
    def twice(phone: Phone, request: ProfileRequest) -> None:
        measures(phone, request)
        phone.answer(ProfileAnswer(nonce=request.nonce, state="declined", reason="busy"))

    phones("phone", twice)

    assert profile().devices[0].state == "done"


def retained_below(session: Session, topics: Topics) -> set[str]:
    """Topics of retained messages about profiles; a message of our own marks the end of what is retained."""
    mark = f"{topics.root}/profiles/mark"
    session.subscribe([f"{topics.root}/profiles/#"])
    threading.Event().wait(0.3)
    session.publish(mark, b"mark")
    found = set()
    while (event := wait_for(session, IncomingMessage)).topic != mark:
        if event.payload:
            found.add(event.topic)
    return found


@on_each_broker
def test_a_profile_leaves_nothing_at_the_broker(
    broker: BrokerProcess, phones: MakePhone, profile: Profile, connect: SessionFactory, federation: str
) -> None:
    topics = Topics(federation)
    session = connect(broker.address)
    wait_up(session)
    of_round = topics.blob_chunk(WEAK.ref(1024).sha256, 0)
    assert session.publish(of_round, WEAK.encoded, retain=True).wait(PATIENCE_S)
    seen: list[set[str]] = []

    def looks(phone: Phone, request: ProfileRequest) -> None:
        seen.append(retained_below(connect(broker.address), topics))
        measures(phone, request)

    phones("phone", looks)
    profile(answer_s=20.0)

    nonce = next(iter(seen[0])).split("/")[4]
    assert seen[0] == {
        topics.profile(nonce).offer,
        topics.profile(nonce).blob_chunk(WEAK.ref(1024).sha256, 0),
        topics.profile(nonce).blob_chunk(next(iter(WEAK.blobs)), 0),
    }
    assert retained_below(connect(broker.address), topics) == set()
    session.subscribe([of_round])
    assert wait_for(session, IncomingMessage).payload == WEAK.encoded


@pytest.mark.parametrize("until", [0.0, 1e12], ids=["over", "not over"])
def test_leftovers_are_cleared_once_over(
    profile: Profile, broker: BrokerProcess, connect: SessionFactory, federation: str, until: float
) -> None:
    topics = Topics(federation)
    session = connect(broker.address)
    wait_up(session)
    left = topics.profile("00" * 8)
    ref = describe(b"left behind", 1024)
    for topic, payload in (
        (left.blob_chunk(ref.sha256, 0), b"left behind"),
        (left.offer, encode(ProfileOffer(until=until, blobs=(ref,)))),
    ):
        assert session.publish(topic, payload, retain=True).wait(PATIENCE_S)

    profile()

    left_there = {left.blob_chunk(ref.sha256, 0), left.offer}
    assert retained_below(session, topics) == (left_there if until else set())


@pytest.mark.slow
def test_a_restarted_broker_is_told_again(
    own_mosquitto: BrokerProcess, connect: SessionFactory, federation: str, wanted: ProfilingOptions
) -> None:
    reports: list[FleetReport] = []
    patient = replace(wanted, answer_s=30.0, devices=frozenset({"phone"}))
    profiler = FleetProfiler(own_mosquitto.address, patient)
    phone = Phone(connect(own_mosquitto.address), federation, "phone", ignores)
    asking = threading.Thread(target=lambda: reports.append(profiler.run()))
    asking.start()
    while not phone.requests:
        threading.Event().wait(0.01)
    phone.stop()

    own_mosquitto.kill()
    own_mosquitto.start()
    again = Phone(connect(own_mosquitto.address), federation, "phone", measures)
    asking.join(PATIENCE_S)
    again.stop()

    assert [row.state for row in reports[0].devices] == ["done"]


def test_without_a_broker_the_command_ends_soon_and_says_so(wanted: ProfilingOptions) -> None:
    with pytest.raises(
        BrokerError, match=r"no connection to the broker at 127\.0\.0\.1:1 in 0\.3 s: cannot reach"
    ):
        FleetProfiler(Address("127.0.0.1", 1), replace(wanted, connect_s=0.3)).run()
