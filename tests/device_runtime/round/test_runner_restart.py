"""A round that is killed or aborted: how it goes on, to the same bits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.errors import RoundAborted
from edgefl_device.round.control import Step
from edgefl_device.round.forward import record_tag
from edgefl_device.round.record import Record
from tests.device_runtime import tiny
from tests.device_runtime.rounds import ALL_STEPS, STATE, Device, Killed, OneByOneEngine, assert_same, kill_at
from tests.device_runtime.tiny import STEPS, World


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

    def watch(at: Step) -> None:
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

    Record.reopen(device.folder / "record-1.bin", record_tag(device.world.job())).delete()
