"""Rounds of a simulation in TensorBoard and MLflow: each once, however often the simulation was stopped."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl.config.text import dump
from edgefl.errors import ConfigError
from edgefl.simulator.results import RoundRow
from tests.e2e.inside import edgefl as command
from tests.simulator.small import federation, stop_after
from tests.support.tracking import MlflowServer, artifacts_of, metrics_of, run_of, scalars_of

TRACKED = {"accuracy", "loss", "train_loss", "reports", "up_bytes", "simulated_s", "energy_j"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLflow without a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlflow").as_uri()


def rounds(history: tuple[RoundRow, ...], name: str) -> list[tuple[int, Any]]:
    return [(row.round, pytest.approx(getattr(row, name))) for row in history]


def test_event_files_have_every_round_and_the_configuration(tmp_path: Path) -> None:
    made = edgefl.simulate(federation(tracking={"tensorboard": True}), tmp_path)
    found = scalars_of(tmp_path)

    assert found.keys() >= TRACKED
    for name in TRACKED:
        assert found[name] == rounds(made.history, name)


@pytest.mark.slow
def test_mlflow_has_every_round_and_the_configuration(tmp_path: Path, store: str) -> None:
    made = edgefl.simulate(federation(tracking={"mlflow": store}), tmp_path / "out")

    for name in TRACKED:
        assert metrics_of(store, "simulated", name) == rounds(made.history, name)
    run = run_of(store, "simulated")
    assert run.data.params["tiers.weak.cut"] == "1" and run.data.params["algorithm.steps"] == "2"
    assert not any(key.startswith("broker") for key in run.data.params)
    assert run.data.tags["dataset"].startswith("scikit-learn digits")
    assert run.info.status == "FINISHED" and run.info.run_name == "out"
    assert artifacts_of(store, "simulated") == {"model/model.safetensors"}


@pytest.mark.slow
def test_rounds_go_to_a_server_over_http_without_its_output(tmp_path: Path) -> None:
    """What travels, of MLflow's REST API 2.0: https://mlflow.org/docs/latest/api_reference/rest-api.html."""
    with MlflowServer() as served:
        file = tmp_path / "federation.toml"
        file.write_text(dump(federation()))
        ran = command("simulate", file, "--out", tmp_path / "out", "--mlflow", served.url, "--json")

    assert ran.returncode == 0, ran.stderr
    assert [line["round"] for line in ran.events()] == [1, 2, 3]
    steps = [
        metric["step"]
        for body in served.posted("runs/log-batch")
        for metric in body.get("metrics", ())
        if metric["key"] == "loss"
    ]
    assert [int(step) for step in steps] == [1, 2, 3]
    assert served.posted("runs/update")[-1]["status"] == "FINISHED"
    model = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert served.files == {"model/model.safetensors": hashlib.sha256(model).hexdigest()}


@pytest.mark.slow
@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_one_that_goes_on_tells_no_round_twice(
    every_s: float, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was saved, two rounds are run again: they are there already, or their events are written anew."""
    monkeypatch.setattr("edgefl.simulator.folder._SAVE_EVERY_S", every_s)
    chosen = federation(tracking={"mlflow": store, "tensorboard": True})
    stop_after(2, chosen, tmp_path / "out")
    with next((tmp_path / "out" / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"\x07half an event")
    made = edgefl.simulate(chosen, tmp_path / "out", resume=True)

    for name in TRACKED:
        assert scalars_of(tmp_path / "out")[name] == rounds(made.history, name)
        assert metrics_of(store, "simulated", name) == rounds(made.history, name)


@pytest.mark.slow
def test_both_have_no_say_in_the_weights_and_take_up_what_they_missed(tmp_path: Path, store: str) -> None:
    plain = edgefl.simulate(federation(), tmp_path / "out")
    before = plain.history
    made = edgefl.simulate(
        federation(tracking={"mlflow": store, "tensorboard": True}), tmp_path / "out", resume=True
    )

    assert made.history == before
    assert (
        metrics_of(store, "simulated", "loss")
        == rounds(before, "loss")
        == scalars_of(tmp_path / "out")["loss"]
    )


@pytest.mark.slow
def test_a_failing_tracker_ends_nothing(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    chosen, said, sent = federation(tracking={"mlflow": store}), list[str](), MlflowClient.log_batch

    def gone(*_: object, **given: object) -> None:
        if "metrics" not in given:
            sent(*_, **given)
        else:
            raise MlflowException("connection refused")

    monkeypatch.setattr(MlflowClient, "log_batch", gone)
    simulated = edgefl.api.simulate.prepare_simulation(chosen, tmp_path / "out")
    made = simulated.run(warn=said.append)
    monkeypatch.setattr(MlflowClient, "log_batch", sent)
    assert made.finished and len(said) == 2
    assert "connection refused" in said[0] and "lacks 3 rounds" in said[1]

    edgefl.simulate(chosen, tmp_path / "out", resume=True)
    assert metrics_of(store, "simulated", "loss") == rounds(made.history, "loss")


@pytest.mark.slow
def test_an_unusable_mlflow_is_an_error_before_any_round(tmp_path: Path, store: str) -> None:
    nowhere = "http://127.0.0.1:9/"
    with pytest.raises(ConfigError, match=r"tracking\.mlflow 'http://127\.0\.0\.1:9/' cannot be used"):
        edgefl.simulate(federation(tracking={"mlflow": nowhere}), tmp_path / "out")

    (tmp_path / "lost").mkdir()
    chosen = federation(tracking={"mlflow": store})
    edgefl.simulate(chosen, tmp_path / "lost" / "out")
    known = tmp_path / "lost" / "out" / "mlflow.json"
    known.write_text(known.read_text().replace('"run":"', '"run":"0'))
    with pytest.raises(ConfigError, match=r"without that file it begins another"):
        edgefl.simulate(chosen, tmp_path / "lost" / "out", resume=True)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_USERNAME"):
        federation(tracking={"mlflow": "https://me:secret@example.org"})


@pytest.mark.parametrize(
    ("key", "value", "package"), [("tensorboard", True, "tensorboardX"), ("mlflow", "sqlite:///x", "mlflow")]
)
def test_a_package_that_is_not_there_is_named_with_its_extra(
    key: str, value: object, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"tracking\.{key} needs {package}, .*'edgefl-tiers\[tracking\]'"):
        edgefl.simulate(federation(tracking={key: value}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_has_options_for_both(tmp_path: Path, store: str) -> None:
    file = tmp_path / "federation.toml"
    file.write_text('[model]\nname = "mlp"\noptions = { hidden = [8] }\n[data]\nname = "digits"\n')
    settings = (
        "--set",
        "tiers.all.count=2",
        "--set",
        "algorithm.steps=1",
        "--set",
        "federation.name=simulated",
    )
    ran = command(
        "simulate",
        file,
        "--rounds",
        "1",
        *settings,
        "--out",
        tmp_path / "out",
        "--tensorboard",
        "--mlflow",
        store,
    )

    assert ran.returncode == 0, ran.stderr
    assert (
        [step for step, _ in metrics_of(store, "simulated", "loss")]
        == [1]
        == [step for step, _ in scalars_of(tmp_path / "out")["loss"]]
    )
