"""What each port of a graph is fed: by its role and label, in its own size."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.errors import BundleError
from edgefl.wire.bundle.manifest import Graph
from edgefl_device.data.samples import Batches
from edgefl_device.round.inputs import RoundInputs, check_complete
from tests.device_runtime import tiny
from tests.device_runtime.tiny import ROWS, WIDTH, port

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

    with pytest.raises(BundleError, match=r"reads 'batch.0.z', and the manifest describes no input 'z'"):
        check_complete(spec, RoundInputs(seed=7, data=DATA).masked_batch(spec, 0))
