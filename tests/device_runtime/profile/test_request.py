"""An agent that is asked what a bundle costs: it answers, declines with a reason, and training comes first."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.errors import BundleError
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.archive import BundleArchive, Signer
from edgefl.wire.limits import Limits
from edgefl_device.policy import OwnerPolicy
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.asking import NONCE, Asker, Scripted
from tests.device_runtime.agent.link import publish_blob
from tests.device_runtime.agent.test_bad_input import GARBAGE
from tests.device_runtime.profile.asked import STALE, decline_details, next_text, patient, ready
from tests.device_runtime.tiny import World
from tests.pairs import by_default
from tests.wire.bundle.example_profile import example_profile
from tests.wire.mqtt.events import wait_until
from tests.wire.mqtt.speakers import speaker_in


def test_a_device_profiles_what_it_is_asked_to_and_its_answer_reads_back(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted
) -> None:
    ready(start_scripted, asker)
    script.go.set()

    asker.ask(asker.publish(world.bundle))

    assert asker.answer().state == "taken"
    answer = asker.answer()
    assert (answer.nonce, answer.state) == (NONCE, "done")
    assert profiles.decode(answer.profile) == example_profile(world.bundle_ref.sha256)
    assert script.files == [world.bundle]
    assert script.repeats == [3]


def test_a_later_releases_bundle_keeps_its_asked_name(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted
) -> None:
    """What this release writes of its manifest leaves out the field that it does not know."""
    later = msgspec.msgpack.encode(msgspec.msgpack.decode(world.bundle.encoded) | {"new": 1})
    for data in world.bundle.blobs.values():
        publish_blob(asker.server.session, asker.topics, data, tiny.CHUNK)
    ref = publish_blob(asker.server.session, asker.topics, later, tiny.CHUNK)
    ready(start_scripted, asker)
    script.go.set()

    asker.ask(ref)

    assert ref.sha256 != world.bundle_ref.sha256
    assert profiles.decode(asker.last_word().profile).bundle == ref.sha256


def test_a_request_that_comes_again_is_measured_once_and_answered_again(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted
) -> None:
    ready(start_scripted, asker)
    ref = asker.publish(world.bundle)
    for _ in range(2):
        asker.ask(ref)
        assert asker.answer().state == "taken"
    script.go.set()
    first = asker.answer()

    asker.ask(ref)

    assert asker.answer() == first
    assert len(script.files) == 1


def test_the_files_of_a_profile_are_gone_after_it(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted, tmp_path: Path
) -> None:
    ready(start_scripted, asker)
    script.go.set()
    asker.ask(asker.publish(world.bundle))
    asker.last_word()

    wait_until(lambda: not (tmp_path / "state" / "profile").exists(), "the folder of the profile is gone")


def test_files_of_killed_agents_are_removed(start_scripted: StartAgent, asker: Asker, tmp_path: Path) -> None:
    left = tmp_path / "state" / "profile"
    left.mkdir(parents=True)
    (left / "bundle.efl").write_bytes(b"half a bundle")

    ready(start_scripted, asker)

    assert not left.exists()


@pytest.mark.parametrize("fails", [BundleError("no engine runs it"), ValueError("an engine's own")])
def test_a_failed_measurement_is_declined(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted, fails: Exception
) -> None:
    agent = ready(start_scripted, asker)
    script.fails = fails
    script.go.set()
    asker.ask(asker.publish(world.bundle))

    answer = asker.last_word()

    assert (answer.state, answer.reason) == ("declined", "failed")
    assert decline_details(agent).endswith(str(fails))
    asker.server.open(world)
    assert asker.server.update().nonce == "n1"


def test_a_round_that_begins_stops_the_measurement_which_is_made_after_it(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted
) -> None:
    agent = ready(start_scripted, asker)
    asker.ask(asker.publish(world.bundle))
    wait_until(lambda: len(script.files) == 1, "the measurement begins")

    asker.server.open(world)
    agent.event("round")
    update = asker.server.update()
    asker.server.ack(update)
    script.go.set()

    assert asker.last_word().state == "done"
    assert update.nonce == "n1"


def test_a_busy_device_says_so_in_time(
    start_scripted: StartAgent, asker: Asker, endless: World, script: Scripted
) -> None:
    agent = ready(start_scripted, asker)
    asker.server.open(endless)
    agent.event("round")

    asker.ask(asker.publish(endless.bundle), within_s=2.0)

    answer = asker.last_word()
    assert (answer.state, answer.reason) == ("declined", "busy")
    assert script.files == []


def test_another_engines_bundle_is_declined(start_scripted: StartAgent, asker: Asker, world: World) -> None:
    agent = ready(start_scripted, asker)

    asker.ask(world.bundle_ref, kind="executorch")

    answer = asker.last_word()
    assert answer.reason == "no-bundle"
    assert "runs onnx, offered are executorch" in decline_details(agent)


def test_a_bundle_that_needs_more_memory_is_declined(
    start_scripted: StartAgent, asker: Asker, script: Scripted
) -> None:
    bundle = tiny.make_bundle()
    graphs = tuple(
        msgspec.structs.replace(graph, planned_bytes=3 << 30 if graph.name == "train" else 1)
        for graph in bundle.manifest.graphs
    )
    large = BundleArchive(msgspec.structs.replace(bundle.manifest, graphs=graphs), {})
    agent = ready(start_scripted, asker)

    asker.ask(asker.publish(large))

    answer = asker.last_word()
    assert answer.reason == "no-memory"
    said = decline_details(agent)
    assert "3072.0 MiB" in said and "1024.0 MiB" in said
    assert script.files == []


@pytest.mark.parametrize("signed", ["by its server", "by another", "not at all"])
def test_a_device_with_a_key_profiles_only_what_its_server_signed(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted, tmp_path: Path, signed: str
) -> None:
    ours, other = Signer(tmp_path / "ours.key"), Signer(tmp_path / "other.key")
    ready(start_scripted, asker, server_key=ours.public_key)
    asker.seal = speaker_in(tmp_path / "ours.key").seal
    script.go.set()
    ref = asker.publish(world.bundle)
    signer = {"by its server": ours, "by another": other}.get(signed)

    asker.ask(ref, signatures={"onnx": signer.sign(ref.sha256)} if signer else {})

    answer = asker.last_word()
    assert (answer.state, answer.reason) == (
        ("done", "") if signed == "by its server" else ("declined", "signature")
    )
    assert len(script.files) == (signed == "by its server")


GOOD = b"what was meant"
BLOBS: dict[str, tuple[BlobRef, bytes, str]] = {
    "no manifest": (describe(GOOD, tiny.CHUNK), GOOD, "manifest is malformed"),
    "damaged": (describe(GOOD, tiny.CHUNK), b"what is there", "wrong digest"),
    "missing": (describe(GOOD, tiny.CHUNK), b"", "did not arrive"),
    "huge": (BlobRef(sha256="ab" * 32, size=1 << 50, chunk=1 << 49, digests=b"\0" * 64), b"", "its manifest"),
    "no reference": (BlobRef(sha256="not a digest", size=-1, chunk=0), b"", "malformed"),
}


@pytest.mark.parametrize("case", by_default(BLOBS, ("missing", "damaged", "huge")))
def test_an_unreadable_bundle_is_declined(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted, limits: Limits, case: str
) -> None:
    ref, there, said = BLOBS[case]
    waits = {"fetch_timeout_s": 1.0, "fetch_retries": 1} if case == "missing" else {}
    agent = ready(start_scripted, asker, limits=patient(limits, **waits))
    if there:
        asker.server.publish(asker.topics.blob_chunk(ref.sha256, 0), there, retain=True)

    asker.ask(ref)

    answer = asker.last_word()
    assert (answer.state, answer.reason) == ("declined", "no-memory" if case == "huge" else "failed")
    assert said in decline_details(agent)
    asker.server.open(world)
    assert asker.server.update().nonce == "n1"
    assert agent.alive
    assert script.files == []


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "garbage",
    [*GARBAGE, msgspec.msgpack.encode({"v": 1, "nonce": "+/#", "bundles": {}, "within_s": 1.0})],
    ids=lambda data: data[:12].hex(),
)
def test_a_malformed_request_is_refused_and_the_agent_goes_on(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted, garbage: bytes
) -> None:
    agent = ready(start_scripted, asker)
    topic = asker.server.mine.profile_requests
    asker.server.publish(topic, garbage)
    assert f"ignored a message on {topic}" in agent.event("refused").text

    script.go.set()
    asker.ask(asker.publish(world.bundle))

    assert asker.last_word().state == "done"


@pytest.mark.parametrize("change", [{"within_s": float("nan")}, {"within_s": 0.0}, {"repeat": 10**6}])
def test_a_request_beyond_all_bounds_is_refused(
    start_scripted: StartAgent, asker: Asker, world: World, change: dict[str, object]
) -> None:
    agent = ready(start_scripted, asker)

    asker.ask(world.bundle_ref, **change)

    assert "ignored a message" in agent.event("refused").text


def test_the_owners_rules_are_asked_no_more_often_than_requests_are_taken(
    start_scripted: StartAgent, asker: Asker, world: World, limits: Limits, tmp_path: Path
) -> None:
    """They may run a command of the owner's."""
    asked = tmp_path / "asked"
    command = ("sh", "-c", f"echo x >> {asked}; exit 1")
    policy = OwnerPolicy(charging=True, commands={"charging": command})
    ready(start_scripted, asker, policy=policy, limits=patient(limits, profiles_an_hour=3))
    reasons = []
    for number in range(6):
        asker.send(world.bundle_ref, nonce=f"{number:016x}")
        reasons.append(asker.answer().reason)

    assert reasons == ["policy"] * 3 + ["busy"] * 3
    assert asked.read_text().count("x") in (3, 4)  # and once for what its hello says of power


def test_an_agent_that_stops_ends_its_measurement(
    start_scripted: StartAgent, asker: Asker, world: World, script: Scripted
) -> None:
    agent = ready(start_scripted, asker)
    asker.ask(asker.publish(world.bundle))
    wait_until(lambda: len(script.files) == 1, "the measurement begins")

    agent.stop()

    assert agent.error is None


# -- requests for profiles whose asker has left: nothing is measured for nobody ----------------------------


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
