"""Which of the submodels that fit is recommended, and why; no graph is traced here."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.wire.errors import ModelError
from exporters.plan import Offer, Plan


def offer(size: str, parameters: float, macs: float, **other: Any) -> Offer:
    told = {
        "options": {},
        "memory_bytes": 20 << 20,
        "memory_graph": "train",
        "parameters": 1,
        "macs": 1,
        "kept_macs": 1,
        "prefix_macs": 0,
        "round_macs": 1,
        "download_bytes": 1000,
        "upload_bytes": 1000,
        "transfer_s": None,
        "compute_s": None,
        "trained_share": (parameters * macs) ** 0.5,
    }
    return Offer(kind="some", size=size, parameter_share=parameters, mac_share=macs, **{**told, **other})


def test_many_parameters_that_compute_little_do_not_win() -> None:
    last_layers, slice_ = offer("cut 9", 0.9, 0.01), offer("gamma 0.25", 0.25, 0.25)

    assert Plan((last_layers, slice_)).recommended() is slice_


def test_of_equals_the_one_that_moves_fewer_bytes_is_taken() -> None:
    many, few = offer("a", 1.0, 1.0), offer("b", 1.0, 1.0, upload_bytes=900)

    assert Plan((many, few)).recommended() is few


def test_what_has_a_problem_is_not_taken() -> None:
    whole, part = offer("a", 1.0, 1.0, problem="needs more memory"), offer("b", 0.1, 0.1)

    made = Plan((whole, part))

    assert made.fitting == (part,) and made.recommended() is part
    assert made.reason() == (
        "some, b: trains 10.0% of the parameters and 10.0% of the multiplications in 20.0 MiB; nothing else fits"
    )


def test_the_reason_names_the_runner_up() -> None:
    made = Plan((offer("a", 0.1, 0.1), offer("b", 0.5, 0.5), offer("c", 0.2, 0.3)))

    assert "none trains more (next: some, c, with 20.0% and 30.0%)" in made.reason()


def test_if_all_need_too_much_memory_the_smallest_is_named() -> None:
    large = offer("a", 1.0, 1.0, problem="needs 20.0 MiB of memory")
    small = offer("b", 0.1, 0.1, memory_bytes=1 << 20, problem="needs 1.0 MiB of memory")

    with pytest.raises(ModelError, match=r"the smallest, some with b, needs 1\.0 MiB") as told:
        Plan((large, small)).recommended()
    assert told.value.details["memory_bytes"] == 1 << 20
