"""`edgefl device personalize`: the announced model from a real broker, or a bundle and weights from files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import Result

from device_runtime.link.identity import ServerTrust
from device_runtime.personal.personalize import graphs_of
from device_runtime.round.offline import offline, read_weights
from device_runtime.store.database import Store
from device_runtime.store.file import FILE
from edgefl.cli import app
from edgefl.wire import folders, tensors
from edgefl.wire.bundle.archive import Bundle, write_bundle
from edgefl.wire.bundle.signatures import Signer
from edgefl.wire.errors import (
    BrokerError,
    BundleError,
    ConfigError,
    DataError,
    IdentityError,
    RoundDeclined,
    StoreError,
)
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.envelope import Seal, bare
from edgefl.wire.mqtt.messages import Offer, Round
from edgefl.wire.mqtt.topics import Topics
from tests.analysis.personal.tiers import Tier, tier_of
from tests.cli.runner import runner
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime.agent.link import publish_blob
from tests.wire.mqtt.events import PATIENCE_S, wait_up
from tests.wire.mqtt.speakers import speaker_in

CHUNK = 1024
SIGNED = "ab" * 32


@pytest.fixture(scope="module")
def tier() -> Tier:
    return tier_of("mlp", chunk=CHUNK, cut=0)


@pytest.fixture(scope="module")
def prefixed() -> Tier:
    """The weak tier of the same model: it runs a frozen unit first."""
    return tier_of("mlp", chunk=CHUNK, cut=1)


def _samples(path: Path, tier: Tier, count: int, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, *tier.spec.sample.shape)).astype(np.float32)
    np.savez(path, x=x, y=rng.integers(0, 3, count))
    return path


def _announcement(
    tier: Tier, state: str = "closed", *, others: Sequence[str] = (), signed: bytes = b""
) -> Round:
    """Of a tier, and of ``others`` with the same bundle."""
    job = tier.job(CHUNK)
    bundles = dict.fromkeys(("tier", *others), job.bundle)
    return Round(
        run="run",
        round=3,
        state=state,  # type: ignore[arg-type]
        model_version="v3",
        offers={"onnx": Offer(bundles=bundles, signatures={"tier": signed} if signed else {})},
        units=job.units,
        hyper={"alpha": 0.25},
        base=2,
        deadline=0.0,
    )


@pytest.fixture
def publish(broker: BrokerProcess, connect: SessionFactory, federation: str) -> Callable[..., list[str]]:
    """Leave a tier's round on the broker; gives the options of a device that asks for it."""
    session, topics = connect(broker.address), Topics(federation)
    wait_up(session)

    def leave(tier: Tier, announced: Round, seal: Seal = bare) -> list[str]:
        for data in tier.blobs.values():
            publish_blob(session, topics, data, CHUNK)
        message = seal(topics.current_round, announced)
        assert session.publish(topics.current_round, message, retain=True).wait(PATIENCE_S)
        return ["--id", "phone", "--federation", federation, "--broker", str(broker.address)]

    return leave


def _invoked(options: list[str], folder: Path, *more: str) -> Result:
    limits = ["--limit=fetch_timeout_s=2", "--limit=fetch_window=4"]
    arguments = [
        "device",
        "personalize",
        *options,
        *limits,
        "--store",
        str(folder / "store"),
        "--json",
        *more,
    ]
    done = runner().invoke(app, arguments)
    if done.exception is not None:
        raise done.exception
    return done


def _run(options: list[str], folder: Path, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_invoked(options, folder, *more).stdout)
    return found


@pytest.mark.parametrize("state", ["open", "closed", "done"])
def test_the_announced_model_is_adapted_whatever_its_round_is(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path, state: str
) -> None:
    options = publish(tier, _announcement(tier, state))
    data = _samples(tmp_path / "data.npz", tier, 40)

    found = _run(options, tmp_path, "--data", str(data), "--steps", "5", "--curve")

    assert (found["round"], found["model_version"], found["tier"]) == (3, "v3", "tier")
    assert found["alpha"] == 0.25  # what the round says, not the bundle
    assert (found["support"], found["query"]) == (32, 8)
    assert [point["steps"] for point in found["curve"]] == [0, 1, 2, 5, 10]
    assert found["before"] == found["curve"][0]
    assert found["after"] == found["curve"][3]
    assert not found["leaks"]


def test_a_tier_with_frozen_units_is_adapted_behind_them(
    publish: Callable[..., list[str]], prefixed: Tier, tmp_path: Path
) -> None:
    options = publish(prefixed, _announcement(prefixed))
    data = _samples(tmp_path / "data.npz", prefixed, 40)
    out = tmp_path / "mine.safetensors"

    found = _run(
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
    options = publish(tier, _announcement(tier))
    data = str(_samples(tmp_path / "data.npz", tier, 40))
    first = _run(options, tmp_path, "--data", data)
    session, topics = connect(broker.address), Topics(federation)
    wait_up(session)
    for data_of in tier.blobs.values():  # the server has cleared its blobs since
        ref = tier.add(data_of, CHUNK)
        for index in range(ref.count):
            assert session.publish(topics.blob_chunk(ref.sha256, index), b"", retain=True).wait(PATIENCE_S)

    assert _run(options, tmp_path, "--data", data) == first


def test_a_bundle_that_the_key_did_not_sign_is_not_run(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path
) -> None:
    signer = Signer(tmp_path / "key")
    job = tier.job(CHUNK)
    data = str(_samples(tmp_path / "data.npz", tier, 40))
    signed = _announcement(tier, signed=signer.sign(job.bundle.sha256))

    options = publish(tier, signed, speaker_in(tmp_path / "key").seal)
    assert _run(options, tmp_path, "--data", data, "--server-key", signer.public_key)["round"] == 3
    unsigned = publish(tier, _announcement(tier), speaker_in(tmp_path / "key", first=2).seal)
    with pytest.raises(BundleError, match="no signature"):
        _run(unsigned, tmp_path, "--data", data, "--server-key", signer.public_key)
    with pytest.raises(IdentityError, match="and this device knows"):
        _run(options, tmp_path, "--data", data, "--server-key", Signer(tmp_path / "other").public_key)


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
    ServerTrust(store, (), lambda *_: None).open(Round, topic, speaker_in(path).seal(topic, announced))


@pytest.mark.parametrize("running", [True, False])
def test_the_servers_key_is_the_one_that_the_devices_agent_knows(
    publish: Callable[..., list[str]],
    tier: Tier,
    tmp_path: Path,
    agent: Store,
    federation: str,
    running: bool,
) -> None:
    signer, data = Signer(tmp_path / "key"), str(_samples(tmp_path / "data.npz", tier, 40))
    announced = _announcement(tier, signed=signer.sign(tier.job(CHUNK).bundle.sha256))
    _learnt(agent, tmp_path / "key", federation, announced)
    if not running:
        agent.close()

    forged = publish(tier, announced, speaker_in(tmp_path / "other").seal)
    with pytest.raises(IdentityError, match="and this device knows"):
        _run(forged, tmp_path, "--data", data)
    options = publish(tier, announced, speaker_in(tmp_path / "key", first=2).seal)
    assert _run(options, tmp_path, "--data", data)["round"] == 3


def test_whom_a_device_believes_that_knows_nobody_is_told(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path, agent: Store, federation: str
) -> None:
    signer = Signer(tmp_path / "key")
    announced = _announcement(tier, signed=signer.sign(tier.job(CHUNK).bundle.sha256))
    options = publish(tier, announced, speaker_in(tmp_path / "key").seal)
    data = str(_samples(tmp_path / "data.npz", tier, 40))

    found = _invoked(options, tmp_path, "--data", data)

    assert (
        f"trust on first use: this device follows the server with the key {signer.public_key}" in found.stderr
    )
    assert not _invoked(options, tmp_path, "--data", data).stderr


def test_a_store_of_the_agent_that_cannot_be_read_is_no_reason_to_believe_anybody(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path, agent: Store
) -> None:
    agent.close()
    (agent.folder / FILE).write_bytes(b"no database, and long enough to be none" * 99)
    options = publish(tier, _announcement(tier))
    data = str(_samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(StoreError, match="name the server's key by `server_key`"):
        _run(options, tmp_path, "--data", data)


def test_a_manifest_that_is_too_large_is_not_fetched(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path
) -> None:
    options = publish(tier, _announcement(tier))
    data = str(_samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(RoundDeclined, match="its manifest"):
        _run(options, tmp_path, "--data", data, "--limit=max_manifest_bytes=16")


def test_of_several_tiers_one_has_to_be_named(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path
) -> None:
    options = publish(tier, _announcement(tier, others=["other"]))
    data = str(_samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(ConfigError, match="one of other, tier by `tier`"):
        _run(options, tmp_path, "--data", data)
    with pytest.raises(ConfigError, match="no tier 'weak'"):
        _run(options, tmp_path, "--data", data, "--tier", "weak")
    assert _run(options, tmp_path, "--data", data, "--tier", "tier")["tier"] == "tier"


def test_a_federation_that_announced_nothing_is_named(
    broker: BrokerProcess, federation: str, tier: Tier, tmp_path: Path
) -> None:
    options = ["--id", "phone", "--federation", federation, "--broker", str(broker.address)]
    data = str(_samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(BrokerError, match=f"nothing is known of federation '{federation}'"):
        _run(options, tmp_path, "--data", data, "--limit=fetch_timeout_s=0.1")


# -- from files ------------------------------------------------------------------------------------------------


def _files(tier: Tier, folder: Path) -> list[str]:
    write_bundle(tier.bundle, folder / "tier.efl")
    weights = {name: tensor.numpy() for name, tensor in tier.spec.weights.items()}
    (folder / "model.safetensors").write_bytes(tensors.dump(weights))
    return ["--bundle", str(folder / "tier.efl"), "--weights", str(folder / "model.safetensors")]


def test_files_give_what_the_broker_gives(
    publish: Callable[..., list[str]], tier: Tier, tmp_path: Path
) -> None:
    data = ["--data", str(_samples(tmp_path / "data.npz", tier, 40)), "--alpha", "0.25"]

    fetched = _run(publish(tier, _announcement(tier)), tmp_path, *data)
    read = _run(_files(tier, tmp_path), tmp_path, *data)

    where = ("round", "model_version")
    assert {k: v for k, v in read.items() if k not in where} == {
        k: v for k, v in fetched.items() if k not in where
    }


def test_adapted_weights_can_be_adapted_again(tier: Tier, tmp_path: Path) -> None:
    options = _files(tier, tmp_path)
    data = ["--data", str(_samples(tmp_path / "data.npz", tier, 40))]
    out = tmp_path / "mine.safetensors"
    first = _run(options, tmp_path, *data, "--out", str(out))

    second = _run([*options[:2], "--weights", str(out)], tmp_path, *data)

    assert second["before"] | {"steps": 1} == first["after"]


def test_samples_of_their_own_can_judge(tier: Tier, tmp_path: Path) -> None:
    options = _files(tier, tmp_path)
    data = ["--data", str(_samples(tmp_path / "data.npz", tier, 40))]
    later = ["--test-data", str(_samples(tmp_path / "later.npz", tier, 14, seed=2))]

    found = {
        protocol: _run(options, tmp_path, *data, *later, "--protocol", protocol)
        for protocol in ("train_support", "split_test", "paper_literal")
    }

    sizes = {protocol: (report["support"], report["query"]) for protocol, report in found.items()}
    assert sizes == {"train_support": (40, 14), "split_test": (7, 7), "paper_literal": (14, 14)}
    assert [report["leaks"] for report in found.values()] == [False, False, True]
    assert found["split_test"]["repeated"]
    assert not found["train_support"]["repeated"]


def test_no_step_and_a_step_of_size_0_leave_accuracy_as_it_is(tier: Tier, tmp_path: Path) -> None:
    options = [*_files(tier, tmp_path), "--data", str(_samples(tmp_path / "data.npz", tier, 40))]

    for more in (["--steps", "0"], ["--alpha", "0", "--steps", "4"]):
        found = _run(options, tmp_path, *more)
        assert found["after"]["loss"] == found["before"]["loss"]
        assert found["after"]["metrics"] == found["before"]["metrics"]


def test_the_same_file_for_both_is_refused(tier: Tier, tmp_path: Path) -> None:
    data = str(_samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(ConfigError, match="adapted to what judges it"):
        _run(_files(tier, tmp_path), tmp_path, "--data", data, "--test-data", data)


def test_too_few_samples_to_split_are_refused(tier: Tier, tmp_path: Path) -> None:
    data = str(_samples(tmp_path / "data.npz", tier, 1))

    with pytest.raises(DataError, match="at least 2"):
        _run(_files(tier, tmp_path), tmp_path, "--data", data)


def test_a_bundle_without_such_a_graph_says_so(tier: Tier, tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(tier.bundle.manifest, personalize="")
    options = _files(tier, tmp_path)
    write_bundle(Bundle(manifest, tier.bundle.blobs), tmp_path / "tier.efl")

    with pytest.raises(BundleError, match="no graph that personalizes"):
        _run(options, tmp_path, "--data", str(_samples(tmp_path / "data.npz", tier, 40)))


def test_weights_of_another_model_are_refused(tier: Tier, tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(tensors.dump({"head.weight": np.zeros(3, np.float32)}))
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")

    other = read_weights(tmp_path / "other.safetensors")
    with pytest.raises(BundleError, match="which is not in other"):
        offline(tier.bundle, other, graphs_of(tier.bundle.manifest), "other.safetensors")
    with pytest.raises(DataError, match="holds no weights"):
        read_weights(tmp_path / "broken.safetensors")
    with pytest.raises(DataError, match="no file"):
        read_weights(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        ["--bundle", "x.efl"],
        ["--weights", "x.safetensors"],
        [],
        ["--id", "a/b"],
        ["--alpha", "-1", "--id", "x"],
        ["--alpha", "inf", "--id", "x"],
    ],
)
def test_options_that_cannot_be_used_are_refused(tier: Tier, tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(ConfigError):
        _run(options, tmp_path, "--data", str(_samples(tmp_path / "data.npz", tier, 4)))


def test_people_read_a_table(tier: Tier, tmp_path: Path) -> None:
    data = str(_samples(tmp_path / "data.npz", tier, 6))
    done = runner().invoke(app, ["device", "personalize", *_files(tier, tmp_path), "--data", data])

    told = " ".join(done.stdout.split())
    assert done.exit_code == 0
    for words in ("accuracy", "f1", "train_support", "with repetitions", "most frequent class"):
        assert words in told


# -- beside the agent's own options ----------------------------------------------------------------------------


def test_the_agent_needs_its_options_and_the_command_does_not() -> None:
    missing = runner().invoke(app, ["device", "--id", "phone"])
    helped = runner().invoke(app, ["device", "personalize", "--help"])
    again = runner().invoke(app, ["device"])

    assert (missing.exit_code, helped.exit_code, again.exit_code) == (2, 0, 2)
    assert "--data" in missing.stderr
    assert "--id" in again.stderr


def test_an_unknown_limit_is_refused(tier: Tier, tmp_path: Path) -> None:
    data = str(_samples(tmp_path / "data.npz", tier, 4))

    with pytest.raises(ConfigError, match="known limits"):
        _run(["--id", "phone"], tmp_path, "--data", data, "--limit=patience=3")
