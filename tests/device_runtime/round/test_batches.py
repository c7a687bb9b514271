"""Which rows a step trains on, and the noise it is fed: pure functions of seed and step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.bundle.manifest import Graph
from edgefl_device.data.samples import Batches, DataPass, noise
from edgefl_device.round.inputs import RoundInputs, check_complete
from tests.device_runtime import tiny
from tests.device_runtime.tiny import ROWS, WIDTH, port
from tests.support.errors import BundleError, refuses

SEEDS = st.integers(0, 2**63 - 1)


@given(SEEDS, st.integers(1, 40), st.integers(1, 12), st.integers(0, 30))
def test_batches_are_a_pure_function_of_the_step(seed: int, samples: int, batch: int, step: int) -> None:
    forwards = [Batches(seed, samples, batch).indices(0, at) for at in range(step + 1)]
    once_more = Batches(seed, samples, batch).indices(0, step)

    np.testing.assert_array_equal(forwards[step], once_more)
    assert once_more.shape == (batch,)
    assert ((once_more >= 0) & (once_more < samples)).all()


@given(SEEDS, st.integers(1, 60), st.integers(1, 12))
def test_every_row_is_used_once_per_epoch(seed: int, samples: int, batch: int) -> None:
    if samples < batch:
        return
    batches = Batches(seed, samples, batch)
    drawn = np.concatenate([batches.indices(0, step) for step in range(3 * samples // batch + 1)])

    for epoch in range(len(drawn) // samples):
        rows = drawn[epoch * samples : (epoch + 1) * samples]
        assert sorted(rows) == list(range(samples))


def test_a_short_last_batch_wraps_around() -> None:
    batches = Batches(7, 5, 4)
    order = np.concatenate([batches.indices(0, 0), batches.indices(0, 1)])

    np.testing.assert_array_equal(order[5:], order[:3])


def test_fewer_rows_than_a_batch_are_drawn_with_replacement() -> None:
    rows = np.concatenate([Batches(7, 3, 8).indices(0, step) for step in range(50)])

    assert set(rows) == {0, 1, 2}
    assert min(np.bincount(rows)) > 80


@pytest.mark.parametrize("samples", [100, 3])
def test_streams_seeds_and_steps_differ(samples: int) -> None:
    base = Batches(1, samples, 8)
    others = (base.indices(1, 0), base.indices(0, 1), Batches(2, samples, 8).indices(0, 0))

    assert not any(np.array_equal(base.indices(0, 0), other) for other in others)


def test_noise_is_uniform_and_reproducible() -> None:
    drawn = noise(5, 2, 0, (100, 100), "float32")

    np.testing.assert_array_equal(drawn, noise(5, 2, 0, (100, 100), "float32"))
    assert (drawn.dtype, drawn.shape) == (np.float32, (100, 100))
    assert 0.0 <= drawn.min() < 0.01
    assert 0.99 < drawn.max() < 1.0
    assert abs(drawn.mean() - 0.5) < 0.01


def test_noise_of_other_steps_ports_and_seeds_differs() -> None:
    base = noise(5, 2, 0, (8,), "float32")

    for other in (
        noise(6, 2, 0, (8,), "float32"),
        noise(5, 3, 0, (8,), "float32"),
        noise(5, 2, 1, (8,), "float32"),
    ):
        assert not np.array_equal(base, other)


def test_the_first_draws_are_frozen() -> None:
    """A device that is updated in the middle of a run must go on with the same batches."""
    assert Batches(42, 10, 4).indices(0, 0).tolist() == FROZEN_ROWS
    np.testing.assert_array_equal(noise(42, 0, 0, (3,), "float32"), np.array(FROZEN_NOISE, np.float32))


FROZEN_ROWS = [3, 7, 1, 5]
FROZEN_NOISE = [0.23103231191635132, 0.2035975456237793, 0.929989755153656]


# -- each batch drawn anew -------------------------------------------------------------------------------------


def drawing(seed: int, samples: int, batch: int) -> Batches:
    return Batches(seed, samples, batch, "draw")


@given(SEEDS, st.integers(1, 40), st.integers(1, 12), st.integers(0, 3), st.integers(0, 30))
def test_a_draw_depends_on_seed_and_step(seed: int, samples: int, batch: int, stream: int, step: int) -> None:
    rows = drawing(seed, samples, batch).indices(stream, step)

    np.testing.assert_array_equal(rows, drawing(seed, samples, batch).indices(stream, step))
    assert (rows.shape, rows.dtype) == ((batch,), np.int64)
    assert ((rows >= 0) & (rows < samples)).all()
    if samples >= batch:
        assert len(set(rows.tolist())) == batch


def test_draws_do_not_walk_through_the_data() -> None:
    """Each step has the same chance of a row, whatever the steps before it drew."""
    rows = [drawing(3, 10, 5).indices(0, step) for step in range(400)]

    again = np.mean([len(np.intersect1d(one, other)) for one, other in itertools.pairwise(rows)])
    assert abs(again - 2.5) < 0.2
    assert np.bincount(np.concatenate(rows), minlength=10).min() > 160


def test_streams_are_drawn_independently_of_each_other() -> None:
    """Inner, outer and Hessian batches of one step share rows only by chance."""
    overlap = [
        len(np.intersect1d(drawing(3, 10, 5).indices(one, step), drawing(3, 10, 5).indices(two, step)))
        for step in range(200)
        for one, two in ((0, 1), (1, 2), (0, 2))
    ]

    assert abs(np.mean(overlap) - 2.5) < 0.2


def test_draws_from_fewer_rows_than_a_batch_repeat_rows() -> None:
    rows = np.concatenate([drawing(7, 3, 8).indices(0, step) for step in range(50)])

    assert set(rows) == {0, 1, 2}
    np.testing.assert_array_equal(rows[:8], Batches(7, 3, 8).indices(0, 0))


# -- one pass over the data ------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12))
def test_a_pass_meets_every_row_once_in_order_and_masks_what_fills_it_up(samples: int, batch: int) -> None:
    over, steps = DataPass(samples, batch), -(-samples // batch)
    rows = np.concatenate([over.indices(step) for step in range(steps)])
    mask = np.concatenate([over.mask(step) for step in range(steps)])

    assert rows[mask == 1].tolist() == list(range(samples))
    assert rows.tolist() == [row % samples for row in range(steps * batch)]
    assert mask.dtype == np.float32


# -- what each port of a graph is fed: by its role and label, in its own size ------------------------------


DATA = tiny.local().fitted(tiny.DATA)


def reading(*ports: tiny.Port) -> Graph:
    return tiny.graph_of("g", b"graph", ports, ())


def stream(number: int, rows: int) -> tuple[tiny.Port, tiny.Port]:
    return port(f"batch.{number}.x", (rows, WIDTH)), port(f"batch.{number}.y", (rows,), "int64")


@pytest.mark.parametrize("draws", ["walk", "draw"])
def test_each_stream_has_batches_of_its_own_size(draws: str) -> None:
    spec = reading(*stream(0, 4), *stream(1, 2), *stream(2, 7))

    fed = RoundInputs(seed=7, data=DATA, draws=draws).batch(spec, 3)  # type: ignore[arg-type]

    for number, rows in ((0, 4), (1, 2), (2, 7)):
        at = Batches(7, ROWS, rows, draws).indices(number, 3)  # type: ignore[arg-type]
        np.testing.assert_array_equal(fed[f"batch.{number}.x"], DATA.rows(at))
        np.testing.assert_array_equal(fed[f"batch.{number}.y"], DATA.labels(at))


def test_other_streams_change_no_batches() -> None:
    alone = RoundInputs(seed=7, data=DATA).batch(reading(*stream(0, 4)), 5)
    beside = RoundInputs(seed=7, data=DATA).batch(reading(*stream(1, 3), *stream(0, 4), *stream(2, 9)), 5)

    np.testing.assert_array_equal(alone["batch.0.x"], beside["batch.0.x"])


def test_a_pass_is_masked_where_the_rows_begin_again() -> None:
    spec = reading(*stream(0, 4), port("batch.0.mask", (4,)))

    fed = RoundInputs(seed=7, data=DATA).masked_batch(spec, 2)

    np.testing.assert_array_equal(fed["batch.0.x"], DATA.rows(np.array([8, 9, 0, 1])))
    np.testing.assert_array_equal(fed["batch.0.y"], DATA.labels(np.array([8, 9, 0, 1])))
    np.testing.assert_array_equal(fed["batch.0.mask"], np.array([1, 1, 0, 0], np.float32))


def test_features_take_the_place_of_samples_and_never_of_labels() -> None:
    feeds = RoundInputs(seed=7, data=DATA, features=lambda rows: -DATA.rows(rows))
    plain = RoundInputs(seed=7, data=DATA)
    spec = reading(*stream(0, 4))

    for fed, other in (
        (feeds.batch(spec, 0), plain.batch(spec, 0)),
        (feeds.masked_batch(spec, 0), plain.masked_batch(spec, 0)),
    ):
        np.testing.assert_array_equal(fed["batch.0.x"], -other["batch.0.x"])
        np.testing.assert_array_equal(fed["batch.0.y"], other["batch.0.y"])


def test_labels_of_global_tensors_with_slashes_are_fed_like_any_other() -> None:
    spec = reading(port("hyper.m/rho", ()), port("noise.m/conv.weight", (2,)))

    fed = check_complete(spec, RoundInputs(seed=7, data=DATA, hyper={"m/rho": 0.5}).shared(spec, 0))

    assert fed["hyper.m/rho"] == 0.5
    assert fed["noise.m/conv.weight"].shape == (2,)


@pytest.mark.parametrize("label", ["batch.0.mask", "batch.0.z"])
def test_a_part_of_a_drawn_batch_that_is_not_known_is_refused_by_name(label: str) -> None:
    spec = reading(*stream(0, 4), port(label, (4,)))

    with pytest.raises(
        BundleError, match=rf"reads (\['{label}'\], which have no source|'{label}', and the manifest)"
    ):
        check_complete(spec, RoundInputs(seed=7, data=DATA).batch(spec, 0))


def test_a_part_of_a_pass_that_is_not_known_is_refused_by_name() -> None:
    spec = reading(*stream(0, 4), port("batch.0.z", (4,)))

    with refuses(BundleError, port="batch.0.z"):
        check_complete(spec, RoundInputs(seed=7, data=DATA).masked_batch(spec, 0))
