"""`edgefl device personalize`: the announced model from a real broker, by the word of the server that the device knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.wire import folders, tensors
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.identity import ServerTrust
from edgefl_device.store.database import FILE, Store
from tests.analysis.personal.tiers import Tier
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime.personal.asked import CHUNK, announcement, invoked, run, samples
from tests.support.device_logs import RecordedLog
from tests.support.errors import (
    BrokerError,
    BundleError,
    ConfigError,
    IdentityError,
    RoundDeclined,
    StoreError,
    refuses,
)
from tests.wire.mqtt.events import PATIENCE_S, wait_up
from tests.wire.mqtt.speakers import speaker_in


@pytest.mark.parametrize("state", ["open", "closed", "done"])
def test_the_announced_model_is_adapted_whatever_its_round_is(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path, state: str
) -> None:
    options = publish(tier, announcement(tier, state))
    data = samples(tmp_path / "data.npz", tier, 40)

    found = run(options, tmp_path, "--data", str(data), "--steps", "5", "--curve")

    assert (found["round"], found["model_version"], found["tier"]) == (3, "v3", "tier")
    assert found["alpha"] == 0.25  # what the round says, not the bundle
    assert (found["support"], found["query"]) == (32, 8)
    assert [point["steps"] for point in found["curve"]] == [0, 1, 2, 5, 10]
    assert found["before"] == found["curve"][0]
    assert found["after"] == found["curve"][3]
    assert not found["leaks"]


@pytest.mark.slow
def test_a_tier_with_frozen_units_is_adapted_behind_them(
    publish: Callable[..., list[str]], prefixed: Tier, tmp_path: Path
) -> None:
    options = publish(prefixed, announcement(prefixed))
    data = samples(tmp_path / "data.npz", prefixed, 40)
    out = tmp_path / "mine.safetensors"

    found = run(
        options,
        tmp_path,
        "--data",
        str(data),
        "--protocol",
        "paper_literal",
        "--steps",
        "20",
        "--out",
        str(out),
    )

    adapted, first = tensors.load(out.read_bytes()), prefixed.spec.units[0]
    weights = {name: tensor.numpy() for name, tensor in prefixed.spec.weights.items()}
    assert adapted.keys() == weights.keys()
    assert found["after"]["loss"] < found["before"]["loss"]
    for name, array in weights.items():
        assert np.array_equal(adapted[name], array) == name.startswith(f"{first}."), name
    assert found["leaks"]
    assert list((tmp_path / "store").glob("tmp*")) == []


def test_what_was_fetched_is_there_for_the_next_time(
    publish: Callable[..., list[str]],
    tier: Tier,
    tmp_path: Path,
    connect: SessionFactory,
    broker: BrokerProcess,
    federation: str,
) -> None:
    options = publish(tier, announcement(tier))
    data = str(samples(tmp_path / "data.npz", tier, 40))
    first = run(options, tmp_path, "--data", data)
    session, topics = connect(broker.address), Topics(federation)
    wait_up(session)
    for data_of in tier.blobs.values():  # the server has cleared its blobs since
        ref = tier.add(data_of, CHUNK)
        for index in range(ref.count):
            assert session.publish(topics.blob_chunk(ref.sha256, index), b"", retain=True).wait(PATIENCE_S)

    assert run(options, tmp_path, "--data", data) == first


def test_an_unsigned_bundle_is_not_run(publish: Callable[..., list[str]], tier: Tier, tmp_path: Path) -> None:
    signer = Signer(tmp_path / "key")
    job = tier.job(CHUNK)
    data = str(samples(tmp_path / "data.npz", tier, 40))
    signed = announcement(tier, signed=signer.sign(job.bundle.sha256))

    options = publish(tier, signed, speaker_in(tmp_path / "key").seal)
    assert run(options, tmp_path, "--data", data, "--server-key", signer.public_key)["round"] == 3
    unsigned = publish(tier, announcement(tier), speaker_in(tmp_path / "key", first=2).seal)
    with refuses(BundleError, sha256=..., signed=False):
        run(unsigned, tmp_path, "--data", data, "--server-key", signer.public_key)
    with pytest.raises(IdentityError, match="and this device knows"):
        run(options, tmp_path, "--data", data, "--server-key", Signer(tmp_path / "other").public_key)


@pytest.fixture
def agent(
    federation: str, limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """The store of the device's agent, which is running."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = folders.store(federation, "phone")
    made = Store(folder, limit_bytes=1 << 20, history_rounds=1, federation=federation, device="phone")
    yield made
    made.close()


def _learnt(store: Store, path: Path, federation: str, announced: Round) -> None:
    """The agent heard the server whose key is in ``path``."""
    topic = Topics(federation).current_round
    ServerTrust(store, (), RecordedLog()).open(Round, topic, speaker_in(path).seal(topic, announced))


@pytest.mark.parametrize("running", [True, False])
def test_the_servers_key_is_the_one_that_the_devices_agent_knows(
    publish: Callable[..., list[str]],
    tier: Tier,
    tmp_path: Path,
    agent: Store,
    federation: str,
    running: bool,
) -> None:
    signer, data = Signer(tmp_path / "key"), str(samples(tmp_path / "data.npz", tier, 40))
    announced = announcement(tier, signed=signer.sign(tier.job(CHUNK).bundle.sha256))
    _learnt(agent, tmp_path / "key", federation, announced)
    if not running:
        agent.close()

    forged = publish(tier, announced, speaker_in(tmp_path / "other").seal)
    with pytest.raises(IdentityError, match="and this device knows"):
        run(forged, tmp_path, "--data", data)
    options = publish(tier, announced, speaker_in(tmp_path / "key", first=2).seal)
    assert run(options, tmp_path, "--data", data)["round"] == 3


def test_whom_a_device_believes_that_knows_nobody_is_told(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path, agent: Store, federation: str
) -> None:
    signer = Signer(tmp_path / "key")
    announced = announcement(tier, signed=signer.sign(tier.job(CHUNK).bundle.sha256))
    options = publish(tier, announced, speaker_in(tmp_path / "key").seal)
    data = str(samples(tmp_path / "data.npz", tier, 40))

    found = invoked(options, tmp_path, "--data", data)

    assert (
        f"trust on first use: this device follows the server with the key {signer.public_key}" in found.stderr
    )
    assert not invoked(options, tmp_path, "--data", data).stderr


def test_an_unreadable_store_of_the_agent_earns_no_trust(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path, agent: Store
) -> None:
    agent.close()
    (agent.folder / FILE).write_bytes(b"no database, and long enough to be none" * 99)
    options = publish(tier, announcement(tier))
    data = str(samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(StoreError, match="name the server's key by `server_key`"):
        run(options, tmp_path, "--data", data)


def test_large_manifests_are_not_read(publish: Callable[..., list[str]], tier: Tier, tmp_path: Path) -> None:
    options = publish(tier, announcement(tier))
    data = str(samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(RoundDeclined, match="its manifest"):
        run(options, tmp_path, "--data", data, "--limit=max_manifest_bytes=16")


def test_one_of_several_tiers_is_named(publish: Callable[..., list[str]], tier: Tier, tmp_path: Path) -> None:
    options = publish(tier, announcement(tier, others=["other"]))
    data = str(samples(tmp_path / "data.npz", tier, 40))

    with refuses(ConfigError, tier="", offered=["other", "tier"]):
        run(options, tmp_path, "--data", data)
    with refuses(ConfigError, tier="weak", offered=["other", "tier"]):
        run(options, tmp_path, "--data", data, "--tier", "weak")
    assert run(options, tmp_path, "--data", data, "--tier", "tier")["tier"] == "tier"


def test_a_federation_that_announced_nothing_is_named(
    broker: BrokerProcess, federation: str, tier: Tier, tmp_path: Path
) -> None:
    options = ["--id", "phone", "--federation", federation, "--broker", str(broker.address)]
    data = str(samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(BrokerError, match=f"nothing is known of federation '{federation}'"):
        run(options, tmp_path, "--data", data, "--limit=fetch_timeout_s=0.1")
