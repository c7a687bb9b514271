"""Workers as actors of a Ray that is started for the test: the same worker, the same bits."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.config.rounds import ServerTable
from edgefl_server.events import RoundClosed, UpdateAccepted, Warned
from edgefl_server.shards.messages import worker_of
from edgefl_server.shards.pool import WorkerOptions
from edgefl_server.workers.protocol import Died
from edgefl_server.workers.ray_cluster import RayHandle, RayLauncher, WorkerActor
from tests.server.fleet import RunningServer
from tests.server.shards.fleets import NAMES, model_of
from tests.support.errors import ConfigError, StoreError, refuses


@pytest.fixture
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray", reason="the extra ray is not installed")
    yield found
    found.shutdown()


@pytest.mark.slow
def test_actors_end_with_the_same_bits_and_one_that_dies_is_replaced(
    ray: Any, fleet: Callable[..., RunningServer], federation: str, tmp_path: Path
) -> None:
    launched: list[RayHandle] = []

    class Launcher(RayLauncher):
        def launch(self, *arguments: Any) -> RayHandle:
            launched.append(super().launch(*arguments))
            return launched[-1]

    calm = fleet(f"{federation}-calm", "calm")
    server = fleet(federation, "out", workers=2, launcher=Launcher("local", 2))
    server.wait_for(UpdateAccepted, lambda event: worker_of(event.device, 2) == 0)
    ray.kill(launched[0]._actor)
    closed = server.wait_for(RoundClosed, lambda event: event.round == 2)
    server.join()
    calm.join()

    assert closed.reports == len(NAMES) and len(launched) >= 3
    assert any("out of Ray's reach" in event.text for event in server.seen_of(Warned))
    assert model_of(tmp_path / "out") == model_of(tmp_path / "calm")


@pytest.mark.slow
def test_a_busy_cluster_is_named_and_waited_for(ray: Any) -> None:
    class Busy:
        def there(self) -> None: ...

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    busy = ray.remote(num_cpus=1)(Busy)
    ray.get((first := busy.remote()).there.remote())
    while ray.available_resources().get("CPU", 0):
        time.sleep(0.05)

    with pytest.raises(StoreError, match=r"cores, and all are taken: .*wait for other jobs"):
        RayLauncher("local", 1).launch(None, queue.SimpleQueue())  # type: ignore[arg-type]

    said: queue.Queue[object] = queue.Queue()
    actor = ray.remote(num_cpus=1)(WorkerActor).remote(None)
    handle = RayHandle(ray, actor, said, answer_s=2.0)  # it was promised a core and gets none
    died = said.get(timeout=50)
    handle.kill()
    assert isinstance(died, Died) and "did not answer for 2 s" in died.reason
    ray.kill(first)


def test_a_cluster_that_is_not_there_is_named(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"no Ray at 127.0.0.1:1 \(.*refused.*\): start one"):
        RayLauncher("127.0.0.1:1", 2).launch(None, queue.SimpleQueue())  # type: ignore[arg-type]


def test_a_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(ConfigError, package="ray"):
        WorkerOptions.of(ServerTable(workers=2, ray="local"))
