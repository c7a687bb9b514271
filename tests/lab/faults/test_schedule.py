"""Faults as data: the same seed draws the same ones, a file gives them back, and what makes no sense is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.errors import ConfigError
from edgefl.lab.faults.schedule import KINDS, Fault, Schedule, check_targets, load_schedule, random_schedule

DEVICES = ("a-0", "a-1")


def test_a_seed_draws_the_same_faults_and_many_seeds_draw_every_kind() -> None:
    drawn = [random_schedule(seed, DEVICES, 3) for seed in range(100)]

    assert drawn == [random_schedule(seed, DEVICES, 3) for seed in range(100)]
    assert {fault.kind for schedule in drawn for fault in schedule.faults} == set(KINDS)
    for schedule in drawn:
        check_targets(schedule, DEVICES, broker=True)


def test_a_row_of_the_campaign_is_a_file_that_gives_the_faults_back(tmp_path: Path) -> None:
    schedule = random_schedule(7, DEVICES, 3)
    path = tmp_path / "faults.json"
    path.write_bytes(msgspec.json.encode(schedule))

    assert load_schedule(path) == schedule


def test_a_schedule_is_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('seed = 3\n[[faults]]\nkind = "delay"\ntarget = "a-0"\nround = 2\namount = 0.2\n')

    assert load_schedule(path) == Schedule(
        seed=3, faults=(Fault(kind="delay", target="a-0", round=2, amount=0.2),)
    )


@pytest.mark.parametrize(
    "text", ["seed = ", '[[faults]]\nkind = "rain"', '[[faults]]\nkind = "kill"\nround = 0', "[[fault]]\n"]
)
def test_a_file_that_is_no_schedule_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"faults\.toml cannot be used"):
        load_schedule(path)


@pytest.mark.parametrize(
    ("fault", "broker"),
    [
        (Fault(kind="kill", target="a-9"), True),
        (Fault(kind="delay", target="broker"), True),
        (Fault(kind="kill", target="broker"), False),
    ],
)
def test_a_fault_of_what_is_not_there_is_refused(fault: Fault, broker: bool) -> None:
    with pytest.raises(ConfigError, match=f"has the target '{fault.target}'"):
        check_targets(Schedule(faults=(fault,)), DEVICES, broker=broker)
