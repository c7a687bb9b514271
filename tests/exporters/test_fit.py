"""Which of the submodels that fit is recommended, and why; no graph is traced here."""

from __future__ import annotations

from typing import Any

import pytest

import edgefl
from edgefl.errors import ModelError
from edgefl.submodels.submodel import Submodel
from edgefl_export.offers import Fit, SubmodelOffer


def offer(size: str, parameters: float, macs: float, **other: Any) -> SubmodelOffer:
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
    return SubmodelOffer(
        kind="some", size=size, parameter_share=parameters, mac_share=macs, **{**told, **other}
    )


def test_many_parameters_that_compute_little_do_not_win() -> None:
    last_layers, slice_ = offer("cut 9", 0.9, 0.01), offer("gamma 0.25", 0.25, 0.25)

    assert Fit((last_layers, slice_)).recommended() is slice_


def test_of_equals_the_one_that_moves_fewer_bytes_is_taken() -> None:
    many, few = offer("a", 1.0, 1.0), offer("b", 1.0, 1.0, upload_bytes=900)

    assert Fit((many, few)).recommended() is few


def test_what_has_a_problem_is_not_taken() -> None:
    whole, part = offer("a", 1.0, 1.0, problem="needs more memory"), offer("b", 0.1, 0.1)

    made = Fit((whole, part))

    assert made.fitting == (part,) and made.recommended() is part
    assert made.reason() == (
        "some, b: trains 10.0% of the parameters and 10.0% of the multiplications in 20.0 MiB; nothing else fits"
    )


def test_the_reason_names_the_runner_up() -> None:
    made = Fit((offer("a", 0.1, 0.1), offer("b", 0.5, 0.5), offer("c", 0.2, 0.3)))

    assert "none trains more (next: some, c, with 20.0% and 30.0%)" in made.reason()


def test_if_all_need_too_much_memory_the_smallest_is_named() -> None:
    large = offer("a", 1.0, 1.0, problem="needs 20.0 MiB of memory")
    small = offer("b", 0.1, 0.1, memory_bytes=1 << 20, problem="needs 1.0 MiB of memory")

    with pytest.raises(ModelError, match=r"the smallest, some with b, needs 1\.0 MiB") as told:
        Fit((large, small)).recommended()
    assert told.value.details["memory_bytes"] == 1 << 20


def test_the_remedy_is_for_one_whose_memory_fits() -> None:
    quick = offer("a", 1.0, 1.0, transfer_s=1.0, problem="needs 200.0 MiB of memory, the device has 64.0 MiB")
    slow = offer("b", 0.5, 0.5, transfer_s=9.0, problem="a round takes 9.0 s, 5 s are allowed")
    slower = offer("c", 0.6, 0.6, transfer_s=11.0, problem="a round takes 11.0 s, 5 s are allowed")

    with pytest.raises(
        ModelError, match=r"the quickest whose memory fits, some with b, a round takes.*it needs 9\.0 s"
    ):
        Fit((quick, slow, slower)).recommended()


def test_one_that_is_dead_is_listed_but_not_recommended() -> None:
    dead, alive = offer("a", 1.0, 1.0, dead="no input reaches the classifier"), offer("b", 0.1, 0.1)

    made = Fit((dead, alive))

    assert made.fitting == (dead, alive) and made.recommended() is alive
    assert made.reason().endswith("; nothing else fits and trains")


def test_if_all_that_fit_are_dead_the_one_to_make_room_for_is_alive() -> None:
    dead = offer("a", 0.1, 0.1, memory_bytes=1 << 20, dead="no input reaches the classifier")
    alive = offer("b", 1.0, 1.0, problem="needs 20.0 MiB of memory")

    with pytest.raises(
        ModelError, match="no submodel that would train fits the device: the smallest, some with b"
    ):
        Fit((dead, alive)).recommended()


def test_if_all_are_dead_the_error_says_what_would_revive_one() -> None:
    with pytest.raises(ModelError, match=r"some with a is dead .* no input reaches.* larger gamma"):
        Fit((offer("a", 0.1, 0.1, dead="no input reaches the classifier"),)).recommended()


def test_a_fit_is_printed_with_a_line_for_each_submodel_and_what_to_take() -> None:
    small, large = offer("small", 0.5, 0.5), offer("large", 1.0, 1.0, problem="needs 9.0 MiB of memory")

    lines = str(Fit((small, large))).splitlines()
    assert lines[0].endswith("; fits") and lines[1].endswith("; needs 9.0 MiB of memory")
    assert lines[2].startswith("recommended: some, small: ")
    assert str(Fit((large,))).endswith("nothing fits") and repr(Fit((large,))) == "Fit(1 submodels, 0 fit)"


def test_plan_guesses_a_size_from_sizes_of_equal_training() -> None:
    gammas = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    model = edgefl.Model("mlp", options={"size": 8, "hidden": [400, 400]})
    parameters = {
        offer.options["gamma"]: offer.parameters
        for offer in edgefl.plan(model, kinds=["width"], gammas=gammas).offers
    }
    coded = {parameters[gamma] for gamma in (0.9, 0.7, 0.5)}

    def training(submodel: Submodel) -> edgefl.Training:
        entries = sum(parameter.numel() for parameter in submodel.suffix.parameters())
        codec = "fedbat" if entries in coded else None
        return edgefl.Training(codec=codec, algorithm=edgefl.algorithms.SGD(batch=4))

    exact, guessed = (
        edgefl.plan(
            model, edgefl.Device(memory=memory), training=training, kinds=["width"], gammas=gammas
        ).offers
        for memory in (0, 1 << 30)
    )
    assert any(offer.memory_about for offer in guessed)
    for known, offer in zip(exact, guessed, strict=True):
        assert offer.memory_bytes == pytest.approx(known.memory_bytes, rel=0.05)
