"""Local data as a bundle wants them: scaled, in its shapes and with its labels; refused with both numbers where not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.tensors import Array
from edgefl_device.config import Policy
from edgefl_device.data import problems
from edgefl_device.data.samples import LabelSpec, LocalData
from edgefl_device.data.sources import load as load_any
from edgefl_device.data.support import (
    SampleShards,
    batch_rows,
    checked_protocol,
    held_out,
    majority,
    split,
    uniform,
)
from tests.device_runtime.data.test_data import SPEC, X, Y, load, npz
from tests.support.errors import ConfigError, DataError, refuses


def fitted(tmp_path: Path, x: Array, y: Array, spec: DataSpec = SPEC) -> Array:
    data = load(npz(tmp_path / "d.npz", x=x, y=y)).fitted(spec)
    return data.rows(np.arange(len(data)))


def test_integers_are_scaled_when_drawn(tmp_path: Path) -> None:
    rows = fitted(tmp_path, X, Y)

    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, X.astype(np.float32) * np.float32(0.5) - np.float32(1.0))


def test_floats_are_taken_as_they_are(tmp_path: Path) -> None:
    x = X.astype(np.float32) / 7

    np.testing.assert_array_equal(fitted(tmp_path, x, Y), x)


@pytest.mark.parametrize("stored", ["uint8", "int32", "int64"])
def test_integers_for_a_model_that_reads_integers_are_not_scaled(tmp_path: Path, stored: str) -> None:
    spec = DataSpec(shape=(4, 3), dtype="int64", classes=3, scale=0.5, shift=-1.0)
    rows = fitted(tmp_path, X.astype(stored), Y, spec)

    assert rows.dtype == np.int64
    np.testing.assert_array_equal(rows, X)


def test_grey_images_get_their_channel(tmp_path: Path) -> None:
    spec = DataSpec(shape=(1, 4, 3), dtype="float32", classes=3)

    assert fitted(tmp_path, X, Y, spec).shape == (5, 1, 4, 3)


def test_a_wrong_shape_is_refused_with_both(tmp_path: Path) -> None:
    with refuses(DataError, found=(4, 2), expected=(4, 3), array="x"):
        fitted(tmp_path, X[:, :, :2], Y)


def test_a_wrong_dtype_is_refused_with_both(tmp_path: Path) -> None:
    with refuses(DataError, found="float64", expected="float32", array="x"):
        fitted(tmp_path, X.astype(np.float64), Y)


@pytest.mark.parametrize(
    ("y", "text"),
    [
        (np.array([0, 1, 2, 3, 0]), "from 0 to 3, the model takes integers from 0 to 2"),
        (np.array([0, -1, 2, 1, 0]), "from -1 to 2"),
        (Y.astype(np.float32), "labels are float32"),
        (np.eye(3, dtype=np.int64)[Y], r"shape \(5, 3\)"),
    ],
)
def test_wrong_labels_are_refused_with_their_range(tmp_path: Path, y: Array, text: str) -> None:
    with pytest.raises(DataError, match=text):
        fitted(tmp_path, X, y)


@pytest.mark.parametrize("policy", ["refuse", "skip"])
def test_names_as_labels_are_refused(tmp_path: Path, policy: Policy) -> None:
    path = npz(tmp_path / "d.npz", x=X, y=np.array(["cat", "dog", "owl", "cat", "owl"]))

    with pytest.raises(DataError, match="labels are <U3, the model takes integers from 0 to 2"):
        load_any(path, policy).fitted(SPEC)


def test_numbers_that_the_model_s_type_does_not_hold_are_refused(tmp_path: Path) -> None:
    """A conversion would make others of them, or infinity."""
    large = np.array([0, 1, 300, 2, 0])
    whole = msgspec.structs.replace(SPEC, dtype="uint8", others=(Input(name="part", shape=(), dtype="int8"),))
    with refuses(DataError, array="part", found=300):
        load(npz(tmp_path / "d.npz", x=X, y=Y, part=large)).fitted(whole)
    with refuses(DataError, array="samples", found=590):
        load(npz(tmp_path / "d.npz", x=X.astype(np.int64) * 10, y=Y, part=large // 9)).fitted(whole)
    part, labels = np.array([0.0, 1e300, 0.0, 0.0, 0.0]), LabelSpec((), "float32")
    spec = msgspec.structs.replace(SPEC, others=(Input(name="part", shape=(), dtype="float32"),))
    path = npz(tmp_path / "d.npz", x=X, y=np.array([1.0, 2.0, -1e300, 4.0, 5.0]), part=part)
    with refuses(DataError, array="part", found="infinite", count=1, row=1):
        load(path).fitted(spec, labels)
    with pytest.raises(DataError, match="labels are not finite"):
        load(path).fitted(SPEC, labels)
    kept = load_any(path, "skip").fitted(spec, labels)
    np.testing.assert_array_equal(kept.y, [1.0, 4.0, 5.0])


def test_arrays_that_the_model_does_not_read_decide_about_no_row(tmp_path: Path) -> None:
    x = np.zeros((5, 4, 3), np.float32)
    x[4, 0, 0] = np.nan
    path = npz(tmp_path / "d.npz", x=x, y=Y, ids=np.array([np.nan, 1.0]))

    assert len(load_any(path, "skip").fitted(SPEC)) == 4
    with refuses(DataError, array="x", found="NaN", count=1, row=4):
        load(path)


def test_labels_become_int64(tmp_path: Path) -> None:
    data = load(npz(tmp_path / "d.npz", x=X, y=Y.astype(np.uint8))).fitted(SPEC)

    assert data.labels(np.array([1])).dtype == np.int64


def test_a_sample_budget_takes_the_first_rows(tmp_path: Path) -> None:
    data = load(npz(tmp_path / "d.npz", x=X, y=Y)).fitted(SPEC)

    assert [len(data.first(samples)) for samples in (0, 2, 99)] == [5, 2, 5]


# -- labels of other kinds -------------------------------------------------------------------------------------


def test_a_label_per_token_is_taken_and_checked(tmp_path: Path) -> None:
    tokens = np.array([[0, 1], [2, 2], [1, 0], [0, 0], [2, 1]], dtype=np.uint16)
    data = load(npz(tmp_path / "d.npz", x=X, y=tokens))
    kept = data.fitted(SPEC, LabelSpec((2,))).labels(np.array([1, 4]))

    assert kept.dtype == np.int64
    np.testing.assert_array_equal(kept, [[2, 2], [2, 1]])
    with refuses(DataError, found=(5, 2), expected=(3,), array="y"):
        data.fitted(SPEC, LabelSpec((3,)))
    with refuses(DataError, classes=3):
        load(npz(tmp_path / "e.npz", x=X, y=tokens + (tokens == 2))).fitted(SPEC, LabelSpec((2,)))


def test_labels_of_the_largest_type_are_counted_and_stand_beside_others(tmp_path: Path) -> None:
    kept = load(npz(tmp_path / "d.npz", x=X, y=np.array([0, 2, 2, 1, 0], np.uint64))).fitted(SPEC)

    np.testing.assert_array_equal(kept.facts()["class_counts"], [2, 1, 2])
    assert np.concatenate([kept.y, np.zeros(2, np.int64)]).dtype == np.int64


def test_a_label_that_counts_for_nothing_passes_beside_the_classes(tmp_path: Path) -> None:
    tokens = np.array([[0, -100], [2, 2], [1, -100], [-100, -100], [2, 1]])
    kept = load(npz(tmp_path / "d.npz", x=X, y=tokens)).fitted(SPEC, LabelSpec((2,), ignored=-100))

    np.testing.assert_array_equal(kept.labels(np.arange(5)), tokens)
    np.testing.assert_array_equal(kept.facts()["class_counts"], [1, 2, 3])
    np.testing.assert_array_equal(kept.first(2).facts()["class_counts"], [1, 0, 2])
    wrong = load(npz(tmp_path / "e.npz", x=X, y=np.where(tokens == 1, -1, tokens)))
    with pytest.raises(
        DataError, match="from -100 to 2, the model takes integers from 0 to 2, or -100 for none"
    ):
        wrong.fitted(SPEC, LabelSpec((2,), ignored=-100))
    alone = load(npz(tmp_path / "f.npz", x=X, y=np.full((5, 2), -100)))
    assert not alone.fitted(SPEC, LabelSpec((2,), ignored=-100)).facts()["class_counts"].any()


def test_a_column_of_numbers_is_a_label_of_one_number(tmp_path: Path) -> None:
    kept = load(npz(tmp_path / "d.npz", x=X, y=np.arange(5.0))).fitted(SPEC, LabelSpec((1,), "float32"))
    np.testing.assert_array_equal(kept.labels(np.array([1, 3])), [[1.0], [3.0]])


def test_numbers_as_labels_are_taken_unless_they_are_not_finite(tmp_path: Path) -> None:
    targets = np.linspace(-3.0, 7.0, 10).reshape(5, 2)
    spec = LabelSpec((2,), "float32")
    kept = load(npz(tmp_path / "d.npz", x=X, y=targets)).fitted(SPEC, spec).labels(np.arange(5))

    np.testing.assert_array_equal(kept, targets.astype(np.float32))
    assert kept.dtype == np.float32
    targets[1, 1] = np.nan
    with pytest.raises(DataError, match="the model takes finite numbers"):
        LocalData(X, targets, "memory").fitted(SPEC, spec)
    with refuses(DataError, array="y", found="NaN", count=1, row=1):
        load(npz(tmp_path / "e.npz", x=X, y=targets))


@pytest.mark.parametrize("scanned", [1, 1 << 20])
@pytest.mark.parametrize("form", ["npz", "npy"])
def test_values_that_are_not_finite_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, scanned: int
) -> None:
    monkeypatch.setattr(problems, "_SCANNED", scanned)
    x = np.zeros((40, 2, 3), np.float32)
    x[17, 1, 2] = x[17, 0, 0] = x[30, 0, 0] = np.nan
    y = np.zeros(40, np.int64)

    def at(x: Array) -> Path:
        if form == "npz":
            return npz(tmp_path / "data.npz", x=x, y=y)
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
        return tmp_path

    with refuses(DataError, array="x", found="NaN", count=3, row=17) as caught:
        load(at(x))
    assert caught.value.message.startswith(str(tmp_path))

    x[3, 0, 0] = -np.inf
    with refuses(DataError, array="x", found="NaN or infinite", count=4, row=3):
        load(at(x))
    assert len(load(at(np.nan_to_num(x)))) == 40


# -- rows that are left out ------------------------------------------------------------------------------------


def test_rows_that_do_not_fit_are_left_out_where_that_is_wanted(tmp_path: Path) -> None:
    """A NaN in x, a label beyond the classes, a token beyond the vocabulary of an input beside x."""
    x = np.arange(60, dtype=np.float32).reshape(5, 4, 3)
    x[1, 0, 0] = np.nan
    y, part = np.array([0, 1, 7, 2, 0]), np.array([[0], [1], [0], [9], [1]])
    spec = msgspec.structs.replace(SPEC, others=(Input(name="part", shape=(1,), dtype="int64", below=2),))
    found = load_any(npz(tmp_path / "d.npz", x=x, y=y, part=part), "skip").fitted(spec)

    np.testing.assert_array_equal(found.rows(np.arange(2)), x[[0, 4]])
    np.testing.assert_array_equal(found.y, [0, 0])
    np.testing.assert_array_equal(found.other("part", np.arange(2)), [[0], [1]])
    assert [problem.text for problem in found.skipped.first] == [
        "x has a value that is NaN or infinite",
        "y has 7, the model takes whole numbers from 0 to 2",
        "part has 9, the model takes whole numbers from 0 to 1",
    ]
    assert [problem.where[-5:] for problem in found.skipped.first] == ["row 1", "row 2", "row 3"]


def test_labels_that_count_for_nothing_are_no_bad_rows(tmp_path: Path) -> None:
    path = npz(tmp_path / "d.npz", x=X, y=np.array([0, -100, 2, 1, -7]))
    found = load_any(path, "skip").fitted(SPEC, LabelSpec(ignored=-100))

    assert (found.y.tolist(), found.skipped.count) == ([0, -100, 2, 1], 1)


@pytest.mark.parametrize("form", ["pair", "triple", "mapping"])
def test_a_function_gives_samples(form: str) -> None:
    part = np.ones((5, 1), np.int64)
    given = {"pair": (X, Y), "triple": (X, Y, {"part": part}), "mapping": {"x": X, "y": Y, "part": part}}

    data = load_any(lambda: given[form])

    assert isinstance(data, LocalData)
    np.testing.assert_array_equal(data.x, X)
    assert data.others.keys() == (set() if form == "pair" else {"part"})


@pytest.mark.parametrize("given", [X, (X,), {"x": X}, None, (X, Y, 3)])
def test_a_function_that_gives_no_samples_is_refused(given: object) -> None:
    def camera() -> object:
        return given

    with refuses(DataError, function="camera", found=...):
        load_any(camera)


def test_a_function_that_gives_lists_of_unequal_lengths_is_refused() -> None:
    def camera() -> object:
        return [[1.0], [2.0, 3.0]], [0, 1]

    with refuses(DataError, function="camera", array="x"):
        load_any(camera)


# -- which samples a model is adapted to and which judge it ------------------------------------------------


@pytest.mark.parametrize("counts", [(10, 10), (7, 5, 3), (1, 1, 1, 1), (20, 1), (1, 1)])
def test_halves_are_stratified(counts: tuple[int, ...]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    shards = SampleShards(np.arange(0), np.arange(len(labels)))

    parts = split("split_test", shards, labels, seed=1)

    for label, count in enumerate(counts):
        halves = [int((labels[rows] == label).sum()) for rows in (parts.support, parts.query)]
        assert sum(halves) == count
        assert abs(halves[0] - halves[1]) <= 1
    assert 0 <= len(parts.support) - len(parts.query) <= 1


def test_labels_that_are_no_classes_are_halved_too() -> None:
    labels = np.random.default_rng(0).normal(size=(9, 2))

    parts = split("split_test", SampleShards(np.arange(0), np.arange(9)), labels, seed=1)

    assert (len(parts.support), len(parts.query)) == (5, 4)
    assert majority(labels, parts.support, parts.query) is None


def test_one_held_out_sample_is_the_least() -> None:
    shards = held_out(np.zeros(3, np.int64), seed=0)

    assert (len(shards.train), len(shards.test)) == (2, 1)


@pytest.mark.parametrize("samples", [0, 1])
def test_what_cannot_be_split_is_refused(samples: int) -> None:
    labels = np.zeros(samples, np.int64)

    with refuses(DataError, samples=samples):
        held_out(labels, seed=0)
    with refuses(DataError, samples=samples):
        split("split_test", SampleShards(np.arange(0), np.arange(samples)), labels, seed=0)


@pytest.mark.parametrize(("train", "test", "missing"), [(0, 3, "training"), (3, 0, "test")])
def test_an_empty_shard_is_named(train: int, test: int, missing: str) -> None:
    shards = SampleShards(np.arange(train), np.arange(train, train + test))

    with pytest.raises(DataError, match=f"needs {missing} samples"):
        split("train_support", shards, np.zeros(3, np.int64), seed=0)


def test_an_unknown_protocol_is_refused_with_those_there_are() -> None:
    with refuses(ConfigError, protocol="holdout"):
        checked_protocol("holdout")


def test_a_batch_has_no_row_twice_while_there_are_enough() -> None:
    assert len(set(batch_rows(30, 20, 0, seed=0).tolist())) == 20


def test_few_samples_fill_a_batch_of_fixed_size_with_repetitions() -> None:
    rows = batch_rows(3, 20, 0, seed=0)

    assert len(rows) == 20
    assert set(rows.tolist()) <= {0, 1, 2}
    assert sorted(batch_rows(3, 20, 0, seed=0, clip=True).tolist()) == [0, 1, 2]


def test_steps_users_and_seeds_have_streams_of_their_own() -> None:
    keys = [(seed, user, step) for seed in (0, 1) for user in (0, 1) for step in (0, 1)]

    rows = {tuple(batch_rows(100, 20, step, seed=seed, user=user)) for seed, user, step in keys}
    noise = {uniform((4,), step, 0, seed=seed, user=user).tobytes() for seed, user, step in keys}

    assert len(rows) == len(noise) == len(keys)
    assert np.array_equal(batch_rows(100, 20, 1, seed=1), batch_rows(100, 20, 1, seed=1))


def test_a_constant_answer_is_the_most_frequent_class_of_the_support() -> None:
    labels = np.array([0, 1, 1, 2, 2, 1, 2, 0])

    assert majority(labels, np.arange(5), np.arange(5, 8)) == pytest.approx(1 / 3)
