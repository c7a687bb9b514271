"""The batches of a whole run by their content: none that trains holds a held-out row, and those that evaluate hold all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from edgefl.config import parse
from edgefl.lab.lab import Lab
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed
from edgefl.wire.bundle.manifest import DataSpec, Graph
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.config import AgentConfig
from edgefl_device.engine import open_engine
from edgefl_device.engine.base import Engine, LoadedGraph, Outputs, State
from edgefl_server.aggregate.integer_sums import SCALE
from edgefl_server.compose import compose
from edgefl_server.events import RoundClosed, RoundOpened
from tests.conftest import BrokerProcess
from tests.e2e.inside import RunningDevice
from tests.server.fleet import RunningServer
from tests.wire.held_out_rows import HeldOutRows

SEED, SHARE, ROUNDS, ADDED = 7, 0.3, 3, 30
FEDERATION = {
    "model": {"name": "mlp", "options": {"hidden": [8]}},
    "algorithm": {"batch": 8, "steps": 12},
    "data": {"name": "digits", "train_samples": 80, "test_samples": 60},
    "evaluate": {"split": SHARE, "every": 1},
    "round": {"min_devices": 2, "min_reports": 2},
    "limits": {"checkpoint_steps": 2},
    "tiers": {"strong": {"count": 1}, "weak": {"cut": 1, "count": 1}},
}


@dataclass
class RecordingEngine:
    """An engine that records the samples of all batches, by the purpose of the round: ``train`` or ``evaluate``.

    Batches of another shape hold outputs of frozen units. Their forward pass comes before the graphs that have a state,
    which show the purpose.
    """

    inner: Engine
    shape: tuple[int, ...]
    rows: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    forward: set[bytes] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def version(self) -> str:
        return self.inner.version

    @property
    def format(self) -> str:
        return self.inner.format

    @property
    def thread_counts(self) -> tuple[int, ...]:
        return self.inner.thread_counts

    def load(self, graph: Graph, artifact: bytes, threads: int = 0) -> LoadedGraph:
        states = {port.name for port in (*graph.inputs, *graph.outputs) if port.role == "state"}
        rows = self.forward
        if states:
            sums = any(name.startswith("state.sum.") for name in states)
            rows = self.rows["evaluate" if sums else "train"]
            rows |= self.forward
            self.forward.clear()
        return RecordingGraph(self.inner.load(graph, artifact, threads), self.shape, rows)

    def read_state(self, state: State) -> Arrays:
        return self.inner.read_state(state)

    def write_state(self, arrays: Mapping[str, Array]) -> State:
        return self.inner.write_state(arrays)


@dataclass
class RecordingGraph:
    inner: LoadedGraph
    shape: tuple[int, ...]
    rows: set[bytes]

    def run(self, feeds: Mapping[str, Array], state: State) -> Outputs:
        for name, batch in feeds.items():
            if name.startswith("batch.") and batch.shape[1:] == self.shape:
                self.rows |= {row.tobytes() for row in batch}
        return self.inner.run(feeds, state)


def rows_of(data: Path, spec: DataSpec) -> tuple[set[bytes], set[bytes]]:
    """Return the training rows and the held-out rows of a file, as a model reads them, by the protocol's rule."""
    with np.load(data) as stored:
        found = HeldOutRows(SEED, SHARE, spec, stored["x"].reshape(-1, *spec.shape))
    read = found.x.astype(spec.dtype)
    if found.x.dtype != read.dtype:
        read = read * read.dtype.type(spec.scale) + read.dtype.type(spec.shift)
    held_out = found.held_out()
    rows = [row.tobytes() for row in read]
    return {row for at, row in enumerate(rows) if at not in held_out}, {rows[at] for at in held_out}


@pytest.mark.e2e
def test_no_training_batch_holds_a_held_out_row(
    broker: BrokerProcess, federation: str, tmp_path: Path
) -> None:
    own = {"federation": {"name": federation, "rounds": ROUNDS, "seed": SEED}}
    settings = completed(parse({**FEDERATION, **own}, source="the test"))
    dataset, folder = open_data(settings), tmp_path / "out"
    folder.mkdir()
    lab = Lab(settings, folder)
    lab.prepare(dataset, partition(settings, dataset, len(lab.devices)))
    plan = compose(settings, dataset, folder, device="cpu")
    spec = plan.tiers["strong"].bundle.manifest.data
    engines = {name: RecordingEngine(open_engine("onnx"), spec.shape) for name in lab.devices}

    def start(name: str) -> RunningDevice:
        config = AgentConfig(
            federation=federation,
            device=name,
            broker=broker.address,
            data=folder / "devices" / name / "data.npz",
            folder=folder / "devices" / name / "store",
            tier="",
            memory_bytes=0,
            until_done=True,
            limits=settings.wire_limits,
        )
        device = RunningDevice.start(config, engines[name])
        until.callback(device.agent.stop)
        return device

    with ExitStack() as until:
        server = RunningServer.start(plan, broker.address, folder, device="cpu")
        until.callback(server.service.stop)
        devices = {name: start(name) for name in lab.devices}
        # The data grow while the devices are off, one after the other, in the middle of the run.
        before = {}
        for number, name in zip((3, 5), devices, strict=True):
            while server.wait_for(RoundOpened).round != number:
                pass
            devices[name].agent.stop()
            devices[name].join()
            data = folder / "devices" / name / "data.npz"
            before[name] = rows_of(data, spec)
            with np.load(data) as stored:
                arrays = dict(stored)
            more = slice(number * 10 - 30, number * 10 - 30 + ADDED)
            added = dataset.test_x[more].reshape(-1, *arrays["x"].shape[1:])
            assert added.dtype == arrays["x"].dtype
            x = np.concatenate([added, arrays["x"]])
            np.savez(data, x=x, y=np.concatenate([dataset.test_y[more], arrays["y"]]))
            devices[name] = start(name)
        server.join()
        for device in devices.values():
            device.join()

    closed = {event.round: event for event in server.seen_of(RoundClosed)}
    assert [each.outcome for each in closed.values()] == ["closed"] * 2 * ROUNDS
    counted = 0
    for name, engine in engines.items():
        train, held_out = rows_of(folder / "devices" / name / "data.npz", spec)
        was_train, was_held_out = before[name]
        assert was_held_out < held_out and was_train < train
        assert engine.rows["train"] == train
        assert engine.rows["evaluate"] == held_out
        counted += len(held_out)
    last = closed[2 * ROUNDS].evaluation
    assert last is not None and last.sums["count"] == counted * SCALE
