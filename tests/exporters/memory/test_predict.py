"""Predicted memory: the arena's rules, and what is counted of a graph. The benchmark submodels measures it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import edgefl
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.cost import ForwardCostCache
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.trace import capture
from edgefl_export.fit import interpolate_peaks, next_size, step_bytes
from edgefl_export.memory import predict
from edgefl_export.memory.predict import NODE_BYTES, ROUND_BYTES, Arena, predicted_peak
from edgefl_export.offers import Fit, SubmodelOffer

MIB, PAGE = 1 << 20, 4096
COPIED = 8 * MIB
"""The largest tensor of a state of 8 MiB tensors, of which a checkpoint makes a copy."""


def running(fn: Callable[[Tensors], Tensors], **given: TensorSpec) -> float:
    """Return the predicted bytes without those of a round around the graph."""
    specs = {name.replace("_", "."): spec for name, spec in given.items()}
    return predicted_peak(capture(Function("f", fn, specs))) - ROUND_BYTES


def test_an_arena_holds_what_was_asked_for_and_no_more() -> None:
    arena = Arena()

    arena.take(3 * PAGE)
    arena.take(PAGE)

    assert arena.touched == 4 * PAGE


def test_a_freed_chunk_is_taken_again() -> None:
    arena = Arena()

    for _ in range(5):
        arena.give(arena.take(8 * PAGE))

    assert arena.touched == 8 * PAGE


def test_freed_neighbours_make_one_chunk() -> None:
    arena = Arena()
    first, second, third = (arena.take(4 * PAGE) for _ in range(3))

    for address in (first, third, second):
        arena.give(address)

    assert arena.take(12 * PAGE) == first
    assert arena.touched == 12 * PAGE


def test_a_gap_that_is_too_small_stays_a_gap() -> None:
    arena = Arena()
    gap = arena.take(4 * PAGE)
    arena.take(4 * PAGE)
    arena.give(gap)

    arena.take(5 * PAGE)

    assert arena.touched == 13 * PAGE


def test_the_smallest_chunk_that_holds_it_is_taken() -> None:
    arena = Arena()
    large, _, small, _ = (arena.take(pages * PAGE) for pages in (9, 1, 5, 1))
    arena.give(large)
    arena.give(small)

    assert arena.take(5 * PAGE) == small


@pytest.mark.parametrize(("read", "sets"), [("ab", 1), ("ba", 2)], ids=["in place", "crossed"])
def test_state_counts_once_if_written_in_place_and_else_twice(read: str, sets: int) -> None:
    """Crossed, each new value reads the other old one: one set is read while the other is written."""
    wide = TensorSpec((2048, 1024))
    one, two = (f"state.{name}" for name in read)

    found = running(
        lambda tensors: {"state.a": tensors[one] + 1.0, "state.b": tensors[two] * 2.0},
        state_a=wide,
        state_b=wide,
    )

    assert found == pytest.approx(sets * 16 * MIB + COPIED + 2 * NODE_BYTES, abs=2 * PAGE)


def test_a_graph_of_little_memory_is_expected_to_need_what_a_round_takes() -> None:
    def fn(tensors: Tensors) -> Tensors:
        return {"metric.loss": tensors["batch.0.x"].sum()}

    assert 0 < running(fn, batch_0_x=TensorSpec((4,))) < 0.1 * MIB


WIDE = TensorSpec((2048, 1024))


def test_what_is_computed_in_place_takes_no_second_buffer() -> None:
    def chain(tensors: Tensors) -> Tensors:
        return {"metric.loss": tensors["batch.0.x"].relu().sigmoid().tanh().sum()}

    assert 16 * MIB <= running(chain, batch_0_x=WIDE) < 18 * MIB


def test_arithmetic_is_not_computed_in_place() -> None:
    def chain(tensors: Tensors) -> Tensors:
        return {"metric.loss": (((tensors["batch.0.x"] + 1.0) * 2.0).exp() - 3.0).sum()}

    assert 24 * MIB <= running(chain, batch_0_x=WIDE) < 26 * MIB


def test_a_sum_with_a_product_is_computed_by_the_product() -> None:
    def fused(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"]
        return {"metric.loss": (x @ x.T + tensors["batch.0.y"] * 2.0).sigmoid().sum()}

    square = TensorSpec((1024, 1024))
    assert 16 * MIB <= running(fused, batch_0_x=square, batch_0_y=square) < 18 * MIB


def test_what_an_op_of_several_results_makes_lies_beside_what_it_reads() -> None:
    def normed(tensors: Tensors) -> Tensors:
        x, weight = tensors["batch.0.x"], torch.ones(4)
        return {"metric.loss": functional.batch_norm(x * 2.0, weight, weight, weight, weight).sum()}

    assert 24 * MIB <= running(normed, batch_0_x=TensorSpec((2, 4, 512, 512))) < 26 * MIB


def test_a_scatter_copies_the_places_that_it_writes_to() -> None:
    def scattered(tensors: Tensors) -> Tensors:
        places = tensors["batch.0.x"].to(torch.int64)
        return {"metric.loss": torch.zeros(2048 * 1024).scatter(0, places, tensors["batch.0.x"]).sum()}

    assert 56 * MIB <= running(scattered, batch_0_x=TensorSpec((2048 * 1024,))) < 58 * MIB


def test_a_view_of_a_constant_is_counted_once() -> None:
    def added(tensors: Tensors) -> Tensors:
        zeros = torch.zeros(2048 * 1024).view(2048, 1024)
        return {"metric.loss": (tensors["batch.0.x"] + zeros).sum()}

    assert 24 * MIB <= running(added, batch_0_x=WIDE) < 26 * MIB


def test_what_a_graph_gives_out_lies_beside_its_arena() -> None:
    """A device binds it to memory that is there from the beginning: it takes no gap that was left."""

    def gap(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"]
        total = (x * 2.0).sum()
        return {"update.a": x + total, "metric.loss": total}

    assert 24 * MIB <= running(gap, batch_0_x=WIDE) < 26 * MIB


@pytest.mark.parametrize(
    ("filters", "window", "taken"),
    [
        pytest.param(4, (3, 3), 4 * 128 * 128, id="slices of windows"),
        pytest.param(64, (3, 3), 4 * 36 * 8 * 9, id="all windows of an image with fewer places than filters"),
        pytest.param(4, (1, 1), 0, id="none of single pixels"),
    ],
)
def test_a_convolution_copies_windows(filters: int, window: tuple[int, int], taken: int) -> None:
    def convolved(tensors: Tensors) -> Tensors:
        found = functional.conv2d(tensors["batch.0.x"], tensors["batch.0.y"], padding=(window[0] - 1) // 2)
        return {"metric.loss": found.sum()}

    specs = {"batch.0.x": TensorSpec((1, 8, 6, 6)), "batch.0.y": TensorSpec((filters, 8, *window))}
    lowered = capture(Function("f", convolved, specs))
    [node] = [node for node in lowered.module.graph.nodes if "convolution" in str(node.target)]

    assert sum(predict._buffers(node)) == taken


def test_a_transposed_convolution_makes_the_windows_of_its_output() -> None:
    def convolved(tensors: Tensors) -> Tensors:
        x, weight = tensors["batch.0.x"], tensors["batch.0.y"]
        return {"metric.loss": functional.conv_transpose2d(x, weight, stride=2, groups=2).sum()}

    specs = {"batch.0.x": TensorSpec((1, 8, 6, 6)), "batch.0.y": TensorSpec((8, 5, 3, 3))}
    lowered = capture(Function("f", convolved, specs))
    [node] = [node for node in lowered.module.graph.nodes if "convolution" in str(node.target)]

    assert predict._buffers(node) == [4 * 5 * 3 * 3 * 36]


# -- which sizes are traced for a plan ---------------------------------------------------------------------


PEAKS = [400, 330, 290, 250, 200, 160, 110, 80, 50, 20]


def _key(offer: SubmodelOffer) -> tuple[str, str]:
    return offer.kind, str(offer.options)


def _traced(sizes: list[int], peaks: list[int], memory: int) -> dict[int, int]:
    known: dict[int, int] = {}
    while (at := next_size(sizes, known, memory)) is not None:
        assert at not in known
        known[at] = peaks[at]
    return known


@pytest.mark.parametrize("memory", [10, 20, 100, 205, 330, 399, 1000])
@pytest.mark.parametrize("sizes", [PEAKS, [10] * 10, [10 - at for at in range(10)], list(range(10))])
def test_few_are_traced_on_either_side_of_the_memory(sizes: list[int], memory: int) -> None:
    known = _traced(sizes, PEAKS, memory)

    assert [guess <= memory for guess in interpolate_peaks(sizes, known)] == [
        peak <= memory for peak in PEAKS
    ]
    assert {0, 9} <= known.keys() and len(known) < 10


def test_the_search_goes_the_other_way_where_more_fits() -> None:
    peaks = [20, 50, 50, 50]

    known = _traced([1, 1, 1, 1], peaks, 30)

    assert [guess <= 30 for guess in interpolate_peaks([1, 1, 1, 1], known)] == [True, False, False, False]


def test_what_lies_near_the_memory_is_traced_on_both_sides_of_it() -> None:
    known = _traced([50, 45, 40, 10], [50, 45, 44, 10], 46)

    assert known == {0: 50, 1: 45, 2: 44, 3: 10}


def test_a_size_that_is_the_only_one_is_traced_once() -> None:
    assert _traced([5], [7], 3) == {0: 7}


def test_deeper_cuts_and_smaller_batches_take_less() -> None:
    spec = build_model("cnn")
    whole, last = OutputSide(spec, 0), OutputSide(spec, len(spec.units) - 1)
    forwards = ForwardCostCache(spec)

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
