"""Local data in every format of arrays, and what is no such thing."""

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

from edgefl.wire.array_files import read_idx
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SeriesSpec, SoundSpec, TableSpec, TextSpec
from edgefl.wire.tensors import Array
from edgefl_device.data.samples import LocalData, LocalSource
from edgefl_device.data.sources import load as load_any
from tests.device_runtime.data.files import every, fitted, image, sound, written
from tests.support.errors import DataError, refuses

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


def class_folders(path: Path, *names: str) -> LocalSource:
    for label, name in enumerate(names):
        (path / name).mkdir()
        for row in np.flatnonzero(label == Y):
            np.save(path / name / f"{row}.npy", X[row])
    return load_any(path)


def test_a_folder_per_class(tmp_path: Path) -> None:
    data = class_folders(tmp_path, "0", "1", "2").fitted(SPEC)

    np.testing.assert_array_equal(data.y, [0, 0, 1, 2, 2])
    np.testing.assert_array_equal(data.rows(np.arange(5)), X[[0, 4, 2, 1, 3]].astype(np.float32) / 2 - 1)


def test_in_a_folder_of_integers_and_floats_only_the_integers_are_scaled(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    np.save(tmp_path / "0" / "1.npy", X[1])
    np.save(tmp_path / "0" / "2.npy", X[2].astype(np.float32))

    rows = load_any(tmp_path).fitted(SPEC).rows(np.arange(2))

    np.testing.assert_array_equal(rows[0], X[1].astype(np.float32) / 2 - 1)
    np.testing.assert_array_equal(rows[1], X[2])


def test_a_bad_sample_among_others_is_left_out(tmp_path: Path) -> None:
    tokens = msgspec.structs.replace(SPEC, dtype="int64", below=5)
    (tmp_path / "0").mkdir()
    for value in (4, 5, 6.5):
        np.save(tmp_path / "0" / f"{value}.npy", np.full((4, 3), value))

    found = load_any(tmp_path, "skip").fitted(tokens)

    assert [problem.text for problem in found.skipped.first] == [
        "the sample has 5 to 5, the model takes whole numbers from 0 to 4",
        "the sample is float64, the model takes int64 or integers to be scaled",
    ]
    np.testing.assert_array_equal(found.rows(np.arange(1)), np.full((1, 4, 3), 4))


def test_what_is_not_read_is_told(tmp_path: Path) -> None:
    class_folders(tmp_path, "0", "1", "2")
    (tmp_path / "0" / "old").mkdir()
    (tmp_path / "1" / "notes.webp").write_bytes(b"")
    (tmp_path / "2" / "labels.csv").write_text("a\n")

    assert load_any(tmp_path).fitted(SPEC).unread == ("1 .webp", "1 .csv", "1 old/")
    arrays = npz(
        tmp_path / "d.npz", x=X, y=Y, ids=np.arange(5), names=np.array(["a", "b"]), rate=np.float32(8)
    )
    assert load_any(arrays).fitted(SPEC).unread == ("array 'ids'", "array 'names'", "array 'rate'")
    assert len(load_any(arrays, "skip").fitted(SPEC)) == 5


def test_one_stray_array_does_not_hide_the_files_that_the_bundle_reads(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,y\n1,0\n2,1\n")
    np.save(tmp_path / "stray.npy", X)
    spec = DataSpec(shape=(1,), dtype="float32", classes=2, reader=TableSpec(columns=("a",), label="y"))

    found = load_any(tmp_path).fitted(spec)

    assert (len(found), found.unread) == (2, ("1 .npy",))


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
    with pytest.raises(DataError, match=r"there is no file .*nowhere\.npz; write one"):
        load(tmp_path / "nowhere.npz")
    with pytest.raises(DataError):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"x": X}, r"d\.npz has no array y; it has x: samples are called x, their labels y"),
        ({"x": X, "y": Y[:4]}, "5 samples and 4 labels"),
        ({"x": X[:0], "y": Y[:0]}, "0 samples and 0 labels"),
        ({"x": np.float32(1), "y": Y}, None),
        ({"x": X, "y": np.int64(3)}, None),
        ({"x": np.float32(1), "y": np.int64(1)}, None),
    ],
    ids=["no labels", "unequal", "empty", "one sample", "one label", "scalars"],
)
def test_arrays_that_are_no_data_are_refused(
    tmp_path: Path, arrays: dict[str, Array], told: str | None
) -> None:
    with pytest.raises(DataError, match=told):
        load(npz(tmp_path / "d.npz", **arrays))


def test_text_with_an_archive_s_name_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_text("hello")
    with pytest.raises(DataError, match=r"d\.npz is no \.npz archive; write one with numpy\.savez"):
        load(tmp_path / "d.npz")


def test_x_without_y_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)

    with refuses(DataError, path=str(tmp_path), missing="y.npy"):
        load(tmp_path)


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(X))

    with refuses(DataError, path=str(tmp_path), missing="labels-idx1-ubyte"):
        load(tmp_path)


def test_pickled_objects_are_never_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([{}, []], dtype=object), y=Y[:2])

    with pytest.raises(DataError, match=r"cannot be read: array .x. holds Python objects"):
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    name=st.sampled_from(sorted(FILES)),
    place=st.integers(0, 2000),
    value=st.binary(max_size=2),
    cut=st.booleans(),
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, place: int, value: bytes, cut: bool) -> None:
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


# -- whatever bytes a file holds: it is read, or it is named in a DataError --------------------------------


PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
SPECS = {
    "png": DataSpec(shape=(3, 4, 4), dtype="float32", classes=1),
    "jpg": DataSpec(shape=(1, 2, 4), dtype="float32", classes=1),
    "wav": DataSpec(shape=(8,), dtype="float32", classes=1, reader=SoundSpec(rate=8000, length=8)),
    "txt": DataSpec(shape=(4,), dtype="int64", classes=1, below=256, reader=TextSpec()),
    "csv": DataSpec(
        shape=(1, 2), dtype="float32", classes=1, reader=SeriesSpec(columns=("a",), window=2, step=1)
    ),
    "npy": DataSpec(shape=(4, 3), dtype="float32", classes=1),
}


def whole(suffix: str, folder: Path) -> bytes:
    path = folder / f"whole.{suffix}"
    if suffix in ("png", "jpg"):
        image(path, PIXELS)
    elif suffix == "wav":
        sound(path, np.arange(9, dtype=np.int16))
    elif suffix == "npy":
        np.save(path, np.ones((4, 3), np.float32))
    else:
        written(path, "a\n1\n2\n3\n")
    return path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 2000), value=st.binary(max_size=3), cut=st.booleans())
@pytest.mark.parametrize("suffix", SPECS)
def test_damaged_files_of_any_kind_are_refused(
    tmp_path: Path, suffix: str, place: int, value: bytes, cut: bool
) -> None:
    content = whole(suffix, tmp_path)
    (tmp_path / f"whole.{suffix}").unlink()
    place %= len(content)
    damaged = content[:place] + value + (b"" if cut else content[place + len(value) :])
    path = written(tmp_path / "0" / f"damaged.{suffix}", damaged)
    try:
        data = fitted(tmp_path, SPECS[suffix])
    except DataError as error:
        assert path.name in error.message or str(tmp_path) in error.message
        return
    assert np.isfinite(every(data)).all()


@pytest.mark.parametrize("suffix", SPECS)
def test_a_whole_file_is_read(tmp_path: Path, suffix: str) -> None:
    written(tmp_path / "0" / f"good.{suffix}", whole(suffix, tmp_path))
    (tmp_path / f"whole.{suffix}").unlink()

    assert every(fitted(tmp_path, SPECS[suffix])).shape[1:] == SPECS[suffix].shape
