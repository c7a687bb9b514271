"""Local data in every format, refused with the numbers in the message where they do not fit."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from device_runtime.data import samples
from device_runtime.data.samples import LabelSpec, Local, LocalData
from device_runtime.data.sources import load as load_any
from edgefl.wire.bundle.manifest import DataSpec, Input
from edgefl.wire.errors import DataError
from edgefl.wire.idx import read_idx
from edgefl.wire.tensors import Array

X = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
Y = np.array([0, 2, 1, 2, 0])
SPEC = DataSpec(shape=(4, 3), dtype="float32", classes=3, scale=0.5, shift=-1.0)


def idx(array: Array) -> bytes:
    codes = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}
    head = bytes([0, 0, codes[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def load(path: Path) -> LocalData:
    """Arrays, not files that a bundle has to explain."""
    found = load_any(path)
    assert isinstance(found, LocalData)
    return found


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


# -- formats ---------------------------------------------------------------------------------------------------


def test_npz(tmp_path: Path) -> None:
    data = load(npz(tmp_path / "d.npz", x=X, y=Y))

    assert len(data) == 5
    np.testing.assert_array_equal(data.x, X)
    np.testing.assert_array_equal(data.y, Y)


def test_a_folder_of_two_npy_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)

    np.testing.assert_array_equal(load(tmp_path).x, X)


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_idx_files(tmp_path: Path, packed: bool) -> None:
    for name, array in (("images-idx3-ubyte", X), ("labels-idx1-ubyte", Y.astype(np.uint8))):
        data = gzip.compress(idx(array)) if packed else idx(array)
        (tmp_path / f"train-{name}{'.gz' if packed else ''}").write_bytes(data)
        (tmp_path / f"t10k-{name}").write_bytes(idx(array[:1]))

    data = load(tmp_path)

    np.testing.assert_array_equal(data.x, X)
    np.testing.assert_array_equal(data.y, Y)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
def test_idx_files_of_every_type_come_in_native_byte_order(tmp_path: Path, dtype: str) -> None:
    array = np.array([[1, 2, 3], [4, 5, 100]], dtype)
    (tmp_path / "a").write_bytes(idx(array))

    found = read_idx(tmp_path / "a")

    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def class_folders(path: Path, *names: str) -> Local:
    for label, name in enumerate(names):
        (path / name).mkdir()
        for row in np.flatnonzero(label == Y):
            np.save(path / name / f"{row}.npy", X[row])
    return load_any(path)


def test_a_folder_per_class(tmp_path: Path) -> None:
    data = class_folders(tmp_path, "0", "1", "2").fitted(SPEC)

    np.testing.assert_array_equal(data.y, [0, 0, 1, 2, 2])
    np.testing.assert_array_equal(data.x, X[[0, 4, 2, 1, 3]])


def test_the_federation_says_the_numbers_of_named_folders(tmp_path: Path) -> None:
    data = class_folders(tmp_path, "cat", "dog", "owl")
    named = msgspec.structs.replace(SPEC, names=("owl", "cat", "dog"))

    np.testing.assert_array_equal(data.fitted(named).y, [1, 1, 2, 0, 0])
    with pytest.raises(DataError, match=r"/cat: class 'cat' is no number from 0 to 2, which is what"):
        data.fitted(SPEC)
    other = msgspec.structs.replace(SPEC, names=("cat", "dog", "fox"))
    with pytest.raises(
        DataError, match=r"/owl: no class is called 'owl'; the federation's are cat, dog, fox"
    ):
        data.fitted(other)


# -- what is refused when loading ------------------------------------------------------------------------------


def test_nothing_there_lists_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"give an \.npz with arrays x and y"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"there is no file .*nowhere\.npz: name the \.npz"):
        load(tmp_path / "nowhere.npz")
    with pytest.raises(DataError):
        load(tmp_path / "nowhere")


def test_missing_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"d\.npz has no array y; it has x: samples are called x, their labels y"
    ):
        load(npz(tmp_path / "d.npz", x=X))


def test_text_with_an_archive_s_name_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_text("hello")
    with pytest.raises(DataError, match=r"d\.npz is no \.npz archive: write one with numpy\.savez"):
        load(tmp_path / "d.npz")


def test_x_without_y_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)

    with pytest.raises(DataError, match=r"y\.npy"):
        load(tmp_path)


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(X))

    with pytest.raises(DataError, match="no labels-idx1-ubyte"):
        load(tmp_path)


def test_unequal_counts_are_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="5 samples and 4 labels"):
        load(npz(tmp_path / "d.npz", x=X, y=Y[:4]))


def test_empty_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 samples and 0 labels"):
        load(npz(tmp_path / "d.npz", x=X[:0], y=Y[:0]))


@pytest.mark.parametrize(("x", "y"), [(np.float32(1), Y), (X, np.int64(3)), (np.float32(1), np.int64(1))])
def test_scalars_are_no_data(tmp_path: Path, x: Array, y: Array) -> None:
    with pytest.raises(DataError):
        load(npz(tmp_path / "d.npz", x=x, y=y))


def test_pickled_objects_are_never_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([{}, []], dtype=object), y=Y[:2])

    with pytest.raises(DataError, match="cannot be read as training data"):
        load(tmp_path / "d.npz")


def test_class_folders_with_unequal_samples_are_refused(tmp_path: Path) -> None:
    for name, sample in (("0", X[0]), ("1", X[0, :2])):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "1.npy", sample)

    with pytest.raises(DataError, match=r"1/1\.npy: the sample has shape \(2, 3\), the model takes \(4, 3\)"):
        load_any(tmp_path).fitted(SPEC)


def test_class_folders_without_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()

    with pytest.raises(DataError):
        load_any(tmp_path)


def _npz_bytes(*, compressed: bool) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, x=X, y=Y)
    return buffer.getvalue()


FILES = {
    "d.npz": _npz_bytes(compressed=False),
    "c.npz": _npz_bytes(compressed=True),
    "train-images-idx3-ubyte": idx(X),
    "train-images-idx3-ubyte.gz": gzip.compress(idx(X), mtime=0),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(
    name=st.sampled_from(sorted(FILES)),
    place=st.integers(0, 2000),
    value=st.binary(max_size=2),
    cut=st.booleans(),
)
def test_damaged_files_raise_nothing_but_data_error(
    tmp_path: Path, name: str, place: int, value: bytes, cut: bool
) -> None:
    whole = FILES[name]
    place %= len(whole)
    damaged = whole[:place] + value + (b"" if cut else whole[place + len(value) :])
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / name).write_bytes(damaged)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(Y.astype(np.uint8)))
    try:
        load_any(tmp_path / name if name.endswith(".npz") else tmp_path)
    except DataError:
        return


# -- what is refused for a model -------------------------------------------------------------------------------


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
    with pytest.raises(DataError, match=r"shape \(4, 2\), the model takes \(4, 3\)") as caught:
        fitted(tmp_path, X[:, :, :2], Y)
    assert caught.value.details == {"found": (4, 2), "expected": (4, 3)}


def test_a_wrong_dtype_is_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="samples are float64, the model takes float32"):
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
    with pytest.raises(DataError, match=r"shape \(5, 2\), the model takes int64 \(3,\) per sample"):
        data.fitted(SPEC, LabelSpec((3,)))
    with pytest.raises(DataError, match="from 0 to 3, the model takes integers from 0 to 2"):
        load(npz(tmp_path / "e.npz", x=X, y=tokens + (tokens == 2))).fitted(SPEC, LabelSpec((2,)))


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
    with pytest.raises(DataError, match=r"e\.npz: 1 value of y is NaN, first at row 1"):
        load(npz(tmp_path / "e.npz", x=X, y=targets))


@pytest.mark.parametrize("scanned", [1, 1 << 20])
@pytest.mark.parametrize("form", ["npz", "npy"])
def test_values_that_are_not_finite_are_counted_and_the_first_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, scanned: int
) -> None:
    monkeypatch.setattr(samples, "_SCANNED", scanned)
    x = np.zeros((40, 2, 3), np.float32)
    x[17, 1, 2] = x[17, 0, 0] = x[30, 0, 0] = np.nan
    y = np.zeros(40, np.int64)

    def at(x: Array) -> Path:
        if form == "npz":
            return npz(tmp_path / "data.npz", x=x, y=y)
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
        return tmp_path

    with pytest.raises(DataError, match="3 values of x are NaN, first at row 17: repair or remove") as caught:
        load(at(x))
    assert (caught.value.details["count"], caught.value.details["row"]) == (3, 17)
    assert caught.value.message.startswith(str(tmp_path))

    x[3, 0, 0] = -np.inf
    with pytest.raises(DataError, match="4 values of x are NaN or infinite, first at row 3"):
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


@pytest.mark.parametrize("given", [X, (X,), {"x": X}, None])
def test_a_function_that_gives_no_samples_is_refused(given: object) -> None:
    def camera() -> object:
        return given

    with pytest.raises(DataError, match=r"camera\(\) gives .*: it has to give \(x, y\), \(x, y, others\)"):
        load_any(camera)
