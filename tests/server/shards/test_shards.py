"""Workers take the updates of their shards: the model has the same bits as if the server had taken them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Round, Task
from edgefl_server.events import RoundClosed, RoundOpened, UpdateAccepted, Warned
from edgefl_server.shards.messages import SHARDS, RoundSum, UpdatesHandled, shard_of, shards_of, worker_of
from edgefl_server.workers.process import ProcessLauncher
from tests.conftest import Mosquitto
from tests.server.fleet import PATIENCE_S, ScriptedDevice
from tests.server.forked import ForkedLauncher
from tests.server.shards.fleets import NAMES, KnownWorkers, model_of, started


def test_each_shard_has_one_worker_whatever_their_number() -> None:
    for workers in (1, 2, 3, 4, SHARDS):
        shards = [shard for worker in range(workers) for shard in shards_of(worker, workers)]
        assert sorted(shards) == list(range(SHARDS))
        assert all(shard_of(name) in shards_of(worker_of(name, workers), workers) for name in NAMES)
    # The same for ever: devices keep updates for a shard while the server is started again.
    assert [shard_of(name) for name in NAMES[:4]] == SHARDS_OF_NAMES


SHARDS_OF_NAMES = [34, 52, 14, 24]


@pytest.mark.slow
def test_one_two_and_four_workers_end_with_the_same_bits(fleet: Any, federation: str, tmp_path: Path) -> None:
    servers = {
        workers: fleet(f"{federation}-{workers}", f"out-{workers}", workers=workers, launcher=launcher)
        for workers, launcher in ((0, None), (2, ProcessLauncher()), (4, ForkedLauncher()))
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


def test_killed_workers_lose_nothing(fleet: Any, federation: str, tmp_path: Path) -> None:
    known = KnownWorkers()
    server = fleet(federation, "out", workers=2, launcher=known, rounds=3)
    # In the middle of a round; as one begins; and before the rest of its devices have been heard.
    server.wait_for(UpdateAccepted, lambda event: event.round == 1 and worker_of(event.device, 2) == 0)
    os.kill(known.pid(0), signal.SIGKILL)
    server.wait_for(RoundOpened, lambda event: event.round == 2)
    os.kill(known.pid(1), signal.SIGKILL)
    server.wait_for(UpdateAccepted, lambda event: event.round == 3)
    for worker in (0, 1):
        os.kill(known.pid(worker), signal.SIGKILL)
    closed = server.wait_for(RoundClosed, lambda event: event.round == 3)
    server.join()

    assert closed.reports == len(NAMES)
    assert model_of(tmp_path / "out") == model_of(undisturbed(fleet, federation, tmp_path, rounds=3))
    told = [event.text for event in server.seen_of(Warned)]
    assert any("worker 0 was killed by signal 9; another one takes up" in text for text in told), told
    assert not list((tmp_path / "out" / "updates").glob("*"))


def test_workers_that_die_unheard_lose_nothing(fleet: Any, federation: str, tmp_path: Path) -> None:
    """One as it took updates: the next finds them. One as the round ends: the server adds them up itself."""
    known = KnownWorkers({0: UpdatesHandled, 1: RoundSum})
    server = fleet(federation, "out", workers=2, launcher=known, rounds=1)
    closed = server.wait_for(RoundClosed)
    server.join()

    assert closed.reports == len(NAMES) and known.silenced == {0, 1}
    assert model_of(tmp_path / "out") == model_of(undisturbed(fleet, federation, tmp_path, rounds=1))


def test_a_run_goes_on_with_another_number_of_workers(
    mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path, fleet: Any
) -> None:
    tasks: dict[str, Task] = {}
    all_answer = threading.Event()

    def first_six(device: ScriptedDevice, task: Task, opened: Round) -> None:
        first = tasks.setdefault(device.name, task)  # which names a shard, whatever later ones do
        if device.name in NAMES[:6] or all_answer.is_set():
            device.report(first, opened)

    server = fleet(federation, "out", first_six, workers=3, rounds=1)
    for _ in range(6):
        server.wait_for(UpdateAccepted)
    server.stop()
    fewer = started(federation, mosquitto.address, tmp_path / "out", limits, workers=2, rounds=1)
    accepted = {fewer.wait_for(UpdateAccepted).device for _ in range(6)}
    fewer.stop()
    all_answer.set()
    alone = started(federation, mosquitto.address, tmp_path / "out", limits, rounds=1)
    closed = alone.wait_for(RoundClosed)
    alone.join()

    assert accepted == set(NAMES[:6]) and closed.reports == len(NAMES)
    assert model_of(tmp_path / "out") == model_of(undisturbed(fleet, federation, tmp_path, rounds=1))


def undisturbed(fleet: Any, federation: str, tmp_path: Path, *, rounds: int) -> Path:
    """The folder of the same run without workers."""
    fleet(f"{federation}-calm", "calm", rounds=rounds).join()
    return tmp_path / "calm"


HIRING = """
import sys, time
from pathlib import Path
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl_server.coordinator.states import Rules
from edgefl_server.workers.process import ProcessLauncher
from edgefl_server.shards.worker import WorkerSettings
out = Path(sys.argv[1])
rules = Rules(run="r", seed=0, rounds=1, tiers=())
class Sink: put = print
address, database = Address("127.0.0.1", 1), f"sqlite:///{out}/j.sqlite"
settings = WorkerSettings(0, 2, "demo", rules, Limits(), address, database, str(out), False)
print(ProcessLauncher().launch(settings, Sink()).pid, flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_its_server_even_where_that_is_killed(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", HIRING, str(tmp_path)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    worker = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait()
    worker.wait(PATIENCE_S)
