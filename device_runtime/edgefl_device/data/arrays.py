"""Readers of samples stored as arrays (npz, npy, idx) or returned by a user's function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.array_files import read_error_text, read_idx, read_npz, to_native_order
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.records import BadRow
from edgefl.wire.tensors import Array
from edgefl_device.config import Policy, Source
from edgefl_device.data.reading import FileEntry, ReadContext, ReadSamples
from edgefl_device.data.samples import LocalData, as_read


def load(path: Path, policy: Policy) -> LocalData | None:
    """Return the samples and labels at ``path``: an npz, a folder of npy files, or a folder with a pair of idx files.

    Files are memory-mapped where their format allows it; values are not checked yet. Return None if ``path`` is none of
    these three.

    Args:
        path: File or folder.
        policy: Treatment of rows with bad values, which the result applies when it is fitted to a model.

    Raises:
        DataError: A file is damaged or its labels are missing.
    """
    if path.suffix.lower() == ".npz":
        found = archive(path, policy)
        for array in (found.x, found.y, *found.others.values()):  # so that no round has to look for changes
            array.flags.writeable = False
        return found
    if (path / "x.npy").is_file():
        if not (path / "y.npy").is_file():
            raise DataError(
                f"{path} has x.npy and no y.npy: save the labels of the samples there",
                path=str(path),
                missing="y.npy",
            )
        arrays = {file.stem: _map_npy(file) for file in sorted(path.glob("*.npy"))}
        return LocalData(arrays.pop("x"), np.asarray(arrays.pop("y")), str(path), arrays, policy)
    if path.is_dir() and (images := _idx_file(path, "images-idx3-ubyte")):
        labels = _idx_file(path, "labels-idx1-ubyte")
        if labels is None:
            raise DataError(
                f"{path} has {images.name} but no labels-idx1-ubyte file",
                path=str(path),
                missing="labels-idx1-ubyte",
            )
        return LocalData(read_idx(images), read_idx(labels), str(path), policy=policy)
    return None


def _map_npy(file: Path) -> Array:
    """Return the array of an npy file, memory-mapped; an array in foreign byte order is converted in memory."""
    try:
        return to_native_order(np.load(file, mmap_mode="r"))
    except ValueError as error:
        raise DataError(
            f"{file} cannot be read as training data: {read_error_text(error, '')}", path=str(file)
        ) from error


def load_function(source: Source, policy: Policy) -> LocalData:
    """Call the user's function once and return its samples, labels and further inputs as :class:`LocalData`. Values are
    not checked.

    Args:
        source: The user's function.
        policy: Treatment of rows with bad values, which the result applies when it is fitted to a model.

    Raises:
        DataError: The result is neither (x, y), (x, y, others) nor a mapping with ``x`` and ``y``.
    """
    name = getattr(source, "__name__", type(source).__name__)
    found = source()
    parts: list[object] = []
    others: dict[str, object] = {}
    if isinstance(found, Mapping):
        others = dict(found)
        parts = [others.pop(key, None) for key in ("x", "y")]
    elif isinstance(found, tuple) and (
        len(found) == 2 or (len(found) == 3 and isinstance(found[2], Mapping))
    ):
        parts = list(found[:2])
        others = dict(*found[2:])
    if len(parts) != 2 or any(part is None for part in parts):
        raise DataError(
            f"{name}() gives {type(found).__name__}: it has to give (x, y), (x, y, others) or a mapping with x and y, where "
            "others are the inputs beside x by name",
            function=name,
            found=type(found).__name__,
        )
    x, y = (_array(part, key, name) for part, key in zip(parts, ("x", "y"), strict=True))
    return LocalData(
        x, y, f"{name}()", {key: _array(each, key, name) for key, each in others.items()}, policy
    )


def _array(part: object, key: str, name: str) -> Array:
    try:
        return to_native_order(np.asarray(part))
    except ValueError as error:  # lists of unequal lengths
        raise DataError(
            f"{name}() gives {key} that is no array: {error}", function=name, array=key
        ) from error


def archive(path: Path, policy: Policy = "refuse") -> LocalData:
    """Return the arrays of an npz without checking their values: ``x`` as samples, ``y`` as labels, all others as
    further inputs.

    Args:
        path: The npz file.
        policy: Treatment of rows with bad values, which the result applies when it is fitted to a model.

    Raises:
        DataError: The file is no npz, or has no array ``x`` or ``y``.
    """
    found = read_npz(path, "write one with numpy.savez(file, x=samples, y=labels)")
    if missing := {"x", "y"} - found.keys():
        raise DataError(
            f"{path} has no array {' and no array '.join(sorted(missing))}; it has {', '.join(found) or 'none'}: "
            "samples are called x, their labels y",
            path=str(path),
        )
    return LocalData(found.pop("x"), found.pop("y"), str(path), found, policy)


def _idx_file(folder: Path, ending: str) -> Path | None:
    """Return the file of ``folder`` whose name contains ``ending``; prefer the one for training. None if there is none."""
    files = sorted(file for file in folder.iterdir() if ending in file.name)
    return next((file for file in files if file.name.startswith("train")), files[0] if files else None)


def read_npy_files(reading: ReadContext, entries: tuple[FileEntry, ...]) -> ReadSamples:
    return reading.decoded(reading.by_folder(entries), lambda path: _sample(path, reading.spec))


def _sample(path: Path, spec: DataSpec) -> Array:
    """Return the array of an npy file as one model input; integers are scaled as ``spec`` describes.

    Raises:
        BadRow: The file is damaged, or its shape or dtype does not fit.
    """
    try:
        found = to_native_order(np.load(path, allow_pickle=False))
    except Exception as error:  # numpy raises unrelated types for damaged files
        raise BadRow(f"cannot be read: {read_error_text(error, '')}") from error
    if spec.shape not in (found.shape, (1, *found.shape)):
        raise BadRow(f"the sample has shape {found.shape}, the model takes {spec.shape}")
    if found.dtype.kind not in "iu" and found.dtype != np.dtype(spec.dtype):
        raise BadRow(f"the sample is {found.dtype}, the model takes {spec.dtype} or integers to be scaled")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise BadRow("the sample has a value that is NaN or infinite")
    if np.issubdtype(spec.dtype, np.integer):
        most = spec.below or int(np.iinfo(spec.dtype).max) + 1
        least = 0 if spec.below else int(np.iinfo(spec.dtype).min)
        if int(found.min()) < least or int(found.max()) >= most:
            raise BadRow(
                f"the sample has {int(found.min())} to {int(found.max())}, the model takes whole numbers from {least} to "
                f"{most - 1}"
            )
    return as_read(found.reshape(spec.shape), spec)
