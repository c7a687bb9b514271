"""Which announcement a task's job goes by, and when it is of no use any more."""

from __future__ import annotations

import msgspec
import pytest

from edgefl.wire.mqtt.messages import Round, Task
from edgefl_device.round.job import Job
from tests.wire.make_golden import LIVE

TASK = Task(run="run-7", round=3, tier="weak", seed=1, nonce="a" * 24)
NOW = msgspec.structs.replace(TASK, round=5, nonce="b" * 24)


def job_of(task: Task, announced: Round = LIVE) -> Job:
    job = Job.of(task, announced)
    assert job is not None
    return job


def test_a_task_of_an_earlier_round_begins_from_that_rounds_model() -> None:
    job, now = job_of(TASK), job_of(NOW)
    assert (job.round, job.model_version, job.units, job.hyper) == (
        3, LIVE.live[3].model_version, LIVE.live[3].units, {"lr": 0.1},
    )  # fmt: skip
    assert (now.model_version, now.units, now.hyper) == (LIVE.model_version, LIVE.units, LIVE.hyper)
    assert job.bundle == now.bundle and job.base == now.base == 5


def test_a_round_that_takes_no_updates_is_over() -> None:
    job = job_of(TASK)
    assert job.is_open(LIVE) and LIVE.takes == (3, 5)
    assert not job.is_open(msgspec.structs.replace(LIVE, live={}))
    assert not job.is_open(msgspec.structs.replace(LIVE, state="closed"))
    assert not job.is_open(msgspec.structs.replace(LIVE, run="run-8"))
    assert Job.of(msgspec.structs.replace(TASK, round=4), LIVE) is None


def test_a_page_has_the_units_of_earlier_rounds_too() -> None:
    paged = LIVE.paged(job_of(TASK).bundle)
    assert paged.live[3].units == {} and paged.whole(LIVE.page) == msgspec.structs.replace(LIVE, v=paged.v)


@pytest.mark.parametrize(
    ("changes", "replaced"),
    [
        ({}, False),
        ({"nonce": "c" * 24}, True),
        ({"nonce": "c" * 24, "round": 5}, True),
        ({"nonce": "c" * 24, "round": 2}, False),  # an old one
        ({"nonce": "", "round": 5}, False),  # a call to look where the run is
        ({"nonce": "c" * 24, "run": "run-8"}, False),  # its announcement comes first
    ],
)
def test_a_device_has_one_task_at_a_time(changes: dict[str, object], replaced: bool) -> None:
    assert job_of(TASK).is_replaced(msgspec.structs.replace(TASK, **changes)) is replaced
    assert not job_of(TASK).is_replaced(None)
