"""One device that runs rounds: each run a new process on the same folder, that can be killed at any step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.tensors import Arrays
from edgefl_device.data.samples import FittedData
from edgefl_device.engine.base import LoadedGraph, Outputs, State
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.round.autotune import Autotuner
from edgefl_device.round.control import StepProgress
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.round.job import Job
from edgefl_device.round.offline import WatchedControl
from edgefl_device.round.trainer import LocalTrainer, RoundResult
from edgefl_device.store.database import Store
from tests.device_runtime import tiny
from tests.device_runtime.tiny import ROWS, STEPS, World

ALL_STEPS = range(1, STEPS + 1)
STATE = 3
"""Tensors of the tiny algorithm's state."""


class CountingEngine(OnnxEngine):
    """Counts the calls of each graph; ``fed`` is told what each call is given."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, int] = {}
        self.fed: Callable[[str, Arrays], object] = lambda _name, _feeds: None

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> LoadedGraph:  # type: ignore[override]
        return _Counted(super().load(graph, artifact, threads), graph.name, self)


@dataclass
class _Counted:
    inner: LoadedGraph
    name: str
    engine: CountingEngine

    def run(self, feeds: Arrays, state: State) -> Outputs:
        self.engine.runs[self.name] = self.engine.runs.get(self.name, 0) + 1
        self.engine.fed(self.name, feeds)
        return self.inner.run(feeds, state)


class OneByOneEngine(CountingEngine):
    """Notes how many tensors each call moves, and how many copies of state were ever alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []
        self.written: list[int] = []
        self.most_copies = 0
        self._copies: list[weakref.ref[tiny.Array]] = []

    def read_state(self, state: State) -> Arrays:
        copies = super().read_state(state)
        self.read.append(len(copies))
        self._copies += [weakref.ref(array) for array in copies.values()]
        self.most_copies = max(self.most_copies, sum(ref() is not None for ref in self._copies))
        return copies

    def write_state(self, arrays: Mapping[str, tiny.Array]) -> State:
        self.written.append(len(arrays))
        return super().write_state(arrays)


class Killed(Exception):
    """The power went."""


@dataclass
class Device:
    """A device's folder and store; each ``run`` is a new process on it."""

    folder: Path
    world: World
    rows: int = ROWS
    checkpoint_steps: int = 1
    engine: CountingEngine = field(default_factory=CountingEngine)
    tuner: Autotuner | None = None
    local: FittedData | None = None

    def __post_init__(self) -> None:
        self.store = Store(self.folder, limit_bytes=1 << 20, history_rounds=5)

    def run(
        self, job: Job, *, watch: Callable[[StepProgress], None] = lambda _: None, carry: Arrays | None = None
    ) -> RoundResult:
        self.control = WatchedControl(watch)
        manifest = self.world.bundle.manifest
        self.loader = GraphLoader(self.engine, manifest, self.world, RoundProfiler(), self.tuner)
        data = self.local or tiny.local(self.rows).fitted(tiny.DATA)
        trainer = LocalTrainer(self.loader, self.store, self.folder, self.checkpoint_steps)
        return trainer.train(job, data, carry or {}, self.control)


def kill_at(stage: str, step: int) -> Callable[[StepProgress], None]:
    def watch(at: StepProgress) -> None:
        if (at.stage, at.step) == (stage, step):
            raise Killed

    return watch


def assert_same(one: RoundResult, other: RoundResult) -> None:
    assert tensors.dump(one.update) == tensors.dump(other.update)
    assert tensors.dump(one.carry) == tensors.dump(other.carry)
    assert (one.metrics, one.samples) == (other.metrics, other.samples)
