"""`edgefl device personalize` with a bundle and weights from files, and what its options and answers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.cli import app
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import BundleArchive, write_bundle
from edgefl_device.personal.personalize import graphs_of
from edgefl_device.round.offline import offline_job, read_weights
from tests.analysis.personal.tiers import Tier
from tests.cli.runner import runner
from tests.device_runtime.personal.asked import announcement, run, samples
from tests.support.errors import BundleError, ConfigError, DataError, refuses


def _files(tier: Tier, folder: Path) -> list[str]:
    write_bundle(tier.bundle, folder / "tier.efl")
    weights = {name: tensor.numpy() for name, tensor in tier.spec.weights.items()}
    (folder / "model.safetensors").write_bytes(tensors.dump(weights))
    return ["--bundle", str(folder / "tier.efl"), "--weights", str(folder / "model.safetensors")]


def test_files_equal_the_broker(publish: Callable[..., list[str]], tier: Tier, tmp_path: Path) -> None:
    data = ["--data", str(samples(tmp_path / "data.npz", tier, 40)), "--alpha", "0.25"]

    fetched = run(publish(tier, announcement(tier)), tmp_path, *data)
    read = run(_files(tier, tmp_path), tmp_path, *data)

    where = ("round", "model_version")
    assert {k: v for k, v in read.items() if k not in where} == {
        k: v for k, v in fetched.items() if k not in where
    }


def test_adapted_weights_can_be_adapted_again(tier: Tier, tmp_path: Path) -> None:
    options = _files(tier, tmp_path)
    data = ["--data", str(samples(tmp_path / "data.npz", tier, 40))]
    out = tmp_path / "mine.safetensors"
    first = run(options, tmp_path, *data, "--out", str(out))

    second = run([*options[:2], "--weights", str(out)], tmp_path, *data)

    assert second["before"] | {"steps": 1} == first["after"]


def test_samples_of_their_own_can_judge(tier: Tier, tmp_path: Path) -> None:
    options = _files(tier, tmp_path)
    data = ["--data", str(samples(tmp_path / "data.npz", tier, 40))]
    later = ["--test-data", str(samples(tmp_path / "later.npz", tier, 14, seed=2))]

    found = {
        protocol: run(options, tmp_path, *data, *later, "--protocol", protocol)
        for protocol in ("train_support", "split_test", "paper_literal")
    }

    sizes = {protocol: (report["support"], report["query"]) for protocol, report in found.items()}
    assert sizes == {"train_support": (40, 14), "split_test": (7, 7), "paper_literal": (14, 14)}
    assert [report["leaks"] for report in found.values()] == [False, False, True]
    assert found["split_test"]["repeated"]
    assert not found["train_support"]["repeated"]


def test_no_step_and_a_step_of_size_0_leave_accuracy_as_it_is(tier: Tier, tmp_path: Path) -> None:
    options = [*_files(tier, tmp_path), "--data", str(samples(tmp_path / "data.npz", tier, 40))]

    for more in (["--steps", "0"], ["--alpha", "0", "--steps", "4"]):
        found = run(options, tmp_path, *more)
        assert found["after"]["loss"] == found["before"]["loss"]
        assert found["after"]["metrics"] == found["before"]["metrics"]


def test_the_same_file_for_both_is_refused(tier: Tier, tmp_path: Path) -> None:
    data = str(samples(tmp_path / "data.npz", tier, 40))

    with pytest.raises(ConfigError, match="adapted to what judges it"):
        run(_files(tier, tmp_path), tmp_path, "--data", data, "--test-data", data)


def test_too_few_samples_to_split_are_refused(tier: Tier, tmp_path: Path) -> None:
    data = str(samples(tmp_path / "data.npz", tier, 1))

    with refuses(DataError, samples=1):
        run(_files(tier, tmp_path), tmp_path, "--data", data)


def test_a_bundle_without_such_a_graph_says_so(tier: Tier, tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(tier.bundle.manifest, personalize="")
    options = _files(tier, tmp_path)
    write_bundle(BundleArchive(manifest, tier.bundle.blobs), tmp_path / "tier.efl")

    with refuses(BundleError, algorithm="sgd"):
        run(options, tmp_path, "--data", str(samples(tmp_path / "data.npz", tier, 40)))


def test_weights_of_another_model_are_refused(tier: Tier, tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(tensors.dump({"head.weight": np.zeros(3, np.float32)}))
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")

    other = read_weights(tmp_path / "other.safetensors")
    with pytest.raises(BundleError, match="which is not in other"):
        offline_job(tier.bundle, other, graphs_of(tier.bundle.manifest), "other.safetensors")
    with refuses(DataError, path=str(tmp_path / "broken.safetensors"), error=...):
        read_weights(tmp_path / "broken.safetensors")
    with refuses(DataError, path=str(tmp_path / "none.safetensors")):
        read_weights(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        ["--bundle", "x.efl"],
        ["--weights", "x.safetensors"],
        [],
        ["--id", "a/b"],
        ["--alpha", "inf", "--id", "x"],
    ],
)
def test_options_that_cannot_be_used_are_refused(tier: Tier, tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(ConfigError):
        run(options, tmp_path, "--data", str(samples(tmp_path / "data.npz", tier, 4)))


def test_people_read_a_table(tier: Tier, tmp_path: Path) -> None:
    data = str(samples(tmp_path / "data.npz", tier, 6))
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
    data = str(samples(tmp_path / "data.npz", tier, 4))

    with pytest.raises(ConfigError, match="lists all limits"):
        run(["--id", "phone"], tmp_path, "--data", data, "--limit=patience=3")


def test_a_negative_step_is_refused_by_its_option(tier: Tier, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(["--alpha", "-1", "--id", "x"], tmp_path, "--data", str(samples(tmp_path / "data.npz", tier, 4)))
