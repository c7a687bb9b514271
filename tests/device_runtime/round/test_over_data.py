"""Phases that pass once over all local rows: what they are fed, how many steps they take, and going on after a kill."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.errors import BundleError
from edgefl.wire.bundle.manifest import decode_manifest, encode_manifest
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.round import sweep
from tests.device_runtime.rounds import Device, Killed, assert_same, kill_at
from tests.device_runtime.tiny import ROWS, World

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


def test_a_checkpoint_of_other_rows_is_not_gone_on_from(tmp_path: Path) -> None:
    """With more rows the positions of the phases move."""
    world = World(sweep.sweeping())
    fresh = Device(tmp_path / "a", world, rows=14).run(world.job())
    device = Device(tmp_path / "b", world)
    with pytest.raises(Killed):
        device.run(world.job(), watch=kill_at("train", 6))
    device.rows = 14

    assert_same(device.run(world.job()), fresh)
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
    world.bundle = tiny.Bundle(listed, world.bundle.blobs)
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


def test_steps_are_counted_with_the_rows_of_the_device() -> None:
    listed = sweep.sweeping((), (2, None, 3)).manifest

    assert listed.steps == 5
    assert [listed.steps_with(rows) for rows in (1, 3, 4)] == [(2, 1, 3), (2, 1, 3), (2, 2, 3)]
