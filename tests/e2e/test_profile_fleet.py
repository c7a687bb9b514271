"""`edgefl profile --fleet`: real devices on both engines answer over a real broker, and stand side by side."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.errors import BrokerError, BundleError, ConfigError, ParticipationError
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.archive import read_bundle, write_bundle
from edgefl.wire.mqtt.messages import ProfileOffer, ProfileRequest, encode
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.profiling.reports import DeviceReport, FleetReport
from tests.conftest import BrokerProcess, SessionFactory, on_other_broker
from tests.e2e.inside import Ran, edgefl
from tests.e2e.runs import EDGEFL, TINY
from tests.e2e.shared import made_once
from tests.wire.example_manifests import example_bundle
from tests.wire.mqtt.events import PATIENCE_S, wait_message, wait_up

pytestmark = pytest.mark.e2e
ENGINES = ("onnx", "executorch")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tier's bundle in each format, and local data of a device."""
    with made_once(tmp_path_factory, "exported") as folder:
        if not (folder / "bundles").exists():
            _export(folder)
    return folder


def _export(folder: Path) -> None:
    data = digits()
    write_client(folder / "data.npz", data.train_x[:40], data.train_y[:40])
    (folder / "federation.toml").write_text(TINY + "[tiers.strong]\n")
    formats = [word for engine in ENGINES for word in ("--format", engine)]
    done = edgefl("export", folder / "federation.toml", "--out", folder / "bundles", *formats)
    assert done.returncode == 0, done.stderr


StartDevice = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(
    exported: Path, broker: BrokerProcess, connect: SessionFactory, federation: str, tmp_path: Path
) -> Iterator[StartDevice]:
    """``start(name, engine)``: a device's process, known to the broker."""
    running: list[subprocess.Popen[bytes]] = []
    session = connect(broker.address)
    wait_up(session)

    def make(name: str, engine: str, *options: str) -> subprocess.Popen[bytes]:
        command = [*EDGEFL, "device", "--id", name, "--broker", str(broker.address), "--json"]
        command += ["--federation", federation, "--engine", engine, "--data", str(exported / "data.npz")]
        command += ["--store", str(tmp_path / name), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        running.append(process)
        event(process, "online")
        hello = Topics(federation).device(name).hello
        session.subscribe([hello])
        wait_message(session, hello)
        return process

    yield make
    for process in running:
        process.kill()
        process.wait()


def event(process: subprocess.Popen[bytes], name: str, words: str = "") -> str:
    """The text of the device's next event of this name with these words. One that does not come ends the device."""
    assert process.stdout is not None
    limit = threading.Timer(PATIENCE_S, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            said = json.loads(line)
            if said["event"] == name and words in said["text"]:
                return str(said["text"])
    finally:
        limit.cancel()
    raise AssertionError(f"the device ended, or said nothing for {PATIENCE_S} s, without {name!r} {words!r}")


Ask = Callable[..., Ran]


@pytest.fixture
def ask(broker: BrokerProcess, federation: str) -> Ask:
    def run(*arguments: str | Path) -> Ran:
        options = ("--broker", str(broker.address), "--federation", federation)
        return edgefl("profile", "--fleet", *options, "--repeat", "2", *arguments)

    return run


def report_of(ran: Ran) -> dict[str, DeviceReport]:
    assert ran.returncode == 0, ran.stderr
    return {row.device: row for row in msgspec.json.decode(ran.stdout, type=FleetReport).devices}


@pytest.mark.slow
@on_other_broker
def test_both_engines_are_profiled(exported: Path, start: StartDevice, ask: Ask, tmp_path: Path) -> None:
    key = tmp_path / "server.key"
    public = edgefl("key", "new", key).stdout.split()[-1]
    for engine in ENGINES:
        start(f"phone-{engine}", engine, "--server-key", public)
    start("small", "onnx", "--memory", "1KiB")
    start("gone", "onnx").kill()
    page = tmp_path / "fleet.html"

    found = report_of(ask(exported / "bundles", "--json", "--html", page, "--sign-key", key))

    states = {name: (row.state, row.reason) for name, row in found.items()}
    done = {f"phone-{engine}": ("done", "") for engine in ENGINES}
    assert states == {**done, "small": ("declined", "no-memory"), "gone": ("offline", "")}
    offered = {made.manifest.format: made for made in map(read_bundle, (exported / "bundles").glob("*.efl"))}
    for engine in ENGINES:
        profile = found[f"phone-{engine}"].profile
        assert profile is not None
        assert (profile.engine, profile.bundle) == (engine, offered[engine].ref(1 << 17).sha256)
        assert {graph.name for graph in profile.steps} == {"train"}
        assert profile.step_ms > 0
        assert all(graph.run.calls == 2 and graph.load_ms > 0 for graph in profile.graphs)
        assert profile.peak_bytes >= max(graph.peak.rss_bytes for graph in profile.graphs)
        assert profile.timeline.moments
    written = page.read_text(encoding="utf-8")
    assert all(f"phone-{engine} (strong)" in written for engine in ENGINES)
    assert "gone: no profile, offline" in written


@pytest.mark.slow
def test_the_table_names_each_device_and_its_state(exported: Path, start: StartDevice, ask: Ask) -> None:
    start("phone-1", "onnx")
    start("gone", "onnx").kill()

    ran = ask(exported / "bundles" / "strong.efl")

    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert any("phone-1" in line and "onnx" in line for line in lines)
    assert any("gone" in line and "offline" in line for line in lines)


@pytest.mark.slow
def test_bad_requests_leave_a_device_alive_and_able_to_answer(
    exported: Path,
    start: StartDevice,
    ask: Ask,
    broker: BrokerProcess,
    connect: SessionFactory,
    federation: str,
) -> None:
    device = start("phone", "onnx")
    topics = Topics(federation)
    session = connect(broker.address)
    wait_up(session)
    huge = BlobRef(sha256="ab" * 32, size=1 << 50, chunk=1 << 49, digests=b"\0" * 64)
    damaged = describe(b"what was meant", 1024)
    there = topics.profile("dd" * 8).blob_chunk(damaged.sha256, 0)
    assert session.publish(there, b"what is there", retain=True).wait(PATIENCE_S)
    for payload in (b"\xc1", b"\x00" * 500_000, encode(ProfileRequest(nonce="x/#", bundles={}, within_s=1))):
        assert session.publish(topics.device("phone").profile_requests, payload).wait(PATIENCE_S)
    assert "ignored a message" in event(device, "refused"), "one word for all three"
    for nonce, ref, said in (
        ("aa" * 8, huge, "limits.max_manifest_bytes"),
        ("dd" * 8, damaged, "wrong digest"),
    ):
        request = ProfileRequest(nonce=nonce, bundles={"onnx": ref}, within_s=60)
        offer = encode(ProfileOffer(until=0.0, blobs=()))
        assert session.publish(topics.profile(nonce).offer, offer, retain=True).wait(PATIENCE_S)
        assert session.publish(topics.device("phone").profile_requests, encode(request)).wait(PATIENCE_S)
        assert said in event(device, "profile", "declined")

    found = report_of(ask(exported / "bundles" / "strong.efl", "--json", "--device", "phone"))

    assert found["phone"].state == "done"
    assert device.poll() is None


@pytest.mark.slow
def test_a_fleet_without_profiles_is_an_error(exported: Path, start: StartDevice, ask: Ask) -> None:
    start("phone", "onnx")
    only = exported / "bundles" / "strong.executorch.efl"

    nobody = ask(only)

    assert nobody.returncode == ParticipationError.exit_code
    assert "none of 1 devices" in nobody.stderr
    assert "no-bundle" in nobody.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["--broker", "127.0.0.1:1"], BrokerError, "127.0.0.1:1"),
        (["--broker", "nowhere:x"], BrokerError, "nowhere:x"),
        (["--federation", "+"], ConfigError, "not usable"),
        (["--device", "a/b"], ConfigError, "not usable"),
        (["--threads", "3"], ConfigError, "--threads"),
        (["--tier", "gold"], ConfigError, "none of the bundles is of tier gold"),
        (["--engine", "executorch"], ConfigError, "in format executorch"),
        (["--repeat", "1001"], ConfigError, "--repeat 1001"),
        (["--sign-key", "nowhere.key"], ConfigError, "no key nowhere.key"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    tmp_path: Path, ask: Ask, arguments: list[str], error: type[ConfigError], said: str
) -> None:
    write_bundle(example_bundle(), tmp_path / "weak.efl")

    ran = ask(tmp_path / "weak.efl", *arguments)

    assert ran.returncode == error.exit_code, ran.stderr
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_folder_without_bundles_and_a_damaged_bundle_are_named(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "damaged.efl").write_bytes(b"PK")

    for target, error in ((tmp_path / "damaged.efl", BundleError), (tmp_path, BundleError)):
        ran = ask(target)
        assert ran.returncode == error.exit_code, ran.stderr
        assert "damaged.efl" in ran.stderr
    (tmp_path / "damaged.efl").unlink()
    ran = ask(tmp_path)
    assert ran.returncode == ConfigError.exit_code
    assert "there is no bundle" in ran.stderr
