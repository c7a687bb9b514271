"""A gateway's cache: one download for all who ask, nothing wrong kept, never more than it may."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from edgefl.mirror.blobs import Cache, CacheSettings
from edgefl.wire.blobs import describe
from edgefl.wire.mirrors import Mirror
from edgefl_device.store.database import Store
from tests.mirror.hostile import PATIENCE_S, ScriptedMirror, Talk
from tests.mirror.serving import serving
from tests.mirror.test_serve import Client, brought

DATA = np.random.default_rng(2).bytes(600_001)
REF = describe(DATA, 65536)
MOST = 1 << 21


def upstream(url: str, most: int = MOST) -> CacheSettings:
    return CacheSettings(Mirror.parse(url), most)


def good(talk: Talk) -> None:
    talk.good(DATA)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def settled(folder: Path) -> set[str]:
    """Once nothing is on its way."""
    deadline = time.monotonic() + PATIENCE_S
    while any(name.endswith(".partial") for name in files(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return files(folder)


def test_what_ten_ask_for_is_fetched_once_and_passed_on_as_it_comes(tmp_path: Path) -> None:
    go_on = threading.Event()

    def half(talk: Talk) -> None:
        talk.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(DATA)}\r\n\r\n")
        talk.send(DATA[:300_000])
        go_on.wait(PATIENCE_S)
        talk.send(DATA[300_000:])

    with ScriptedMirror(half) as origin, serving(tmp_path, upstream=upstream(origin.url)) as server:
        first = Client(server.port)
        assert first.ask(f"/{REF.sha256}", Range="bytes=0-99999")[::2] == (206, DATA[:100_000])
        answers: list[bytes] = []
        asking = [
            threading.Thread(target=lambda: answers.append(Client(server.port).ask(f"/{REF.sha256}")[2]))
            for _ in range(10)
        ]
        for each in asking:
            each.start()
        go_on.set()
        for each in asking:
            each.join(PATIENCE_S)
        assert answers == [DATA] * 10
        assert first.ask(f"/{REF.sha256}", "HEAD")[0] == 200
        assert (len(origin.asked), settled(tmp_path)) == (1, {REF.sha256})


def test_what_is_here_outlives_the_other_mirror_and_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with ScriptedMirror(good) as origin:
        with serving(folder, upstream=upstream(origin.url)) as server:
            assert Client(server.port).ask(f"/{REF.sha256}")[2] == DATA
            settled(folder)
        away = upstream(origin.url)
    (folder / f"{'ab' * 32}.partial").write_bytes(b"half")
    (folder / ("cd" * 32)).write_bytes(b"not what its name says")
    (folder / "readme.txt").write_bytes(b"of people")
    with serving(folder, upstream=away) as server:
        assert files(folder) == {REF.sha256, "readme.txt"}
        assert Client(server.port).ask(f"/{REF.sha256}")[2] == DATA
        assert Client(server.port).ask(f"/{'cd' * 32}")[0] == 503


def test_a_download_that_breaks_off_goes_on_where_it_ended(tmp_path: Path) -> None:
    def breaks_off(talk: Talk) -> None:
        if talk.part is None:
            talk.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(DATA)}\r\n\r\n")
            talk.send(DATA[:300_000])
        else:
            talk.good(DATA)

    with ScriptedMirror(breaks_off) as origin, serving(tmp_path, upstream=upstream(origin.url)) as server:
        assert Client(server.port).ask(f"/{REF.sha256}")[2] == DATA
        (_, again) = [talk.part for talk in origin.asked]
        assert again is not None and again[0] > 0 and again[1] == len(DATA)


def test_wrong_bytes_are_not_kept_and_their_device_turns_to_the_next(tmp_path: Path) -> None:
    def wrong(talk: Talk) -> None:
        talk.good(DATA[:-1] + b"?")

    told: list[str] = []
    store = Store(tmp_path / "store", limit_bytes=1 << 24, history_rounds=5)
    with (
        ScriptedMirror(wrong) as origin,
        serving(tmp_path / "cache", upstream=upstream(origin.url), told=told) as server,
    ):
        (said,) = brought(server.url, store, [REF])
        assert "chunk 9 has a wrong digest" in said and store.missing_chunks(REF) == [9]
        assert settled(tmp_path / "cache") == set()
        assert Client(server.port).ask(f"/{REF.sha256}")[0] == 503, "and it is not fetched again at once"
        assert len(origin.asked) == 1 and "another digest" in told[0]
    store.close()


@pytest.mark.parametrize(("code", "answer"), [(404, 404), (503, 503), (302, 503)])
def test_a_missing_blob_is_not_asked_for_at_once(tmp_path: Path, code: int, answer: int) -> None:
    def status(talk: Talk) -> None:
        talk.send(f"HTTP/1.1 {code} No\r\nContent-Length: 0\r\n\r\n")

    with ScriptedMirror(status) as origin, serving(tmp_path, upstream=upstream(origin.url)) as server:
        client = Client(server.port)
        assert [client.ask(f"/{REF.sha256}")[0] for _ in range(3)] == [answer] * 3
        assert len(origin.asked) == 1 and files(tmp_path) == set()
        assert client.ask("/nonsense")[0] == 404 and len(origin.asked) == 1


def test_the_longest_unused_leave_and_what_never_fits_is_refused(tmp_path: Path) -> None:
    blobs = {describe(DATA[n:], 65536).sha256: DATA[n:] for n in range(4)}
    names = list(blobs)

    def each(talk: Talk) -> None:
        talk.good(blobs[talk.path[1:]])

    with ScriptedMirror(each) as origin:
        with serving(tmp_path, upstream=upstream(origin.url, 3 * len(DATA))) as server:
            client = Client(server.port)
            for name in (*names[:3], names[0], names[3]):
                assert client.ask(f"/{name}")[2] == blobs[name]
                settled(tmp_path)
            assert files(tmp_path) == {names[0], names[2], names[3]}
        with serving(tmp_path, upstream=upstream(origin.url, 1000)) as server:
            assert files(tmp_path) == set()
            assert Client(server.port).ask(f"/{names[0]}")[0] == 503


def test_names_that_are_made_up_cost_a_bounded_number_of_downloads(tmp_path: Path) -> None:
    def silent(talk: Talk) -> None:
        talk.ended.wait()

    with ScriptedMirror(silent) as origin:
        cache = Cache(tmp_path, upstream(origin.url))
        opened = [cache.open(f"{number:064x}") for number in range(100)]
        assert sum(each is not None for each in opened) == 8
        for each in opened:
            if each is not None:
                each.close()
        cache.close()
