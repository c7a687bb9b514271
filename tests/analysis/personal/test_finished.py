"""`edgefl personalize`: every device of a finished run, its own tier's model, and a test shard like its data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgefl.analysis.personal.finished import FinishedRun
from edgefl.analysis.personal.report import EvaluationSetting
from edgefl.api.analysis import personalize
from edgefl.api.simulate import simulate
from edgefl.cli import app
from edgefl.data.dataset import write_client
from edgefl.wire import tensors
from edgefl_device.data.support import SampleShards
from tests.analysis.personal.conftest import Leave
from tests.cli.runner import runner
from tests.support.errors import ConfigError, DataError, refuses

SHORT = ("--steps", "0,1,5", "--batch", "8")


def test_every_user_is_judged_on_its_own_classes_in_its_own_proportions(leave: Leave) -> None:
    finished = FinishedRun.open(leave())

    for user in finished.users:
        labels = user.y.numpy()
        train, test = (
            np.bincount(labels[rows], minlength=10) for rows in (user.shards.train, user.shards.test)
        )
        assert ((train > 0) == (test > 0)).all()
        assert np.abs(train / train.sum() - test / test.sum()).max() < 0.05


def test_no_test_sample_judges_two_users(leave: Leave) -> None:
    finished = FinishedRun.open(leave())

    shards = [user.x[rows].reshape(len(rows), -1) for user in finished.users for rows in [user.shards.test]]
    rows = [tuple(row.tolist()) for shard in shards for row in shard]

    assert len(rows) == len(set(rows))


def test_steps_on_a_users_own_classes_help_every_tier(leave: Leave) -> None:
    finished = FinishedRun.open(leave())

    report = finished.report(EvaluationSetting(0.3, (10,), 8))

    assert [user.name for user in report.users] == [f"strong-{k}" for k in range(4)] + ["half-0", "half-1"]
    assert set(report.groups) == {"strong", "half"}
    assert report.curve[-1].value("accuracy") > report.before + 0.2
    assert report.left_out == {}


def test_the_model_of_a_width_tier_is_its_part_of_the_whole(leave: Leave) -> None:
    finished = FinishedRun.open(leave())

    whole, half = finished.adapter("strong").weights, finished.adapter("half").weights

    assert {tensor.numel() for tensor in whole.values()} != {tensor.numel() for tensor in half.values()}


def test_the_server_s_memory_beside_the_weights_does_no_harm(leave: Leave) -> None:
    folder = leave()
    path = folder / "model.safetensors"
    weights = tensors.load(path.read_bytes())
    before = FinishedRun.open(folder).report(EvaluationSetting(0.3, (), 8))

    path.write_bytes(tensors.dump(weights | {f"m/{name}": array for name, array in weights.items()}))

    assert FinishedRun.open(folder).report(EvaluationSetting(0.3, (), 8)) == before


def test_an_algorithm_that_does_not_personalize_gets_the_plain_step(leave: Leave) -> None:
    finished = FinishedRun.open(leave(algorithm={"batch": 8}))

    report = finished.report(EvaluationSetting(0.3, (10,), 8))

    assert report.curve[-1].value("accuracy") > report.before


def test_a_user_whose_test_shard_is_too_small_is_named_and_left_out(leave: Leave) -> None:
    finished = FinishedRun.open(leave())
    first, *others = finished.users
    few = replace(first, shards=SampleShards(first.shards.train, first.shards.test[:1]))
    vars(finished)["users"] = (few, *others)

    report = finished.report(EvaluationSetting(0.3, (), 8, "split_test"))

    assert [user.name for user in report.users] == [user.name for user in others]
    assert "at least 2" in report.left_out["strong-0"]


def test_too_few_test_samples_for_all_users_say_what_to_change(leave: Leave) -> None:
    folder = leave(data={"name": "digits", "partition": "iid", "train_samples": 240, "test_samples": 8})

    with refuses(DataError, clients=6, empty=(0, 1, 2, 3, 4, 5)):
        FinishedRun.open(folder).report(EvaluationSetting(0.3, (), 8))


def test_the_command_prints_every_protocol_and_the_trivial_level(leave: Leave) -> None:
    done = runner().invoke(app, ["personalize", str(leave()), *SHORT, "--alpha", "0.3"])

    assert done.exit_code == 0, done.output
    for word in (
        "Mean accuracy",
        "Mean f1",
        "Mean loss",
        "train_support:",
        "split_test:",
        "paper literal (leaks)",
        "LEAKS",
        "own majority class",
    ):
        assert word in " ".join(done.stdout.split())


@pytest.mark.slow
def test_json_has_every_user_and_is_the_same_each_time(leave: Leave) -> None:
    folder = leave()

    one, other = (
        json.loads(runner().invoke(app, ["personalize", str(folder), *SHORT, "--json"]).stdout) for _ in "ab"
    )

    assert one == other
    assert [report["protocol"] for report in one["reports"]] == [
        "train_support",
        "split_test",
        "paper_literal",
    ]
    first = one["reports"][0]
    assert (first["alpha"], first["steps"], first["batch"]) == (0.2, 1, 8)
    assert [point["steps"] for point in first["curve"]] == [0, 1, 5]
    assert len(first["users"]) == 6
    assert first["majority"] > 0.2


def test_the_page_has_charts_and_every_user(leave: Leave, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "report.html"
    arguments = ["personalize", str(leave()), *SHORT, "--protocol", "train_support", "--html", str(page)]

    assert runner().invoke(app, arguments).exit_code == 0

    text = page.read_text()
    assert text.count("<svg") == 2
    assert "half-1" in text
    assert "src=" not in text


def test_a_folder_without_a_finished_run_says_what_is_missing(leave: Leave, tmp_path: Path) -> None:
    folder = leave()
    (folder / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        FinishedRun.open(folder)
    with pytest.raises(ConfigError, match=r"has no run\.toml and no model\.safetensors"):
        FinishedRun.open(tmp_path / "nothing")


def test_other_data_than_the_run_s_own_are_refused(leave: Leave) -> None:
    folder = leave()
    write_client(
        folder / "devices" / "strong-1" / "data.npz", np.zeros((5, 1, 8, 8), np.uint8), np.zeros(5, np.int64)
    )

    with refuses(DataError, device="strong-1"):
        _ = FinishedRun.open(folder).users


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--steps", "1,two", ConfigError),
        ("--steps", "-1", ConfigError),
        ("--alpha", "-0.1", SystemExit),
        ("--alpha", "nan", SystemExit),
    ],
)
def test_options_out_of_range_fail(leave: Leave, option: str, value: str, error: type[BaseException]) -> None:
    done = runner().invoke(app, ["personalize", str(leave()), option, value])

    assert isinstance(done.exception, error) and done.exit_code != 0


@pytest.mark.slow
def test_users_of_a_simulation_are_those_of_its_run(leave: Leave, tmp_path: Path) -> None:
    run = leave()
    simulation = simulate(FinishedRun.open(run).federation, tmp_path / "simulation")

    ours, theirs = FinishedRun.open(simulation.folder), FinishedRun.open(run)

    for user, other in zip(ours.users, theirs.users, strict=True):
        assert (user.name, user.group) == (other.name, other.group)
        assert user.x.equal(other.x) and user.y.equal(other.y)
    assert personalize(simulation, steps=(0, 1), batch=8).reports[0].curve[0].steps == 0
