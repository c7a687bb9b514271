"""One round on the device: what it computes, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import decode_manifest, encode_manifest
from edgefl_device.round.control import StepProgress
from edgefl_device.round.forward import ActivationRecord, record_tag
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.round import sweep
from tests.device_runtime.rounds import ALL_STEPS, STATE, Device, Killed, OneByOneEngine, assert_same, kill_at
from tests.device_runtime.tiny import BATCH, ROWS, STEPS, World
from tests.support.errors import BundleError, DataError, RoundAborted, refuses

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


# -- what does not fit a round is refused, by name ---------------------------------------------------------


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
    world.bundle = tiny.BundleArchive(msgspec.structs.replace(listed, graphs=graphs), world.bundle.blobs)
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
    ("graph", "name"), [("start", "batch.0.x"), ("train", "weights.w"), ("finish", "record.x")]
)
def test_an_input_nobody_feeds_is_refused_by_name(device: Device, graph: str, name: str) -> None:
    with_input(device.world, graph, tiny.port(name, ()))

    with refuses(BundleError, ports=[name]):
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

    with refuses(BundleError, graph="forward.stem", weight="stem.w"):
        Device(tmp_path, world).run(world.job())


def test_a_unit_that_is_not_announced_is_refused_by_name(device: Device) -> None:
    del device.world.unit_refs["mid"]

    with refuses(BundleError, round=1, units=["mid"]):
        device.run(device.world.job())


def test_a_carry_of_another_shape_is_refused(device: Device) -> None:
    with pytest.raises(BundleError, match=r"carry\.v should be float32 \(3, 1\), found float32 \(5, 1\)"):
        device.run(device.world.job(), carry={"v": np.zeros((5, 1), np.float32)})


def test_data_that_do_not_fit_a_batch_port_are_a_data_error(device: Device) -> None:
    spec = msgspec.structs.replace(tiny.DATA, shape=(5,))
    data = tiny.LocalData(np.zeros((ROWS, 5), np.float32), np.zeros(ROWS, np.int64), "x").fitted(spec)
    device.world = World(tiny.make_bundle(()))
    device.local = data

    with pytest.raises(DataError, match=r"batch\.0\.x should be float32 \(4, 3\), found float32 \(4, 5\)"):
        device.run(device.world.job())


# -- A round that is killed or aborted: how it goes on, to the same bits -----------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("checkpoint_steps", [1, 2, 4, 100])
def test_killed_at_any_step_the_round_ends_with_the_same_bits(tmp_path: Path, checkpoint_steps: int) -> None:
    world = World(tiny.make_bundle(steps=(4, 2)))
    undisturbed = Device(tmp_path / "undisturbed", world).run(world.job())
    for step in ALL_STEPS:
        device = Device(tmp_path / str(step), world, checkpoint_steps=checkpoint_steps)
        with pytest.raises(Killed):
            device.run(world.job(), watch=kill_at("train", step))
        before = device.engine.runs["train"]

        assert_same(device.run(world.job()), undisturbed)
        saved = (step - 1) // checkpoint_steps * checkpoint_steps
        assert device.engine.runs["train"] - before == STEPS - saved
        device.store.close()


def test_killed_at_every_step_in_turn_the_round_ends_with_the_same_bits(tmp_path: Path) -> None:
    world = World(tiny.make_bundle())
    undisturbed = Device(tmp_path / "a", world).run(world.job())
    device = Device(tmp_path / "b", world)
    for step in ALL_STEPS:
        with pytest.raises(Killed):
            device.run(world.job(), watch=kill_at("train", step))

    assert_same(device.run(world.job()), undisturbed)
    assert device.loader.residency.downloads == []


def test_checkpoints_copy_the_state_tensor_by_tensor(device: Device) -> None:
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
def test_a_killed_forward_pass_ends_with_the_same_bits(tmp_path: Path, stage: str, rows: int) -> None:
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
    assert device.loader.residency.downloads == [("mid",), ("head",)]


def test_i20_a_record_of_the_round_before_is_not_used(device: Device) -> None:
    with pytest.raises(Killed):
        device.run(device.world.job(), watch=kill_at("train", 1))
    later = msgspec.structs.replace(device.world.job(), round=2, nonce="n2", model_version="v2")

    device.run(later)

    assert (device.engine.runs["forward.stem"], device.engine.runs["forward.mid"]) == (6, 6)


def test_i20_a_record_of_another_bundle_is_not_used(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("make", "phase", "step"), [(tiny.make_bundle, "forward 2", 10), (sweep.sweeping, "train", 6)]
)
def test_a_record_or_checkpoint_of_fewer_rows_is_not_used(
    make: Callable[[], BundleArchive], phase: str, step: int, tmp_path: Path
) -> None:
    """The device was started again with more data, with which the positions of the phases move."""
    world = World(make())
    fresh = Device(tmp_path / "a", world, rows=14).run(world.job())
    device = Device(tmp_path / "b", world)
    with pytest.raises(Killed):
        device.run(world.job(), watch=kill_at(phase, step))
    device.rows = 14

    assert_same(device.run(world.job()), fresh)


def test_an_aborted_round_stops_at_the_next_step_and_keeps_its_checkpoint(device: Device) -> None:
    done: list[int] = []
    job = device.world.job()

    def watch(at: StepProgress) -> None:
        done.extend([at.step] if at.stage == "train" else [])
        if len(done) == 3:
            device.control.cancel()

    with pytest.raises(RoundAborted):
        device.run(job, watch=watch)

    assert done == [1, 2, 3]
    saved = device.store.checkpoint(job.nonce)
    assert saved is not None
    assert saved.step == 3


def test_a_round_aborted_in_the_forward_pass_stops_there(device: Device) -> None:
    with pytest.raises(RoundAborted):
        device.run(device.world.job(), watch=lambda _: device.control.cancel())

    assert device.engine.runs == {"forward.stem": 1}


def test_a_failed_round_leaves_the_record_closed(device: Device) -> None:
    with pytest.raises(Killed):
        device.run(device.world.job(), watch=kill_at("train", 2))

    ActivationRecord.reopen(device.folder / "record-1.bin", record_tag(device.world.job())).delete()


# -- phases that pass once over all local rows -----------------------------------------------------------------


Phases = tuple[int | None, ...]
PHASES: list[Phases] = [(None,), (None, 4), (2, None, 3), (None, None), (2, None)]
NUMBERS_OF_ROWS = [1, 2, 3, 4, ROWS, 12]
PASSES = [
    (("stem",) * ((place + number) % 2), rows, phases)
    for place, rows in enumerate(NUMBERS_OF_ROWS)
    for number, phases in enumerate(PHASES)
]
"""Each number of rows with each order of phases; with and without frozen units by turns."""


@pytest.mark.sample(10)
@pytest.mark.parametrize(("prefix", "rows", "phases"), PASSES, ids=str)
def test_a_pass_sees_rows_once(tmp_path: Path, prefix: tuple[str, ...], rows: int, phases: Phases) -> None:
    world = World(sweep.sweeping(prefix, phases))
    device = Device(tmp_path, world, rows)
    seen: list[tuple[int, int]] = []

    result = device.run(
        world.job(), watch=lambda at: seen.append((at.step, at.steps)) if at.stage == "train" else None
    )

    update, carry, metrics, steps = sweep.expected(world, world.job(), rows)
    np.testing.assert_allclose(result.update["head.w"], update, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.carry["v"], carry, rtol=1e-4, atol=1e-5)
    assert result.metrics == {name: pytest.approx(mean, rel=1e-4) for name, mean in metrics.items()}
    assert seen == [(step, steps) for step in range(1, steps + 1)]
    device.store.close()


def test_a_sample_budget_bounds_the_pass(tmp_path: Path) -> None:
    world = World(sweep.sweeping())
    device = Device(tmp_path, world)

    result = device.run(world.job(samples=5))

    assert device.engine.runs["sweep"] == 2
    _, carry, _, _ = sweep.expected(world, world.job(samples=5), ROWS)
    np.testing.assert_allclose(result.carry["v"], carry, rtol=1e-4, atol=1e-5)
    device.store.close()


@pytest.mark.parametrize(("prefix", "checkpoint_steps"), [((), 3), (("stem",), 1)])
def test_killed_at_any_step_of_a_pass_the_round_ends_with_the_same_bits(
    tmp_path: Path, prefix: tuple[str, ...], checkpoint_steps: int
) -> None:
    world = World(sweep.sweeping(prefix, (2, None, 3)))
    undisturbed = Device(tmp_path / "undisturbed", world).run(world.job())
    for step in range(1, 10):
        device = Device(tmp_path / str(step), world, checkpoint_steps=checkpoint_steps)
        with pytest.raises(Killed):
            device.run(world.job(), watch=kill_at("train", step))

        assert_same(device.run(world.job()), undisturbed)
        device.store.close()


def test_the_mean_loss_that_people_see_counts_the_steps_that_report_one(tmp_path: Path) -> None:
    world = World(sweep.sweeping((), (None, 4)))
    device = Device(tmp_path, world)
    losses: list[float] = []

    result = device.run(world.job(), watch=lambda at: losses.append(at.loss))

    assert np.isnan(losses[:4]).all()
    assert losses[-1] == result.metrics["loss"]
    device.store.close()


def test_the_noise_of_start_and_finish_is_that_of_no_step(tmp_path: Path) -> None:
    world = World(sweep.sweeping((), (None, 2)))
    device, drawn = Device(tmp_path, world), dict[str, list[tiny.Array]]()
    noisy_ends(world, drawn, device)

    device.run(world.job())

    all_of = [values.tobytes() for graph in drawn.values() for values in graph]
    assert {name: len(values) for name, values in drawn.items()} == {
        "start": 1,
        "sweep": 4,
        "train": 2,
        "finish": 1,
    }
    assert len(set(all_of)) == len(all_of)
    device.store.close()


def noisy_ends(world: World, drawn: dict[str, list[tiny.Array]], device: Device) -> None:
    """Let start and finish read noise like the steps', and note what each graph is fed."""
    listed = world.bundle.manifest
    for name in ("start", "finish"):
        old = listed.graph(name)
        nodes = [tiny.node("Identity", "zero", f"out.{p.name}") for p in old.outputs if p.shape == ()]
        nodes += [tiny.node("Expand", "zero shape", f"out.{p.name}") for p in old.outputs if p.shape != ()]
        inputs = (*old.inputs, tiny.NOISE)
        data = tiny.onnx_bytes(nodes, inputs, old.outputs, ["zero", "shape"])
        graph = tiny.graph_of(name, data, inputs, old.outputs)
        world.add(data)
        graphs = tuple(graph if each.name == name else each for each in listed.graphs)
        listed = msgspec.structs.replace(listed, graphs=graphs)
    world.bundle = tiny.BundleArchive(listed, world.bundle.blobs)
    device.engine.fed = lambda name, feeds: drawn.setdefault(name, []).append(feeds[tiny.NOISE.name])


def test_an_agent_says_how_many_steps_it_makes(server: ScriptedServer, start: StartAgent) -> None:
    agent, world = start(), World(sweep.sweeping(("stem",)))
    server.open(world)

    update = server.update()

    assert "10 samples, 8 steps" in agent.event("round").text
    expected, _, metrics, _ = sweep.expected(world, world.job(), ROWS)
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-4)
    assert update.metrics == {name: pytest.approx(mean, rel=1e-4) for name, mean in metrics.items()}


def test_a_manifest_with_a_pass_whose_graph_reads_no_rows_is_refused() -> None:
    listed = sweep.sweeping().manifest
    phases = tuple(msgspec.structs.replace(phase, graph="finish", over_data=True) for phase in listed.phases)

    with pytest.raises(BundleError, match=r"'finish' reads no rows of them as 'batch\.0\.x'"):
        decode_manifest(encode_manifest(msgspec.structs.replace(listed, phases=phases)))
