"""Clients that train in other processes: the same bits as in this one, whoever trains them and whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil
import pytest

import edgefl
from edgefl.simulator.results import RoundRow
from edgefl.simulator.rounds import SimulatedRounds
from edgefl.simulator.trainers.local_rounds import ClientPortion
from edgefl.simulator.trainers.pool import TrainerPool
from edgefl.simulator.trainers.worker import CollectCommand, TrainCommand, TrainingWorker, WorkerFailure
from edgefl_server.workers.protocol import Died, Stop
from edgefl_server.workers.shared_memory import SharedMemory, map_object
from tests.rings.rows import mostly_slow
from tests.simulator.small import federation, stop_after
from tests.support.errors import ConfigError, DataError, EdgeflError, refuses

CASES: dict[str, dict[str, dict[str, object]]] = {
    "mixed tiers, residuals on clients": {
        "codec": {"name": "ef_signsgd"},
        "round": {"fraction": 0.7, "weighting": "samples"},
    },
    "state on clients and at the server": {
        "algorithm": {"name": "scaffold"},
        "tiers": {"weak": {"cut": 0, "count": 1}},
    },
    "in groups, one of them filled up": {"simulation": {"together": 3}},
    "a median, which takes all updates": {"aggregate": {"rule": "median"}},
    "who changed it, clipped, from rounded weights": {
        "round": {"count": "nonzero"},
        "aggregate": {"clip_norm": 0.05},
        "downlink": {"encoding": "float16"},
    },
}


def bits(rows: Sequence[RoundRow]) -> list[tuple[object, ...]]:
    """What does not depend on who trained."""
    return [(row.weights_sha256, row.train_loss, row.reports, row.up_bytes, row.down_bytes) for row in rows]


def workers() -> list[psutil.Process]:
    """The processes that train for this one: forked from one that is kept."""
    own = psutil.Process().children()
    templates = [each for each in own if "edgefl.simulator.trainers.template" in each.cmdline()]
    return [worker for template in templates for worker in template.children()]


def nobody_is_left() -> bool:
    return not psutil.wait_procs(workers(), timeout=300)[1]


def killing(after: int, victims: Callable[[], list[psutil.Process]]) -> Callable[..., Any]:
    """Kill ``victims`` as the report of so many clients has come."""
    real, seen = SimulatedRounds._take, []

    def take(self: SimulatedRounds, *given: Any) -> Any:
        seen.append(given)
        if len(seen) == after:
            for each in victims():
                os.kill(each.pid, signal.SIGKILL)
        return real(self, *given)

    return take


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    mostly_slow(
        CASES, ("mixed tiers, residuals on clients", "who changed it, clipped, from rounded weights")
    ),
)
def test_any_number_of_workers_ends_with_the_bits_of_one(case: str, tmp_path: Path) -> None:
    chosen = federation(**CASES[case])
    one = edgefl.simulate(chosen, tmp_path / "one")
    some = edgefl.simulate(chosen, tmp_path / "some", workers=2)

    assert bits(some.history) == bits(one.history)
    assert some.federation.simulation.workers == 2 and nobody_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("dying", mostly_slow(["one", "all"], ["one"]))
def test_a_killed_worker_counts_once(dying: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = federation(**CASES["state on clients and at the server"])
    whole = edgefl.simulate(chosen, tmp_path / "whole")
    killed: list[int] = []

    def victims() -> list[psutil.Process]:
        found = workers()[: 1 if dying == "one" else None]
        killed.extend(each.pid for each in found)
        return found

    # In the second round, in which clients go on from what they kept.
    monkeypatch.setattr(SimulatedRounds, "_take", killing(7, victims))
    other = edgefl.simulate(chosen, tmp_path / "other", workers=2)

    assert len(killed) == (1 if dying == "one" else 2)
    assert bits(other.history) == bits(whole.history)


@pytest.mark.slow
def test_a_simulation_resumes_with_other_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.simulator.folder._SAVE_EVERY_S", 0.0)
    chosen = federation(**CASES["mixed tiers, residuals on clients"])
    whole = edgefl.simulate(chosen, tmp_path / "whole")
    stop_after(2, chosen, tmp_path / "parts", workers=2)
    assert nobody_is_left()
    parts = edgefl.simulate(chosen, tmp_path / "parts", resume=True, workers=1)

    assert bits(parts.history) == bits(whole.history)


@pytest.mark.slow
def test_bad_data_of_a_client_are_the_same_error(tmp_path: Path) -> None:
    def own(name: str, rows: int, wide: int) -> None:
        np.savez(folder / f"{name}.npz", x=np.zeros((rows, 1, 8, wide), np.uint8), y=np.zeros(rows, np.int64))

    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(6):
        own(f"all-{number}", 12, 8 if number < 2 else number)
    chosen = federation(data={"devices_dir": str(folder)})
    chosen = chosen.model_copy(
        update={"tiers": {"all": chosen.tiers["strong"].model_copy(update={"count": 6})}}
    )
    told = []
    for count in (1, 2):
        with pytest.raises(DataError) as error:
            edgefl.simulate(chosen, tmp_path / str(count), workers=count)
        told.append(error.value.message)

    assert told[0] == told[1] and "samples have shape" in told[0]


def test_arrays_in_shared_memory_are_mapped_and_not_copied() -> None:
    thing = {"x": np.arange(10_000, dtype=np.float32), "empty": np.zeros((0, 3)), "y": [np.int8(3), "text"]}
    memory = SharedMemory.of(thing)
    found = map_object(os.dup(memory.file.fileno()))

    assert isinstance(found, dict)
    np.testing.assert_array_equal(found["x"], thing["x"])
    assert found["empty"].shape == (0, 3) and found["y"] == [3, "text"]
    assert not found["x"].flags.owndata and not found["x"].flags.writeable


@dataclass
class FakeWorkers:
    """Launcher and handle of workers that die as often as ``deaths`` says, as they are asked to train."""

    deaths: int
    launched: int = 0
    sink: Any = None

    def launch(self, settings: object, sink: Any) -> FakeWorkers:
        self.launched += 1
        self.sink = sink
        return self

    def share(self, thing: object) -> object:
        return thing

    def send(self, command: object) -> None:
        if isinstance(command, TrainCommand) and self.deaths:
            self.deaths -= 1
            self.sink.put(Died("was killed by signal 9"))
        elif isinstance(command, TrainCommand):
            self.sink.put([])
        elif isinstance(command, CollectCommand):
            self.sink.put(None)

    def kill(self) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("deaths", [2, 3])
def test_clients_that_kill_every_worker_are_named(deaths: int) -> None:
    launcher = FakeWorkers(deaths)
    pool = TrainerPool(launcher, 1, setup=None)  # type: ignore[arg-type]
    trained = pool.train([ClientPortion("all", ("all-1", "all-2"))], lambda _: {})
    if deaths == 2:
        assert list(trained) == [] and launcher.launched == 3
        return
    with refuses(EdgeflError, clients="all-1, all-2"):
        list(trained)


def test_an_error_that_nobody_foresaw_says_where_it_was() -> None:
    messages: SimpleQueue[Any] = SimpleQueue()
    worker = TrainingWorker(None, messages)  # type: ignore[arg-type]
    worker.send(Stop())
    worker.run()
    failed = messages.get()

    assert isinstance(failed, WorkerFailure) and isinstance(failed.error, AttributeError)
    assert "in a worker of the simulation" in failed.error.__notes__[0]


def test_fewer_workers_than_one_are_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, workers=0):
        edgefl.simulate(federation(), tmp_path, workers=0)
