"""``--web`` of `edgefl run` and `edgefl server`: what it refuses before anything begins, and what it tells people."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from edgefl.cli.federation import web as options
from edgefl.cli.federation.web import WebOptions, with_place
from edgefl.config import load
from edgefl.lab.broker import free_port
from edgefl.setup.tiers import completed, with_guests
from edgefl.web import page
from tests.agents.web.served import page_of_files
from tests.e2e.runs import TINY
from tests.support.commands import run_command
from tests.support.errors import ConfigError, refuses

EDGEFL = [sys.executable, "-m", "edgefl"]


CONFIG = TINY + "[tiers.strong]\ncount = 1\n"


@pytest.fixture
def built_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = page_of_files(tmp_path / "page")
    monkeypatch.setenv(page.VARIABLE, str(folder))
    return folder


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def said(*arguments: str) -> tuple[int, str]:
    ended = run_command(*EDGEFL, *arguments, timeout=120)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr


def test_the_address_may_be_left_out() -> None:
    assert options.DEFAULT == page.DEFAULT
    assert with_place(["run", "--web", "--out", "x"]) == ["run", "--web", page.DEFAULT, "--out", "x"]
    assert with_place(["run", "--web", "127.0.0.1:80", "--dashboard"])[:3] == ["run", "--web", "127.0.0.1:80"]


def test_a_page_that_is_not_built_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(page.VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="make agents-web") as found:
        WebOptions("127.0.0.1:0").check()
    assert "index.html is missing" in found.value.message


def test_a_port_in_use_is_refused(built_page: Path, taken: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken} is in use by another process"):
        WebOptions(f"127.0.0.1:{taken}").check()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "server"])
def test_a_port_in_use_is_an_early_error(command: str, tmp_path: Path, built_page: Path, taken: int) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    config = str(tmp_path / "tiny.toml")
    words = [config] if command == "run" else ["--config", config, "--broker", "127.0.0.1:1"]
    code, text = said(command, *words, "--web", f"127.0.0.1:{taken}", "--out", str(tmp_path / "out"))

    assert code == 2 and f"127.0.0.1:{taken} is in use by another process" in text
    assert not (tmp_path / "out" / "journal.sqlite").exists()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            WebOptions("127.0.0.1:0", broker="mqtts://broker.lan"),
            "is none: name the broker's WebSocket listener",
        ),
        (WebOptions("127.0.0.1:0", broker="broker.lan:1883"), "browsers speak MQTT over WebSocket only"),
        (WebOptions("127.0.0.1:0", broker="wss://me:secret@broker.lan"), "leave user and password out"),
        (WebOptions("127.0.0.1:0", cert_file="page.crt"), "a certificate and its key go together"),
        (WebOptions("127.0.0.1:0", "page.crt", "page.key"), "cannot be used"),
        (WebOptions("nonsense"), "a page listens at HOST:PORT"),
        (WebOptions("", broker="wss://broker.lan"), "go with --web"),
    ],
)
def test_what_cannot_be_served_is_refused(given: WebOptions, reason: str, built_page: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        given.check()


def test_a_page_over_https_opens_no_socket_without_tls() -> None:
    with refuses(ConfigError, web_broker="ws://broker.lan/mqtt"):
        page.browsers_broker("ws://broker.lan/mqtt", secure=True)
    assert page.browsers_broker("ws://broker.lan:8083", secure=False) == "ws://broker.lan:8083/mqtt"
    assert page.browsers_broker("wss://broker.lan/x?mqtt=5", secure=True) == "wss://broker.lan:443/x"


def test_the_secret_stays_and_is_its_owners_alone(tmp_path: Path) -> None:
    first = page.secret_of(tmp_path / "web")
    assert page.secret_of(tmp_path / "web") == first and len(first) >= 22
    assert page.secret_of(tmp_path / "other") != first
    assert stat.S_IMODE((tmp_path / "web" / "secret").stat().st_mode) == 0o600
    (tmp_path / "web" / "secret").write_text("")  # killed as it was made
    again = page.secret_of(tmp_path / "web")
    assert len(again) >= 22 and page.secret_of(tmp_path / "web") == again


def test_what_is_scanned_is_an_address_of_this_machine() -> None:
    host = page.own_address()
    assert page.address_of("0.0.0.0", 8091, "abc", secure=False) == f"http://{host}:8091/#abc"
    assert page.address_of("::1", 443, "abc", secure=True) == "https://[::1]:443/#abc"


def test_the_first_round_waits_for_browsers_too(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    federation = load(tmp_path / "tiny.toml")
    assert completed(federation).round.min_devices == 1
    assert completed(with_guests(federation, 2)).round.min_devices == 3
    (tmp_path / "tiny.toml").write_text(TINY + "[round]\nmin_devices = 1\n")
    assert with_guests(load(tmp_path / "tiny.toml"), 2).round.min_devices == 1, "the file has its word"


@pytest.mark.slow
def test_a_run_shows_the_code_and_lets_browsers_in(tmp_path: Path, built_page: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    out, port = tmp_path / "out", free_port()
    command = [*EDGEFL, "run", str(tmp_path / "tiny.toml"), "--web", f"127.0.0.1:{port}", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    ended = threading.Timer(120, process.kill)
    ended.start()
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not (lines and lines[-1].startswith("phones join at ")):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        address = lines[-1].split()[-1]
        assert sum("▀" in line or "█" in line for line in lines) > 15, "the code"
        while not _answers(port):
            assert process.poll() is None
        secret = address.partition("#")[2]
        with urlopen(f"http://127.0.0.1:{port}/api/offer?join={secret}") as answer:
            offer = json.load(answer)
        assert offer["federation"] == "e2e" and len(offer["server_keys"][0]) == 64
        assert (out / "web" / "secret").read_text().strip() == secret
        assert secret not in "".join(path.read_text() for path in (out / "logs").iterdir())
    finally:
        ended.cancel()
        process.terminate()
        process.wait(60)
    assert not _answers(port), "the page ends with its run"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_what_the_environment_names_is_found(built_page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.built_page() == built_page
    os.remove(built_page / "worker.js")
    with refuses(ConfigError, missing=("worker.js",)):
        page.built_page()
