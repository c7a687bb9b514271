"""``edgefl dashboard`` and ``--dashboard``: where it listens, and what it says to those who call it wrongly."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from edgefl.cli.federation.web import page_beside, with_place
from edgefl_server.dashboard.state.fleet import Fleet
from edgefl_server.dashboard.state.source import FolderSource
from edgefl_server.dashboard.web.hub import Hub
from edgefl_server.dashboard.web.serve import (
    bind,
    check_token,
    is_loopback,
    order_handler,
    parse_listen,
    read_token,
    serve,
)
from edgefl_server.dashboard.web.upstream import RemoteSource
from tests.support.commands import run_python
from tests.support.errors import ConfigError, StoreError, refuses


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def said(*arguments: str) -> tuple[int, str]:
    ended = run_python("-m", "edgefl", "dashboard", *arguments, timeout=60)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr


def test_a_port_in_use_is_an_error_with_its_code(folder: Path, taken: int) -> None:
    code, text = said(str(folder), "--listen", str(taken))

    assert code == 2 and f"127.0.0.1:{taken} is in use by another process" in text


def test_a_folder_that_is_none_of_a_run_is_named(tmp_path: Path) -> None:
    with refuses(ConfigError, path=str(tmp_path)):
        FolderSource(tmp_path)
    with refuses(ConfigError, path=str(tmp_path / "nothing")):
        FolderSource(tmp_path / "nothing")


def test_a_journal_elsewhere_that_cannot_be_one_is_named(folder: Path) -> None:
    with pytest.raises(StoreError, match="no SQLAlchemy URL"):
        FolderSource(folder, "nonsense")


def test_what_ends_the_pages_loop_ends_the_page(folder: Path) -> None:
    class Breaks(FolderSource):
        def poll(self, fleet: Fleet, line: Callable[[bytes], None]) -> bool:
            raise StoreError("the disk is gone")

    hub = Hub(Breaks(folder))
    with bind("127.0.0.1", 0) as bound, pytest.raises(StoreError, match="the disk is gone"):
        serve(hub, order_handler(folder, "", None), bound, "127.0.0.1")


def test_a_page_that_does_not_answer_is_named(taken: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with pytest.raises(
        ConfigError, match=rf"the page at http://127.0.0.1:{free} does not answer \(.*refused"
    ):
        RemoteSource(f"http://127.0.0.1:{free}/")
    for bad in ("127.0.0.1:8090", "ftp://a", "http://", "nonsense"):
        with refuses(ConfigError, server=bad):
            RemoteSource(bad)
    with pytest.raises(ConfigError, match="holds a password"):
        RemoteSource("http://me:secret@host")


def test_what_answers_and_is_no_page_is_named() -> None:
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=other.handle_request, daemon=True).start()
    try:
        with pytest.raises(ConfigError, match="does not answer"):
            RemoteSource(f"http://127.0.0.1:{other.server_port}")
    finally:
        other.server_close()


class Feeding(http.server.BaseHTTPRequestHandler):
    """Answers as a page does, but for its feed."""

    feed = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok\n" if self.path == "/healthz" else self.feed)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def feeding() -> Iterator[str]:
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Feeding)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


@pytest.mark.slow
def test_a_page_of_another_release_is_named(feeding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feeding, "feed", b'event: fleet\ndata: {"devices": "all of them"}\n\n')

    code, text = said("--server", feeding, "--listen", "0")

    assert code == 2 and f"the page at {feeding} sends a fleet in another format" in text


def test_a_page_that_waits_for_another_ends_when_it_is_told_to(feeding: str) -> None:
    command = [sys.executable, "-m", "edgefl", "dashboard", "--server", feeding, "--listen", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()  # it listens
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("8090", ("127.0.0.1", 8090)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:0", ("::1", 0)),
        (":81", ("127.0.0.1", 81)),
    ],
)
def test_places_to_listen_at(text: str, place: tuple[str, int]) -> None:
    assert parse_listen(text) == place


@pytest.mark.parametrize("text", ["", "host", "host:", "host:99999", "host:-1"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with refuses(ConfigError, address=text):
        parse_listen(text)


def test_this_machine_alone_is_known() -> None:
    assert [
        is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "host")
    ] == [*(True, True, True), *(False, False, False)]


def test_the_address_may_be_left_out() -> None:
    assert with_place(["run", "--dashboard"]) == ["run", "--dashboard", "127.0.0.1:8090"]
    assert with_place(["run", "--dashboard", "a.toml", "--json"]) == [
        "run",
        "--dashboard",
        "127.0.0.1:8090",
        "a.toml",
        "--json",
    ]
    for given in ("8091", "0.0.0.0:8091", "[::1]:80"):
        assert with_place(["run", "--dashboard", given]) == ["run", "--dashboard", given]
    assert with_place(["run", "--dashboard=8091"]) == ["run", "--dashboard=8091"]


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef0123\nmore\n")
    assert read_token(file) == "0123456789abcdef0123"
    for bad in ("", "short", "with a space in it and long", "umlaute-äöü-äöü-äöü"):
        with pytest.raises(ConfigError, match="no operator's token"):
            check_token(bad, "here")


def test_a_page_beside_a_run_refuses_a_taken_port_before_anything_begins(tmp_path: Path, taken: int) -> None:
    with pytest.raises(ConfigError, match="is in use"), page_beside(str(taken), tmp_path / "out"):
        pytest.fail("nothing begins")
    assert not (tmp_path / "out").exists()


def test_a_page_beside_a_run_ends_with_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with page_beside("0", tmp_path / "out"):
        url = capfd.readouterr().err.split()[-1]
    port = int(url.rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert os.listdir(tmp_path / "out" / "logs") == ["dashboard.log"]


def test_a_page_beside_a_run_that_cannot_begin_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEFL_OPERATOR_TOKEN", "short")
    log = tmp_path / "out" / "logs" / "dashboard.log"
    before = {child.pid for child in psutil.Process().children()}
    with page_beside("0", tmp_path / "out"):
        [page] = [child for child in psutil.Process().children() if child.pid not in before]
        deadline = time.monotonic() + 60
        while page.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "holds no operator's token" in log.read_text()
    assert f"the fleet's page ended early; {log} says why" in capfd.readouterr().err


@pytest.mark.slow
def test_a_page_for_everybody_says_so(folder: Path) -> None:
    command = [sys.executable, "-m", "edgefl", "dashboard", str(folder), "--listen", "0.0.0.0:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = [process.stderr.readline(), process.stderr.readline()]
    process.terminate()
    process.communicate(timeout=300)
    assert "read-only" in lines[0] and "shows the fleet to anybody" in lines[1]


def test_the_page_alone_needs_none_of_the_servers_packages() -> None:
    script = (
        "import sys\n"
        "import edgefl_server.dashboard.web.serve, edgefl_server.dashboard.web.serve\n"
        "sys.argv = ['edgefl', 'dashboard', '--alerts']\n"
        "import edgefl.cli\n"
        "try:\n"
        "    edgefl.cli.main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'onnx', 'numba', 'amqtt', 'psutil', 'edgefl_export'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ended = run_python("-c", script, check=True)

    assert ended.stdout.splitlines()[-1] == "[]"
