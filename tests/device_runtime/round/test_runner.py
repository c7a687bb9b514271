"""One round on the device: what it computes, and what it keeps in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.device_runtime import tiny
from tests.device_runtime.rounds import ALL_STEPS, Device
from tests.device_runtime.tiny import BATCH, ROWS, STEPS, World

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


# -- what is in memory (embracingfl.md I10 to I12) -----------------------------------------------------------------------


def test_i10_the_prefix_and_the_suffix_are_never_in_memory_together(device: Device) -> None:
    device.run(device.world.job())

    residency = device.loader.residency
    assert residency.most == 1
    assert residency.held == {"head"}


@pytest.mark.parametrize("prefix", [(), ("stem",), ("stem", "mid")])
def test_i11_every_unit_a_tier_uses_is_downloaded_once(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    world = World(tiny.make_bundle(prefix))
    device = Device(tmp_path, world)

    device.run(world.job())

    residency = device.loader.residency
    used = (*prefix, "head")
    assert residency.downloads == [(unit,) for unit in used]
    assert residency.elements == sum(a.size for unit in used for a in world.units[unit].values())
    device.store.close()


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_i12_the_forward_pass_runs_once_per_round(tmp_path: Path, steps: int) -> None:
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
