"""The folder of a run: one process at a time, and no secrets in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgefl
from edgefl.api import run as runs
from edgefl.api import serve
from edgefl.config import Federation, TrackingTable, load
from edgefl.config.text import dump
from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.run_folder import CONFIG_NAME
from edgefl.setup import runs as folders
from edgefl.system.files import FolderLock
from tests.support.errors import ConfigError, StoreError, refuses


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody waits for another process's end."""
    monkeypatch.setattr(folders, "_STOPPING_S", 0.0)
    yield


@pytest.fixture(scope="module")
def federation() -> Federation:
    """At a broker that asks for a password."""
    broker = {
        "kind": "external",
        "host": "broker.lan",
        "port": 1884,
        "username": "server",
        "password": "s3cret",
        "tls": True,
    }
    settings = {"model.name": "mlp", "data.name": "digits", "tiers.strong.count": 1}
    return edgefl.load_federation(None, settings | {f"broker.{key}": value for key, value in broker.items()})


def test_a_second_run_in_the_same_folder_is_refused(federation: Federation, tmp_path: Path) -> None:
    first = runs.prepare(federation, tmp_path)
    for fresh in (False, True):
        with pytest.raises(StoreError, match=rf"runs in {tmp_path} already \(process {os.getpid()}\)"):
            runs.prepare(federation, tmp_path, fresh=fresh)
    assert (tmp_path / CONFIG_NAME).is_file()
    first.lock.release()
    runs.prepare(federation, tmp_path, fresh=True).lock.release()


def test_a_run_that_is_refused_lets_its_folder_go(federation: Federation, tmp_path: Path) -> None:
    runs.prepare(federation, tmp_path).lock.release()
    other = federation.model_copy(update={"model": federation.model.model_copy(update={"name": "cnn"})})
    with pytest.raises(ConfigError, match="another configuration"):
        runs.prepare(other, tmp_path)
    runs.prepare(federation, tmp_path).lock.release()


def test_a_run_may_be_resumed_with_other_trackers(federation: Federation, tmp_path: Path) -> None:
    runs.prepare(federation, tmp_path).lock.release()
    tracked = federation.model_copy(update={"tracking": TrackingTable(tensorboard=True)})
    runs.prepare(tracked, tmp_path).lock.release()
    assert edgefl.load_run(tmp_path).federation.tracking.tensorboard


def test_files_of_the_time_before_the_table_tracking_are_read(federation: Federation, tmp_path: Path) -> None:
    text = dump(federation).replace("[simulation]", '[simulation]\ntensorboard = false\nmlflow = ""')
    (tmp_path / "old.toml").write_text(text)
    assert load(tmp_path / "old.toml") == federation

    (tmp_path / CONFIG_NAME).write_text(
        text.replace('tensorboard = false\nmlflow = ""', 'tensorboard = true\nmlflow = "sqlite:///x"')
    )
    assert edgefl.load_run(tmp_path).federation.tracking == TrackingTable(
        tensorboard=True, mlflow="sqlite:///x"
    )
    (tmp_path / CONFIG_NAME).rename(tmp_path / "old.toml")
    with pytest.raises(ConfigError, match=r"simulation\.mlflow: it is called 'tracking\.mlflow' now"):
        load(tmp_path / "old.toml")


def test_a_second_server_in_the_same_folder_is_refused(federation: Federation, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "serve.lock")
    with pytest.raises(StoreError, match=rf"a server runs in {tmp_path} already \(process {os.getpid()}\)"):
        serve.Server(federation, tmp_path)
    lock.release()


def test_a_fresh_run_leaves_the_folder_of_a_server_alone(federation: Federation, tmp_path: Path) -> None:
    runs.prepare(federation, tmp_path).lock.release()
    lock = FolderLock(tmp_path, "serve.lock")
    with refuses(StoreError, folder=str(tmp_path), pid=...):
        runs.prepare(federation, tmp_path, fresh=True)
    lock.release()
    assert (tmp_path / CONFIG_NAME).exists()


def test_a_folder_that_cannot_be_made_is_the_stores_error(federation: Federation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used: Not a directory"):
        serve.Server(federation, tmp_path / "file" / "run")


def test_the_password_of_another_broker_is_not_sent(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs.prepare(federation, tmp_path).lock.release()
    monkeypatch.setenv("EDGEFL_BROKER", "server:other@elsewhere.lan:1884")
    prepared = runs.prepare(tmp_path / CONFIG_NAME, tmp_path)
    prepared.lock.release()
    assert _told(prepared) == "server@broker.lan:1884"


def test_no_file_of_a_run_holds_the_password_of_the_broker(federation: Federation, tmp_path: Path) -> None:
    prepared = runs.prepare(federation, tmp_path)
    prepared.lock.release()
    assert b"s3cret" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert edgefl.load_run(tmp_path).federation.broker.username == "server"
    assert _told(prepared) == "server:s3cret@broker.lan:1884"


def test_a_resumed_run_keeps_its_password(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs.prepare(federation, tmp_path).lock.release()
    again = runs.prepare(federation, tmp_path)
    again.lock.release()
    assert _told(again) == "server:s3cret@broker.lan:1884"

    monkeypatch.setenv("EDGEFL_BROKER", "server:other@broker.lan:1884")
    from_its_own_file = runs.prepare(tmp_path / CONFIG_NAME, tmp_path)
    from_its_own_file.lock.release()
    assert _told(from_its_own_file) == "server:other@broker.lan:1884"


def test_changes_to_a_run_are_named_key_by_key(federation: Federation, tmp_path: Path) -> None:
    runs.prepare(federation, tmp_path).lock.release()
    longer = federation.model_copy(
        update={
            "federation": federation.federation.model_copy(update={"rounds": 400}),
            "tiers": {"strong": federation.tiers["strong"].model_copy(update={"cut": 1})},
        }
    )
    with pytest.raises(
        ConfigError, match=r"\(federation.rounds was 10, is 400; tiers.strong.cut was 0, is 1\)"
    ):
        runs.prepare(longer, tmp_path)
    assert serve._changes(longer, tmp_path).startswith("federation.rounds was 10, is 400; tiers.strong.cut")
    before = edgefl.load_run(tmp_path).federation
    more = {"strong": before.tiers["strong"].model_copy(update={"count": 9})}
    same = before.model_copy(update={"limits": {"chunk_bytes": 4096}, "tiers": more})
    assert "edgefl's version, or the file of the model" in serve._changes(same, tmp_path)


def _told(prepared: runs.PreparedRun) -> str:
    """Where the processes of the run are told that the broker is."""
    return prepared.lab._environment("server")["EDGEFL_BROKER"].removeprefix("mqtts://")


def test_a_run_takes_what_its_devices_hold_and_spreads_nothing(tmp_path: Path) -> None:
    federation = _of_own_data(tmp_path / "own")
    prepared = runs.prepare(federation, tmp_path / "run")
    prepared.lock.release()

    assert prepared.lab.data_of("strong-0") == tmp_path / "own" / "strong-0.npz"
    assert not [*(tmp_path / "run").rglob("*.npz")]
    assert edgefl.load_run(tmp_path / "run").federation.data.devices_dir == str(tmp_path / "own")


def test_a_run_does_not_write_where_its_devices_data_lie(tmp_path: Path) -> None:
    federation = _of_own_data(tmp_path / "run" / "devices")
    with pytest.raises(ConfigError, match=r"data\.devices_dir\) lies in .*run, which the run writes"):
        runs.prepare(federation, tmp_path / "run", fresh=True)
    assert (tmp_path / "run" / "devices" / "strong-0.npz").is_file()


def _of_own_data(folder: Path) -> Federation:
    data = digits()
    write_client(folder / "strong-0.npz", data.train_x[:8], data.train_y[:8])
    held_out = edgefl.data.Dataset.of(data.test_x[:0], data.test_y[:0], data.test_x, data.test_y, classes=10)
    table = {"name": "file", "file": held_out.save(folder.parent / "held-out.npz"), "devices_dir": folder}
    settings = {f"data.{key}": str(value) for key, value in table.items()}
    return edgefl.load_federation(None, {"model.name": "mlp", "tiers.strong.count": 1, **settings})
