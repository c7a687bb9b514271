"""Rounds told to TensorBoard and to MLflow: each once, however often a simulation was stopped."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

import edgefl
from edgefl.config.text import dump
from edgefl.errors import ConfigError
from edgefl.simulator.results import RoundRow
from tests.e2e.inside import edgefl as command
from tests.simulator.small import federation, stop_after

TOLD = {"accuracy", "loss", "train_loss", "reports", "up_bytes", "simulated_s", "energy_j"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLflow without a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlflow").as_uri()


def events(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    """Step and value of each scalar, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def told(store: str, name: str) -> list[tuple[int, float]]:
    """Step and value of a metric of the only run."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("simulated").experiment_id])
    history = client.get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value) for metric in history)


def rounds(history: tuple[RoundRow, ...], name: str) -> list[tuple[int, Any]]:
    return [(row.round, pytest.approx(getattr(row, name))) for row in history]


def test_event_files_have_every_round_and_the_configuration(tmp_path: Path) -> None:
    made = edgefl.simulate(federation(simulation={"tensorboard": True}), tmp_path)
    found = events(tmp_path)

    assert found.keys() >= TOLD
    for name in TOLD:
        assert found[name] == rounds(made.history, name)


@pytest.mark.slow
def test_mlflow_has_every_round_and_the_configuration(tmp_path: Path, store: str) -> None:
    made = edgefl.simulate(federation(simulation={"mlflow": store}), tmp_path / "out")

    for name in TOLD:
        assert told(store, name) == rounds(made.history, name)
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("simulated").experiment_id])
    assert run.data.params["tiers.weak.cut"] == "1" and run.data.params["algorithm.steps"] == "2"
    assert not any(key.startswith("broker") for key in run.data.params)
    assert run.data.tags["dataset"].startswith("scikit-learn digits")
    assert run.info.status == "FINISHED" and run.info.run_name == "out"


@pytest.mark.slow
def test_a_server_is_told_over_http_and_our_output_stays_ours(tmp_path: Path) -> None:
    """What travels, of MLflow's REST API 2.0: https://mlflow.org/docs/latest/api_reference/rest-api.html."""
    with Served() as served:
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


class Served:
    """An HTTP server that answers as MLflow does to a client who makes one run."""

    ANSWERS: ClassVar[Mapping[str, object]] = {
        "experiments/create": {"experiment_id": "1"},
        "runs/create": {
            "run": {"info": {"run_id": "r", "experiment_id": "1", "status": "RUNNING"}, "data": {}}
        },
        "runs/update": {"run_info": {"run_id": "r", "experiment_id": "1", "status": "FINISHED"}},
        "runs/log-batch": {},
    }

    def __init__(self) -> None:
        bodies: list[tuple[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                call = self.path.partition("/mlflow/")[2].partition("?")[0]
                bodies.append((call, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self._answer(200, Served.ANSWERS[call])

            def do_GET(self) -> None:
                self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"})

            def _answer(self, code: int, answer: object) -> None:
                body = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._bodies = bodies
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def posted(self, call: str) -> list[Any]:
        return [body for name, body in self._bodies if name == call]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_one_that_goes_on_tells_no_round_twice(
    every_s: float, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was saved, two rounds are run again: they are there already, or their events are written anew."""
    monkeypatch.setattr("edgefl.simulator.folder._SAVE_EVERY_S", every_s)
    chosen = federation(simulation={"mlflow": store, "tensorboard": True})
    stop_after(2, chosen, tmp_path / "out")
    with next((tmp_path / "out" / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"\x07half an event")
    made = edgefl.simulate(chosen, tmp_path / "out", resume=True)

    for name in TOLD:
        assert events(tmp_path / "out")[name] == rounds(made.history, name)
        assert told(store, name) == rounds(made.history, name)


@pytest.mark.slow
def test_both_have_no_say_in_the_weights_and_take_up_what_they_missed(tmp_path: Path, store: str) -> None:
    plain = edgefl.simulate(federation(), tmp_path / "out")
    before = plain.history
    made = edgefl.simulate(
        federation(simulation={"mlflow": store, "tensorboard": True}), tmp_path / "out", resume=True
    )

    assert made.history == before
    assert told(store, "loss") == rounds(before, "loss") == events(tmp_path / "out")["loss"]


@pytest.mark.slow
def test_a_failing_tracker_ends_nothing(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    chosen, said, sent = federation(simulation={"mlflow": store}), list[str](), MlflowClient.log_batch

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
    assert "connection refused" in said[0] and "lacks 3 rounds: `resume` sends them" in said[1]

    edgefl.simulate(chosen, tmp_path / "out", resume=True)
    assert told(store, "loss") == rounds(made.history, "loss")


@pytest.mark.slow
def test_an_mlflow_that_cannot_be_used_is_told_before_any_round(tmp_path: Path, store: str) -> None:
    nowhere = "http://127.0.0.1:9/"
    with pytest.raises(ConfigError, match=r"simulation\.mlflow 'http://127\.0\.0\.1:9/' cannot be used"):
        edgefl.simulate(federation(simulation={"mlflow": nowhere}), tmp_path / "out")

    (tmp_path / "lost").mkdir()
    chosen = federation(simulation={"mlflow": store})
    edgefl.simulate(chosen, tmp_path / "lost" / "out")
    known = tmp_path / "lost" / "out" / "mlflow.json"
    known.write_text(known.read_text().replace('"run":"', '"run":"0'))
    with pytest.raises(ConfigError, match=r"without that file it begins another"):
        edgefl.simulate(chosen, tmp_path / "lost" / "out", resume=True)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_USERNAME"):
        federation(simulation={"mlflow": "https://me:secret@example.org"})


@pytest.mark.parametrize(
    ("key", "value", "package"), [("tensorboard", True, "tensorboardX"), ("mlflow", "sqlite:///x", "mlflow")]
)
def test_a_package_that_is_not_there_is_named_with_its_extra(
    key: str, value: object, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"simulation\.{key} needs {package}, .*'edgefl-tiers\[tracking\]'"
    ):
        edgefl.simulate(federation(simulation={key: value}), tmp_path)
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
        [step for step, _ in told(store, "loss")]
        == [1]
        == [step for step, _ in events(tmp_path / "out")["loss"]]
    )
