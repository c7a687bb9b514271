"""A federation whose weights come by mirrors: the same model, with a gateway's cache, in pages, and when mirrors die."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.store.database import Store
from edgefl_server.events import Event, RoundClosed
from tests.conftest import BrokerProcess, SessionFactory
from tests.device_runtime.agent.link import Inbox, publish_blob
from tests.e2e.inside import train
from tests.e2e.runs import EDGEFL, PATIENCE_S, TINY, Calm
from tests.mirror.hostile import ScriptedMirror, Talk
from tests.support.device_logs import RecordedLog

pytestmark = pytest.mark.e2e
ROUNDS = 3
ARGUMENTS = ["--rounds", str(ROUNDS), "--seed", "3"]
PAGED = "announcement_bytes = 700"
TWO = "\n[tiers.strong]\ncount = 2\n"


class MirrorProcess:
    """`edgefl mirror` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*EDGEFL, "mirror", str(folder), "--port", "0", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = next(
            word.rstrip(",") for word in self._process.stdout.readline().split() if word.startswith("http:")
        )

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(how)
        self._process.wait(PATIENCE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def mirror(folder: Path, *arguments: str) -> Iterator[MirrorProcess]:
    process = MirrorProcess(folder, *arguments)
    try:
        yield process
    finally:
        process.end()


def config(folder: Path, *urls: str, only: bool = False) -> str:
    named = ", ".join(f'"{url}"' for url in urls)
    return (
        TINY
        + PAGED
        + TWO
        + f'[downlink]\nmirrors = [{named}]\nmirrors_only = {str(only).lower()}\nmirror_folder = "{folder}"\n'
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The same federation over the broker alone, and its announcements whole."""
    return Calm.of(tmp_path_factory.mktemp("mirror") / "run", ARGUMENTS, TINY + TWO)


@pytest.mark.slow
def test_mirrors_alone_give_the_same_weights(calm: Calm, tmp_path: Path) -> None:
    blobs, cache = tmp_path / "blobs", tmp_path / "cache"
    blobs.mkdir()
    with mirror(blobs) as origin, mirror(cache, "--upstream", origin.url) as gateway:
        run = calm.beside(tmp_path / "run", config=config(blobs, gateway.url, origin.url, only=True))
        rounds = run.finish()

    assert rounds[-1]["weights_sha256"] == calm.weights_sha256
    assert [(row["reports"], row["down_bytes"]) for row in rounds] == [(2, 0)] * ROUNDS
    assert all(row["down_bytes"] > 0 for row in calm.rounds)
    assert len([path for path in cache.iterdir() if len(path.name) == 64]) > 5


@pytest.mark.slow
def test_a_killed_mirror_is_no_loss(broker: BrokerProcess, federation: str, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    with mirror(blobs) as origin:

        def hear(event: Event) -> None:
            if isinstance(event, RoundClosed) and event.round == 1:
                origin.end()

        by_mirror = config(blobs, origin.url)
        other = train(tmp_path / "run", by_mirror, broker.address, federation, ROUNDS, hear=hear)
    calm = train(tmp_path / "calm", TINY + TWO, broker.address, f"{federation}-calm", ROUNDS)

    assert other.rounds[-1].weights_sha256 == calm.rounds[-1].weights_sha256
    assert other.rounds[0].down_bytes == 0 < other.rounds[-1].down_bytes
    assert other.outcomes == calm.outcomes == [("closed", 2, 0)] * ROUNDS


def test_a_mirror_that_is_killed_in_the_middle_of_a_blob(
    broker: BrokerProcess, connect: SessionFactory, federation: str, tmp_path: Path, limits: Limits
) -> None:
    data = np.random.default_rng(4).bytes(3_000_000)
    topics = Topics(federation)
    ref = publish_blob(connect(broker.address), topics, data, 65536)
    store = Store(tmp_path / "store", limit_bytes=1 << 24, history_rounds=5)
    session = connect(broker.address)
    inbox = Inbox(session)

    def slow(talk: Talk) -> None:  # what a gateway passes on as it comes
        talk.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n")
        for start in range(0, len(data), 65536):
            talk.send(data[start : start + 65536])
            if talk.ended.wait(0.02):
                return

    with ExitStack() as stack:
        origin = stack.enter_context(ScriptedMirror(slow))
        gateway = stack.enter_context(mirror(tmp_path / "cache", "--upstream", origin.url))
        killed = False

        class InTheMiddle(threading.Event):
            """Ends the gateway once a few chunks are there."""

            def is_set(self) -> bool:
                nonlocal killed
                if not killed and len(store.missing_chunks(ref)) < ref.count - 5:
                    gateway.end()
                    killed = True
                return False

        log = RecordedLog()
        mirrors = Mirrors(limits, [Mirror.parse(gateway.url)], log=log)
        fetcher = Fetcher(session, topics, store, limits, mirrors, InTheMiddle())
        inbox.serve(fetcher)
        assert fetcher.get(ref) == data

    assert killed and len(log.texts) == 1
    assert 5 * 65536 <= mirrors.fresh_bytes < len(data)
    assert fetcher.received_bytes >= len(data) - mirrors.fresh_bytes
    inbox.stop()
    store.close()
