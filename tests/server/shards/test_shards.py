"""Workers take the updates of their shards: the model has the same bits as if the server had taken them all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import encode
from server.events import Noted, Rejected, RoundClosed, RoundOpened, UpdateAccepted, Warned
from server.shards.slots import SHARDS, shard_of, shards_of, worker_of
from tests.conftest import Mosquitto
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    RunningServer,
    ScriptedDevice,
    expected_mean,
    trained,
    update_for,
)
from tests.server.shards.fleets import NAMES, Known, model_of, started


@pytest.fixture
def fleet(mosquitto: Mosquitto, limits: Limits, tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server and its devices under a name of their own; all end with the test."""
    running: list[Any] = []

    def start(federation: str, out: str, answer: Any = None, **options: Any) -> RunningServer:
        for name in NAMES:
            running.append(ScriptedDevice(mosquitto.address, federation, name, limits, answer))
        server = started(federation, mosquitto.address, tmp_path / out, limits, **options)
        running.append(server)
        return server

    yield start
    for each in running:
        if isinstance(each, ScriptedDevice) or (each.thread and each.thread.is_alive()):
            each.stop()


def test_each_shard_has_one_worker_whatever_their_number() -> None:
    for workers in (1, 2, 3, 4, SHARDS):
        shards = [shard for worker in range(workers) for shard in shards_of(worker, workers)]
        assert sorted(shards) == list(range(SHARDS))
        assert all(shard_of(name) in shards_of(worker_of(name, workers), workers) for name in NAMES)
    # The same for ever: devices keep updates for a shard while the server is started again.
    assert [shard_of(name) for name in NAMES[:4]] == SHARDS_OF_NAMES


SHARDS_OF_NAMES = [34, 52, 14, 24]


def test_one_two_and_four_workers_end_with_the_same_bits(
    fleet: Any, federation: str, tmp_path: Path
) -> None:
    servers = {
        workers: fleet(f"{federation}-{workers}", f"out-{workers}", workers=workers) for workers in (0, 2, 4)
    }

    for workers, server in servers.items():
        rounds = [server.wait_for(RoundClosed) for _ in range(2)]
        server.join()
        assert [(closed.reports, closed.rejected) for closed in rounds] == [(len(NAMES), 0)] * 2, workers
        assert model_of(tmp_path / f"out-{workers}") == model_of(tmp_path / "out-0")
    accepted = servers[4].seen_of(UpdateAccepted)
    assert sorted((each.round, each.device) for each in accepted) == [
        (number, name) for number in (1, 2) for name in sorted(NAMES)
    ]
