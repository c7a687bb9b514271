"""Live runs in TensorBoard and MLflow at once, read back by the clients of both."""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl.config import Federation, parse
from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.tracking.session import Tracking, check_tracking
from edgefl.tracking.trackers import TensorboardFiles
from edgefl_server.events import Event, RoundClosed, Warned
from edgefl_server.storage.audit import HISTORY_NAME, HistoryWriter
from tests.conftest import BrokerProcess
from tests.support.errors import ConfigError, refuses
from tests.support.events import round_closed
from tests.support.tracking import artifacts_of, metrics_of, run_of, scalars_of, texts_of

TRACKED = ("loss", "train_loss", "reports", "up_bytes", "down_bytes", "seconds")
OF_TIERS = ("selected", "reports", "rejected", "train_loss", "up_bytes", "down_bytes")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLflow without a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlflow").as_uri()


def tracked(name: str, store: str, *, tensorboard: bool = True) -> Federation:
    """Return a federation of two small tiers that is tracked."""
    tables: dict[str, dict[str, Any]] = {
        "federation": {"name": name, "rounds": 3},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "algorithm": {"batch": 8, "steps": 2},
        "data": {"name": "digits", "test_samples": 50},
        "round": {"min_devices": 2, "min_reports": 2},
        "tiers": {"strong": {"count": 1}, "weak": {"cut": 1, "count": 1}},
        "tracking": {"tensorboard": tensorboard, "mlflow": store},
    }
    return parse(tables, source="the test")


@dataclass
class Watch:
    """Events of a server, which is stopped after round ``last``; 0 to let it run."""

    last: int = 0
    seen: list[Event] = field(default_factory=list)
    server: edgefl.Server | None = None

    def emit(self, event: Event) -> None:
        self.seen.append(event)
        if self.server is not None and isinstance(event, RoundClosed) and event.round == self.last:
            self.server.stop()


def serve(chosen: Federation, folder: Path, broker: str, *, last: int = 0) -> list[Event]:
    """Run a server in ``folder`` until all rounds are over, or until round ``last`` is, and return its events."""
    watch = Watch(last)
    watch.server = edgefl.Server(chosen, folder, broker=broker, device="cpu", emit=watch.emit)
    watch.server.run()
    return watch.seen


@pytest.mark.e2e
def test_a_run_and_its_resumption_are_one_run_of_both_trackers(
    tmp_path: Path, mosquitto: BrokerProcess, federation: str, store: str
) -> None:
    folder, broker, data = tmp_path / "out", str(mosquitto.address), digits()
    chosen = tracked(federation, store)
    with ExitStack() as agents:
        for name, rows in (("strong-0", slice(0, 40)), ("weak-0", slice(40, 90))):
            write_client(tmp_path / f"{name}.npz", data.train_x[rows], data.train_y[rows])
            agent = edgefl.Agent(
                name,
                tmp_path / f"{name}.npz",
                broker=broker,
                federation=federation,
                folder=tmp_path / name,
                limits=edgefl.DeviceLimits(tune=False),
            )
            agents.callback(agent.stop)
            threading.Thread(target=agent.run, daemon=True).start()
        seen = serve(chosen, folder, broker, last=1)
        assert run_of(store, federation).info.status == "KILLED"
        assert [step for step, _ in metrics_of(store, federation, "loss")] == [1]
        seen += serve(chosen, folder, broker)
    assert not [event for event in seen if isinstance(event, Warned)]

    # The figures of all rounds, in both, are those of the run's history.
    history, shown = edgefl.load_run(folder).history, scalars_of(folder)
    assert [row.round for row in history] == [1, 2, 3]
    for name in TRACKED:
        expected = [(row.round, pytest.approx(getattr(row, name))) for row in history]
        assert metrics_of(store, federation, name) == expected == shown[name]
    for tier in ("strong", "weak"):
        for name in OF_TIERS:
            expected = [(row.round, pytest.approx(getattr(row.tiers[tier], name))) for row in history]
            assert (
                metrics_of(store, federation, f"tier.{tier}.{name}")
                == expected
                == shown[f"tier.{tier}.{name}"]
            )
    assert all(sum(each.up_bytes for each in row.tiers.values()) == row.up_bytes for row in history)
    assert [row.tiers["weak"].selected for row in history] == [1, 1, 1]

    # Configuration and files.
    run, texts = run_of(store, federation), texts_of(folder)
    assert run.info.status == "FINISHED" and run.data.params["tiers.weak.cut"] == "1"
    assert "cut = 1" in texts["config"]
    assert not any(key.startswith("broker") for key in run.data.params) and broker not in texts["config"]
    files = {"bundles/strong.efl", "bundles/weak.efl", "model/model.safetensors"}
    assert artifacts_of(store, federation) == files
    for name in files:
        place = folder / name.removeprefix("model/")
        digest = hashlib.sha256(place.read_bytes()).hexdigest()
        assert run.data.tags[f"sha256/{name}"] == digest and digest in texts[name]


def test_a_tracked_run_starts_again_while_mlflow_is_away(tmp_path: Path, federation: str) -> None:
    (tmp_path / "mlflow.json").write_text('{"uri":"http://127.0.0.1:9/","run":"0123"}')
    chosen = tracked(federation, "http://127.0.0.1:9/", tensorboard=False)
    check_tracking(chosen, tmp_path)
    HistoryWriter(tmp_path).take(round_closed(1))
    with Tracking.open(chosen, tmp_path, HISTORY_NAME, RoundClosed) as tracking:
        tracking.notify()

    assert "takes no rounds now" in next(tracking.problems())


def test_a_round_whose_answer_is_lost_is_not_sent_again(
    tmp_path: Path, federation: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    from edgefl.tracking.mlflow_run import MlflowRun

    run, send = MlflowRun.open(tmp_path, tracked(federation, store), {}), MlflowClient.log_batch

    def send_and_fail(*args: Any, **named: Any) -> None:
        send(*args, **named)
        raise MlflowException("connection reset")

    monkeypatch.setattr(MlflowClient, "log_batch", send_and_fail)
    with pytest.raises(MlflowException):
        run.record(1, {"loss": 0.5})
    monkeypatch.setattr(MlflowClient, "log_batch", send)
    run.record(1, {"loss": 0.5})

    assert metrics_of(store, federation, "loss") == [(1, 0.5)]


def test_an_earlier_run_is_not_discarded_for_an_unusable_mlflow(tmp_path: Path, federation: str) -> None:
    known = tmp_path / "mlflow.json"
    known.write_text('{"uri":"http://127.0.0.1:9/","run":"0123"}')
    (tmp_path / "run.toml").touch()
    (tmp_path / "config.toml").touch()
    chosen = tracked(federation, "http://127.0.0.1:9/", tensorboard=False)
    for call in (edgefl.run, edgefl.simulate):
        with pytest.raises(ConfigError, match=r"tracking\.mlflow"):
            call(chosen, tmp_path, fresh=True)
    assert known.exists()


@pytest.mark.parametrize(
    "uri",
    [
        "http://host?user=me",
        "postgresql://host/db?sslmode=require&Password=x",
        "http://host/?token=",
        "mailto:me",
        "C:x",
    ],
)
def test_an_unusable_mlflow_url_is_refused(federation: str, uri: str) -> None:
    with refuses(ConfigError, keys=["tracking.mlflow"]):
        tracked(federation, uri)
    for good in ("databricks", "databricks://profile", "sqlite:///x.db", "http://host/?a=user"):
        assert tracked(federation, good).tracking.mlflow == good


def test_event_files_are_fresh_after_each_round(tmp_path: Path, federation: str) -> None:
    files = TensorboardFiles(tmp_path, tracked(federation, ""))
    files.record(1, {"loss": 0.5})
    deadline = time.monotonic() + 20
    while "loss" not in scalars_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    fresh = scalars_of(tmp_path)
    files.end(finished=True)

    assert fresh["loss"] == [(1, 0.5)]


def test_an_unusable_mlflow_is_an_error_before_anything_is_compiled(tmp_path: Path, federation: str) -> None:
    chosen = tracked(federation, "http://127.0.0.1:9/", tensorboard=False)
    for _ in range(2):  # the folder is free again
        with pytest.raises(ConfigError, match=r"tracking\.mlflow 'http://127\.0\.0\.1:9/' cannot be used"):
            edgefl.Server(chosen, tmp_path / "out", broker="127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"tracking\.mlflow"):
        edgefl.run(chosen, tmp_path / "run")
    assert not (tmp_path / "out" / "bundles").exists() and not (tmp_path / "run").exists()
