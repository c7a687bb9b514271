"""Which sizes are traced for a plan, and that a plan that traces few says what one that traces all does."""

from __future__ import annotations

import pytest

import edgefl
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.cost import Forwards
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.fit import guessed, next_traced, step_bytes
from edgefl_export.offers import Fit, SubmodelOffer

PEAKS = [400, 330, 290, 250, 200, 160, 110, 80, 50, 20]


def _key(offer: SubmodelOffer) -> tuple[str, str]:
    return offer.kind, str(offer.options)


def _traced(sizes: list[int], peaks: list[int], memory: int) -> dict[int, int]:
    known: dict[int, int] = {}
    while (at := next_traced(sizes, known, memory)) is not None:
        assert at not in known
        known[at] = peaks[at]
    return known


@pytest.mark.parametrize("memory", [10, 20, 100, 205, 330, 399, 1000])
@pytest.mark.parametrize("sizes", [PEAKS, [10] * 10, [10 - at for at in range(10)], list(range(10))])
def test_few_are_traced_on_either_side_of_the_memory(sizes: list[int], memory: int) -> None:
    known = _traced(sizes, PEAKS, memory)

    assert [guess <= memory for guess in guessed(sizes, known)] == [peak <= memory for peak in PEAKS]
    assert {0, 9} <= known.keys() and len(known) < 10


def test_the_search_goes_the_other_way_where_more_fits() -> None:
    peaks = [20, 50, 50, 50]

    known = _traced([1, 1, 1, 1], peaks, 30)

    assert [guess <= 30 for guess in guessed([1, 1, 1, 1], known)] == [True, False, False, False]


def test_what_lies_near_the_memory_is_traced_on_both_sides_of_it() -> None:
    known = _traced([50, 45, 40, 10], [50, 45, 44, 10], 46)

    assert known == {0: 50, 1: 45, 2: 44, 3: 10}


def test_a_size_that_is_the_only_one_is_traced_once() -> None:
    assert _traced([5], [7], 3) == {0: 7}


def test_deeper_cuts_and_smaller_batches_take_less() -> None:
    spec = build_model("cnn")
    whole, last = OutputSide(spec, 0), OutputSide(spec, len(spec.units) - 1)
    forwards = Forwards(spec)

    found = [step_bytes(part, batch, forwards) for part, batch in ((whole, 32), (whole, 8), (last, 8))]

    assert found == sorted(found, reverse=True) and found[-1] > 0


@pytest.mark.slow
def test_a_plan_for_a_device_says_what_one_with_all_sizes_traced_does() -> None:
    exact = {_key(offer): offer for offer in edgefl.plan("cnn", kinds=["width"]).offers}
    memory = sorted(offer.memory_bytes for offer in exact.values())[3]
    fits = {key: offer for key, offer in exact.items() if offer.memory_bytes <= memory}

    made = edgefl.plan("cnn", edgefl.Device(memory=memory), kinds=["width"])

    assert {_key(offer) for offer in made.offers} == exact.keys()
    assert {_key(offer) for offer in made.fitting} == fits.keys()
    assert made.recommended() == Fit(tuple(fits.values())).recommended() and made.reason().count("MiB") == 1
    traced = [offer for offer in made.offers if not offer.memory_about]
    assert len(traced) < len(exact)
    assert all(offer.memory_bytes == exact[_key(offer)].memory_bytes for offer in traced)
