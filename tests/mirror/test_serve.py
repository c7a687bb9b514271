"""A mirror as people run it: what it gives, to devices too, what it keeps to itself, and what it says where it cannot."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import MirrorError
from edgefl.mirror.blobs import CacheSettings
from edgefl.mirror.serve import MirrorAddress, MirrorServer
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.limits import Limits
from edgefl.wire.mirrors import Mirror
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.store.database import Store
from edgefl_server.access.certificates import LabAuthority
from tests.mirror.hostile import PATIENCE_S
from tests.mirror.serving import serving
from tests.support.commands import run_python
from tests.support.device_logs import RecordedLog

DATA = np.random.default_rng(1).bytes(700_001)
REF = describe(DATA, 65536)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mirror"
    made.mkdir()
    (made / REF.sha256).write_bytes(DATA)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store", limit_bytes=1 << 24, history_rounds=5)
    yield made
    made.close()


class Client:
    """Raw requests to a mirror, over one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        self._connection.request(method, path, headers=headers)
        answer = self._connection.getresponse()
        return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()


def brought(url: str, store: Store, refs: list[BlobRef], ca_file: str = "") -> list[str]:
    """Have them in the store by a device's own client; what it tells."""
    log = RecordedLog()
    mirrors = Mirrors(Limits(), [Mirror.parse(url)], ca_file=ca_file, log=log)
    mirrors.bring(refs, store, threading.Event())
    return log.texts


def test_a_blob_whole_in_parts_and_its_headers_alone(folder: Path) -> None:
    with serving(folder) as server:
        client, path = Client(server.port), f"/{REF.sha256}"
        status, headers, data = client.ask(path)
        assert (status, data) == (200, DATA)
        assert headers["cache-control"] == "public, max-age=31536000, immutable"
        assert (headers["accept-ranges"], headers["etag"]) == ("bytes", f'"{REF.sha256}"')
        status, alone, data = client.ask(path, "HEAD")
        assert (status, data) == (200, b"") and alone["content-length"] == str(len(DATA))
        for text, first, last in (("5-9", 5, 10), ("700000-", 700_000, 700_001), ("0-9999999", 0, 700_001)):
            status, headers, data = client.ask(path, Range=f"bytes={text}")
            assert (status, data) == (206, DATA[first:last])
            assert headers["content-range"] == f"bytes {first}-{last - 1}/700001"
        assert client.ask(path, Range="bytes=700001-")[:1] == (416,)
        for odd in ("bytes=9-5", "bytes=-5", "bytes=0-1,3-4", "lines=1-2", "bytes=" + "9" * 40 + "-"):
            assert client.ask(path, Range=odd)[::2] == (200, DATA), odd


def test_a_page_of_another_origin_may_read(folder: Path) -> None:
    with serving(folder) as server:
        client = Client(server.port)
        for name, expected in ((REF.sha256, 206), ("0" * 64, 404)):
            status, headers, _ = client.ask(f"/{name}", Range="bytes=0-9", Origin="https://page.example")
            assert (status, headers["access-control-allow-origin"]) == (expected, "*")


def test_nothing_but_blobs_of_the_folder_is_given(folder: Path) -> None:
    secret, linked, pipe, sub = "aa" * 32, "bb" * 32, "cc" * 32, "dd" * 32
    (folder.parent / secret).write_bytes(b"secret")
    (folder / linked).symlink_to(folder.parent / secret)
    os.mkfifo(folder / pipe)
    (folder / sub).mkdir()
    (folder / f"{'ee' * 32}.partial").write_bytes(b"half")
    (folder / "lock").write_bytes(b"1")
    asked = [linked, pipe, sub, f"{'ee' * 32}.partial", "lock", "", REF.sha256.upper(), f"{REF.sha256}/"]
    asked += [f"..%2f{secret}", f"../{secret}", f"{sub}/../{REF.sha256}", "%00", "?x=1", "%ff" * 64]
    with serving(folder) as server:
        client = Client(server.port)
        for name in asked:
            status, headers, data = client.ask("/" + name)
            assert status == 404 and data in (b"", b"Not Found"), name
            assert "immutable" not in headers.get("cache-control", "")
        assert client.ask(f"/{REF.sha256}", "POST")[0] == 405
        assert client.ask(f"/{REF.sha256}?v=2")[::2] == (200, DATA)


def test_a_device_fetches_by_verified_https_only(folder: Path, store: Store, tmp_path: Path) -> None:
    authority = LabAuthority(tmp_path / "ca")
    pair = authority.broker("127.0.0.1", "localhost")
    with serving(folder, cert_file=str(pair.certificate), key_file=str(pair.key)) as server:
        (told,) = brought(server.url, store, [REF])
        assert "CERTIFICATE_VERIFY_FAILED" in told
        assert brought(server.url, store, [REF], str(authority.own.certificate)) == []
        (told,) = brought(
            server.url.replace("https", "http"),
            store,
            [describe(b"x" * 9, 3)],
            str(authority.own.certificate),
        )
        assert "is left for" in told

    assert store.blob(REF) == DATA


def test_many_ask_at_once_and_some_hang_up_or_never_read(folder: Path) -> None:
    with serving(folder) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for each in idle[:25]:
            each.sendall(f"GET /{REF.sha256} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        for each in idle[:10]:
            each.close()
        clients = [Client(server.port) for _ in range(8)]
        assert all(client.ask(f"/{REF.sha256}")[::2] == (200, DATA) for client in clients)
        for each in idle:
            each.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cert_file": "no.crt"}, "a certificate and its key go together"),
        ({"cert_file": "no.crt", "key_file": "no.key"}, r"the certificate no.crt .*No such file"),
        ({"host": "192.0.2.1"}, r"cannot listen on 192.0.2.1:0 .*name another one"),
        ({"host": "no such host"}, "cannot listen on no such host"),
    ],
)
def test_what_cannot_be_served_is_named(folder: Path, changes: dict[str, str], text: str) -> None:
    with pytest.raises(MirrorError, match=text):
        MirrorServer(folder, MirrorAddress(**{"port": 0, **changes}))  # type: ignore[arg-type]


def test_a_folder_or_a_port_that_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MirrorError, match=r"folder .*/none cannot be read \(No such file"):
        MirrorServer(tmp_path / "none", MirrorAddress(port=0))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MirrorError, match=r"the cache's folder .*/file cannot be used"):
        MirrorServer(
            tmp_path / "file", MirrorAddress(port=0), upstream=CacheSettings(Mirror.parse("http://x"), 1)
        )
    with serving(folder) as server, pytest.raises(MirrorError, match="in use") as caught:
        MirrorServer(folder, MirrorAddress(port=server.port))
    assert caught.value.details["port"] == server.port
    with serving(tmp_path / "cache", upstream=CacheSettings(Mirror.parse("http://x"), 1)):  # noqa: SIM117
        with pytest.raises(MirrorError, match=r"is in use \(process"):
            MirrorServer(
                tmp_path / "cache", MirrorAddress(port=0), upstream=CacheSettings(Mirror.parse("http://x"), 1)
            )


def test_the_command_serves_until_it_is_told_to_end(folder: Path) -> None:
    command = [sys.executable, "-m", "edgefl", "mirror", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition("127.0.0.1:")[2].partition('"')[0])
        assert Client(port).ask(f"/{REF.sha256}")[::2] == (200, DATA)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM, 143)


def test_the_command_names_what_it_cannot_use(tmp_path: Path) -> None:
    ended = run_python("-m", "edgefl", "mirror", tmp_path / "none", timeout=PATIENCE_S)

    assert ended.returncode == MirrorError.exit_code
    assert "cannot be read" in ended.stderr and "Traceback" not in ended.stderr
