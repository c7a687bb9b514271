"""One round on the device: what it computes, what it keeps in memory, and how it goes on after being killed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_runtime.engine.base import LoadedGraph, Outputs, State
from device_runtime.engine.onnx import OnnxEngine
from device_runtime.forward import record_tag
from device_runtime.graphs import Settings, Step
from device_runtime.job import Job
from device_runtime.profiler import Profiler
from device_runtime.record import Record
from device_runtime.runner import RoundResult, RoundRunner
from device_runtime.store import Store
from edgefl.wire import tensors
from edgefl.wire.errors import BundleError, DataError, RoundAborted
from edgefl.wire.manifest import Graph
from edgefl.wire.tensors import Arrays
from tests.device_runtime import tiny
from tests.device_runtime.tiny import BATCH, ROWS, STEPS, World

ALL_STEPS = range(1, STEPS + 1)
STATE = 3
"""Tensors of the tiny program's state."""


class CountingEngine(OnnxEngine):
    """Counts the calls of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, int] = {}

    def load(self, graph: Graph, artifact: bytes) -> LoadedGraph:  # type: ignore[override]
        return _Counted(super().load(graph, artifact), graph.name, self.runs)


@dataclass
class _Counted:
    inner: LoadedGraph
    name: str
    runs: dict[str, int]

    def run(self, feeds: Arrays, state: State) -> Outputs:
        self.runs[self.name] = self.runs.get(self.name, 0) + 1
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
    runner: RoundRunner | None = None

    def __post_init__(self) -> None:
        self.store = Store(self.folder, limit_bytes=1 << 20, history_rounds=5)

    def run(
        self,
        job: Job,
        *,
        watch: Callable[[Step], None] = lambda _: None,
        aborted: Callable[[], bool] = lambda: False,
        carry: Arrays | None = None,
    ) -> RoundResult:
        self.runner = RoundRunner(
            engine=self.engine,
            manifest=self.world.bundle.manifest,
            blobs=self.world,
            memory=self.store,
            profiler=Profiler(),
            settings=Settings(self.folder, self.checkpoint_steps, watch, aborted),
        )
        return self.runner.run(job, tiny.local(self.rows).fitted(tiny.DATA), carry or {})


def kill_at(stage: str, step: int) -> Callable[[Step], None]:
    def watch(at: Step) -> None:
        if (at.stage, at.step) == (stage, step):
            raise Killed

    return watch


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path, World(tiny.make_bundle()))
    yield made
    made.store.close()


def assert_same(one: RoundResult, other: RoundResult) -> None:
    assert tensors.dump(one.update) == tensors.dump(other.update)
    assert tensors.dump(one.carry) == tensors.dump(other.carry)
    assert (one.metrics, one.samples) == (other.metrics, other.samples)


# -- the round -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), ("stem",), ("stem", "mid")])
@pytest.mark.parametrize("rows", [ROWS, BATCH, 3])
@pytest.mark.parametrize("steps", [(STEPS,), (2, 0, 3)])
def test_a_round_computes_what_numpy_computes(
    tmp_path: Path, prefix: tuple[str, ...], rows: int, steps: tuple[int, ...]
) -> None:
    world = World(tiny.make_bundle(prefix, steps))
    device = Device(tmp_path, world, rows)

    result = device.run(world.job())

    update, carry, loss = tiny.expected_round(world, world.job(), rows)
    np.testing.assert_allclose(result.update["head.w"], update, rtol=1e-5)
    np.testing.assert_allclose(result.carry["v"], carry, rtol=1e-5, atol=1e-6)
    assert result.metrics == {"loss": pytest.approx(loss, rel=1e-5)}
    assert result.samples == rows
    device.store.close()


def test_the_rounds_hyper_parameters_override_the_manifests(device: Device) -> None:
    job = device.world.job(hyper={"lr": 0.0})

    result = device.run(job)

    np.testing.assert_array_equal(result.update["head.w"], device.world.units["head"]["head.w"])


def test_the_carry_of_the_round_before_is_fed(device: Device) -> None:
    job, carry = device.world.job(), np.full((3, 1), 2.0, np.float32)

    result = device.run(job, carry={"v": carry})

    update, _, _ = tiny.expected_round(device.world, job, ROWS, carry)
    np.testing.assert_allclose(result.update["head.w"], update, rtol=1e-5)


def test_a_sample_budget_bounds_the_rows(device: Device) -> None:
    job = device.world.job(samples=5)

    result = device.run(job)

    assert result.samples == 5
    assert device.engine.runs["forward.stem"] == 2
    np.testing.assert_allclose(
        result.update["head.w"], tiny.expected_round(device.world, job, ROWS)[0], rtol=1e-5
    )


def test_people_see_each_stage(device: Device) -> None:
    seen: list[tuple[str, int, int]] = []

    device.run(device.world.job(), watch=lambda at: seen.append((at.stage, at.step, at.steps)))

    forwards = [(f"forward {n}", done, ROWS) for n in (1, 2) for done in (4, 8, 10)]
    assert seen == forwards + [("train", step, STEPS) for step in ALL_STEPS]


def test_the_record_is_gone_after_the_round(device: Device) -> None:
    device.run(device.world.job())

    assert [file.name for file in device.folder.glob("record-*")] == []


# -- killed and run again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_steps", [1, 2, 4, 100])
@pytest.mark.parametrize("step", ALL_STEPS)
def test_killed_at_any_step_the_round_ends_with_the_same_bits(
    tmp_path: Path, step: int, checkpoint_steps: int
) -> None:
    world = World(tiny.make_bundle(steps=(4, 2)))
    undisturbed = Device(tmp_path / "a", world).run(world.job())
    device = Device(tmp_path / "b", world, checkpoint_steps=checkpoint_steps)
    with pytest.raises(Killed):
        device.run(world.job(), watch=kill_at("train", step))
    before = device.engine.runs["train"]

    assert_same(device.run(world.job()), undisturbed)
    kept = (step - 1) // checkpoint_steps * checkpoint_steps
    assert device.engine.runs["train"] - before == STEPS - kept


def test_killed_at_every_step_in_turn_the_round_ends_with_the_same_bits(tmp_path: Path) -> None:
    world = World(tiny.make_bundle())
    undisturbed = Device(tmp_path / "a", world).run(world.job())
    device = Device(tmp_path / "b", world)
    for step in ALL_STEPS:
        with pytest.raises(Killed):
            device.run(world.job(), watch=kill_at("train", step))

    assert_same(device.run(world.job()), undisturbed)
    assert device.runner is not None
    assert device.runner.graphs.residency.downloads == []


def test_a_checkpoint_copies_the_state_tensor_by_tensor_and_so_does_going_on(device: Device) -> None:
    engine = OneByOneEngine()
    device.engine = engine
    with pytest.raises(Killed):
        device.run(device.world.job(), watch=kill_at("train", 3))
    assert (engine.read, engine.written) == ([1] * 2 * STATE, [])

    device.run(device.world.job())

    assert engine.written == [1] * STATE
    assert engine.most_copies == 1


@pytest.mark.parametrize("stage", ["forward 1", "forward 2"])
@pytest.mark.parametrize("rows", [4, 8, 10])
def test_killed_in_the_forward_pass_the_round_ends_with_the_same_bits(
    tmp_path: Path, stage: str, rows: int
) -> None:
    world = World(tiny.make_bundle())
    undisturbed = Device(tmp_path / "a", world).run(world.job())
    device = Device(tmp_path / "b", world)
    with pytest.raises(Killed):
        device.run(world.job(), watch=kill_at(stage, rows))

    assert_same(device.run(world.job()), undisturbed)


def test_a_sealed_record_is_used_again_after_a_restart(device: Device) -> None:
    with pytest.raises(Killed):
        device.run(device.world.job(), watch=kill_at("train", 1))

    device.run(device.world.job())

    assert (device.engine.runs["forward.stem"], device.engine.runs["forward.mid"]) == (3, 3)


def test_a_chunk_done_before_the_restart_is_neither_run_nor_fetched_again(device: Device) -> None:
    with pytest.raises(Killed):
        device.run(device.world.job(), watch=kill_at("forward 2", 4))

    device.run(device.world.job())

    assert device.engine.runs["forward.stem"] == 3
    assert device.runner is not None
    assert device.runner.graphs.residency.downloads == [("mid",), ("head",)]


def test_i20_a_record_of_the_round_before_is_not_used(device: Device) -> None:
    with pytest.raises(Killed):
        device.run(device.world.job(), watch=kill_at("train", 1))
    later = msgspec.structs.replace(device.world.job(), round=2, nonce="n2", model_version="v2")

    device.run(later)

    assert (device.engine.runs["forward.stem"], device.engine.runs["forward.mid"]) == (6, 6)


def test_i20_a_record_of_another_bundle_is_not_used_though_the_model_is_the_same(tmp_path: Path) -> None:
    """A round was abandoned, so the model kept its version, and the device got another tier in the next."""
    deep, shallow = World(tiny.make_bundle(("stem", "mid"))), World(tiny.make_bundle(("stem",)))
    fresh = Device(tmp_path / "a", shallow).run(shallow.job())
    device = Device(tmp_path / "b", deep)
    with pytest.raises(Killed):
        device.run(deep.job(), watch=kill_at("forward 2", 10))
    with pytest.raises(Killed):
        device.run(deep.job(), watch=kill_at("train", 1))
    device.world = shallow

    assert_same(device.run(msgspec.structs.replace(shallow.job(), nonce="n2")), fresh)


def test_a_record_of_fewer_rows_is_not_used(tmp_path: Path) -> None:
    """The device was started again with more data."""
    world = World(tiny.make_bundle())
    fresh = Device(tmp_path / "a", world, rows=14).run(world.job())
    device = Device(tmp_path / "b", world)
    with pytest.raises(Killed):
        device.run(world.job(), watch=kill_at("forward 2", 10))
    device.rows = 14

    assert_same(device.run(world.job()), fresh)


def test_an_aborted_round_stops_at_the_next_step_and_keeps_its_checkpoint(device: Device) -> None:
    done: list[int] = []
    job = device.world.job()

    with pytest.raises(RoundAborted):
        device.run(
            job,
            watch=lambda at: done.append(at.step) if at.stage == "train" else None,
            aborted=lambda: len(done) == 3,
        )

    assert done == [1, 2, 3]
    saved = device.store.checkpoint(job.nonce)
    assert saved is not None
    assert saved.step == 3


def test_a_round_aborted_in_the_forward_pass_stops_there(device: Device) -> None:
    with pytest.raises(RoundAborted):
        device.run(device.world.job(), aborted=lambda: "forward.stem" in device.engine.runs)

    assert device.engine.runs == {"forward.stem": 1}


# -- what is in memory (spec I10 to I12) -----------------------------------------------------------------------


def test_i10_the_prefix_and_the_suffix_are_never_in_memory_together(device: Device) -> None:
    device.run(device.world.job())

    assert device.runner is not None
    residency = device.runner.graphs.residency
    assert residency.most == 1
    assert residency.held == {"head"}


@pytest.mark.parametrize("prefix", [(), ("stem",), ("stem", "mid")])
def test_i11_every_unit_a_tier_uses_is_downloaded_once(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    world = World(tiny.make_bundle(prefix))
    device = Device(tmp_path, world)

    device.run(world.job())

    assert device.runner is not None
    residency = device.runner.graphs.residency
    used = (*prefix, "head")
    assert residency.downloads == [(unit,) for unit in used]
    assert residency.elements == sum(a.size for unit in used for a in world.units[unit].values())
    device.store.close()


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_i12_the_forward_pass_runs_once_per_round_whatever_the_number_of_steps(
    tmp_path: Path, steps: int
) -> None:
    world = World(tiny.make_bundle(steps=(steps,)))
    device = Device(tmp_path, world)

    device.run(world.job())

    groups = -(-ROWS // BATCH)
    assert device.engine.runs == {
        "forward.stem": groups,
        "forward.mid": groups,
        "start": 1,
        "train": steps,
        "finish": 1,
    }
    device.store.close()


# -- what does not fit -----------------------------------------------------------------------------------------


def with_input(world: World, name: str, extra: tiny.Port) -> None:
    """Let graph ``name`` of the bundle read one more port."""
    listed = world.bundle.manifest
    old = listed.graph(name)
    inputs = (*old.inputs, extra)
    nodes = [tiny.node("Identity", "zero", f"out.{p.name}") for p in old.outputs if p.shape == ()]
    nodes += [tiny.node("Expand", "zero shape", f"out.{p.name}") for p in old.outputs if p.shape != ()]
    data = tiny.onnx_bytes(nodes, inputs, old.outputs, ["zero", "shape"])
    graphs = tuple(
        tiny.graph_of(name, data, inputs, old.outputs) if graph.name == name else graph
        for graph in listed.graphs
    )
    world.bundle = tiny.Bundle(msgspec.structs.replace(listed, graphs=graphs), world.bundle.blobs)
    world.add(data)


@pytest.mark.parametrize("graph", ["start", "train", "finish"])
def test_an_unknown_hyper_parameter_is_refused_by_name(device: Device, graph: str) -> None:
    with_input(device.world, graph, tiny.port("hyper.rho", ()))

    with pytest.raises(BundleError, match=r"sets no value for 'hyper\.rho'"):
        device.run(device.world.job())


@pytest.mark.parametrize("graph", ["start", "train", "finish"])
def test_hyper_parameters_reach_every_graph_that_reads_them(device: Device, graph: str) -> None:
    with_input(device.world, graph, tiny.port("hyper.rho", ()))

    device.run(device.world.job(hyper={"rho": 1.0}))

    assert device.engine.runs[graph] >= 1


@pytest.mark.parametrize("graph", ["start", "train", "finish"])
def test_noise_reaches_every_graph_that_reads_it(device: Device, graph: str) -> None:
    with_input(device.world, graph, tiny.port("noise.n", (2,)))

    device.run(device.world.job())

    assert device.engine.runs[graph] >= 1


@pytest.mark.parametrize(
    ("graph", "name"),
    [("start", "batch.0.x"), ("train", "weights.w"), ("finish", "record.x")],
)
def test_an_input_nobody_feeds_is_refused_by_name(device: Device, graph: str, name: str) -> None:
    with_input(device.world, graph, tiny.port(name, ()))

    with pytest.raises(BundleError, match=rf"graph '{graph}' reads \['{name}'\], which nobody feeds"):
        device.run(device.world.job())


@pytest.mark.parametrize(
    "weight",
    [np.zeros((2, 1), np.float32), np.zeros((3,), np.float32), np.zeros((3, 1), np.float64)],
    ids=["shape", "rank", "dtype"],
)
def test_weights_of_another_form_are_refused_with_both(tmp_path: Path, weight: tiny.Array) -> None:
    units = tiny.weights() | {"head": {"head.w": weight}}
    world = World(tiny.make_bundle(()), units)

    with pytest.raises(BundleError, match=r"weights\.head\.w should be float32 \(3, 1\), found"):
        Device(tmp_path, world).run(world.job())


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    world = World(tiny.make_bundle(), tiny.weights() | {"stem": {"other": np.zeros(1, np.float32)}})

    with pytest.raises(BundleError, match=r"wants 'stem\.w', which the round's weights do not hold"):
        Device(tmp_path, world).run(world.job())


def test_a_unit_that_is_not_announced_is_refused_by_name(device: Device) -> None:
    del device.world.unit_refs["mid"]

    with pytest.raises(BundleError, match=r"announces no weights for units \['mid'\]"):
        device.run(device.world.job())


def test_a_carry_of_another_shape_is_refused(device: Device) -> None:
    with pytest.raises(BundleError, match=r"carry\.v should be float32 \(3, 1\), found float32 \(5, 1\)"):
        device.run(device.world.job(), carry={"v": np.zeros((5, 1), np.float32)})


def test_data_that_do_not_fit_a_batch_port_are_a_data_error(device: Device) -> None:
    spec = msgspec.structs.replace(tiny.DATA, shape=(5,))
    data = tiny.LocalData(np.zeros((ROWS, 5), np.float32), np.zeros(ROWS, np.int64), "x").fitted(spec)
    device.world = World(tiny.make_bundle(()))
    runner = RoundRunner(
        engine=device.engine,
        manifest=device.world.bundle.manifest,
        blobs=device.world,
        memory=device.store,
        profiler=Profiler(),
        settings=Settings(device.folder, 1),
    )

    with pytest.raises(DataError, match=r"batch\.0\.x should be float32 \(4, 3\), found float32 \(4, 5\)"):
        runner.run(device.world.job(), data, {})


def test_a_failed_round_leaves_the_record_closed(device: Device) -> None:
    with pytest.raises(Killed):
        device.run(device.world.job(), watch=kill_at("train", 2))

    Record.reopen(device.folder / "record-1.bin", record_tag(device.world.job())).delete()
