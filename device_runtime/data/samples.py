"""Local data: npz, idx files or a folder, checked against the manifest, and the batches drawn from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from zipfile import is_zipfile

import numpy as np
from numpy.random import Generator, Philox, SeedSequence  # numpy itself would load them in the first round

from edgefl.wire.bundle.manifest import DataSpec, Input, Manifest
from edgefl.wire.errors import DataError
from edgefl.wire.idx import read_idx
from edgefl.wire.tensors import Array

_SCANNED = 1 << 20
"""Values that are looked at together."""


@dataclass(frozen=True)
class LabelSpec:
    """One sample's label: integers are class numbers (one, or one per token), floats are answers or targets."""

    shape: tuple[int, ...] = ()
    dtype: str = "int64"
    # A number that stands beside the classes and counts for nothing, such as -100.
    ignored: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> LabelSpec:
        """What the bundle's graphs read as labels; one class number where none of them reads any."""
        graphs = (*(phase.graph for phase in manifest.phases), manifest.evaluate)
        for port in (port for name in graphs for port in manifest.graph(name).inputs_of("batch")):
            if port.label.endswith(".y"):
                return cls(port.shape[1:], port.dtype, port.ignored)
        return cls()

    def fitted(self, y: Array, classes: int, source: str) -> Array:
        """``y`` (n, *shape) in this dtype, or (n,) where a label is (1,); DataError says what differs."""
        if self.shape == (1,) and y.ndim == 1:
            y = y[:, None]
        if y.shape[1:] != self.shape:
            wanted = f"{self.dtype} {self.shape}" if self.shape else "one number"
            raise DataError(
                f"{source}: labels have shape {y.shape}, the model takes {wanted} per sample",
                found=y.shape,
                expected=self.shape,
            )
        if np.issubdtype(self.dtype, np.floating):
            return self._numbers(y, source)
        counted = self.counted(y)
        if not np.issubdtype(y.dtype, np.integer) or (counted.size and not self._classes(counted, classes)):
            beside = "" if self.ignored is None else f", or {self.ignored} for none"
            raise DataError(
                f"{source}: labels are {y.dtype} from {y.min()} to {y.max()}, "
                f"the model takes integers from 0 to {classes - 1}{beside}",
                classes=classes,
            )
        return y.astype(self.dtype)

    def counted(self, y: Array) -> Array:
        """The labels that count, flat: all but the ``ignored``."""
        return y.reshape(-1) if self.ignored is None else y[y != self.ignored]

    def _classes(self, y: Array, classes: int) -> bool:
        return bool(y.min() >= 0 and y.max() < classes)

    def _numbers(self, y: Array, source: str) -> Array:
        kind = y.dtype.kind
        if kind not in "biuf" or not np.isfinite(y).all():
            raise DataError(
                f"{source}: labels are {y.dtype}, the model takes finite numbers", found=str(y.dtype)
            )
        return y.astype(self.dtype)


ONE_CLASS = LabelSpec()


@dataclass(frozen=True)
class LocalData:
    """Samples x, shape (n, *sample), labels y, shape (n, *label), and what else there is of each sample by name, as they
    lie in the file."""

    x: Array
    y: Array
    source: str
    others: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.y)

    def check(self) -> None:
        """DataError for single values, for another number of samples than of labels, and for NaN or infinite values."""
        if self.x.ndim == 0 or self.y.ndim == 0:
            raise DataError(f"{self.source} should hold arrays of samples and labels, found single values")
        if len(self.x) != len(self.y) or len(self.y) == 0:
            raise DataError(
                f"{self.source} has {len(self.x)} samples and {len(self.y)} labels: it needs as many, and at least one"
            )
        for name, array in {"x": self.x, "y": self.y, **self.others}.items():
            _check_finite(name, array, self.source)

    def fitted(self, spec: DataSpec, label: LabelSpec = ONE_CLASS) -> FittedData:
        """The data as the manifest wants it; DataError says what differs."""
        x = self.x
        if x.shape[1:] != spec.shape and (x.shape[0], *spec.shape) == (x.shape[0], 1, *x.shape[1:]):
            x = x[:, None]  # grey images are often stored without their single channel
        if x.shape[1:] != spec.shape:
            raise DataError(
                f"{self.source}: samples have shape {x.shape[1:]}, the model takes {spec.shape}: "
                "convert the data, or join a federation that trains on it",
                found=x.shape[1:],
                expected=spec.shape,
            )
        if x.dtype != np.dtype(spec.dtype) and not np.issubdtype(x.dtype, np.integer):
            raise DataError(
                f"{self.source}: samples are {x.dtype}, the model takes {spec.dtype} or integers to be scaled",
                found=str(x.dtype),
                expected=spec.dtype,
            )
        if np.issubdtype(spec.dtype, np.integer):
            _check_below("samples", x, spec.below, self.source)
        others = {each.name: self._other(each) for each in spec.others}
        return FittedData(x, label.fitted(self.y, spec.classes, self.source), spec, others, label)

    def _other(self, wanted: Input) -> Array:
        """The array of an input beside x, in its dtype."""
        found, floats = self.others.get(wanted.name), np.issubdtype(wanted.dtype, np.floating)
        if found is None:
            there = f"; beside x and y there is {', '.join(self.others)}" if self.others else ""
            raise DataError(
                f"{self.source} has no array {wanted.name!r}, which the model reads of each sample beside x: {wanted.dtype} "
                f"(n, {', '.join(map(str, wanted.shape))}){there}",
                name=wanted.name,
            )
        if found.shape != (len(self.y), *wanted.shape) or found.dtype.kind not in (
            "biuf" if floats else "biu"
        ):
            raise DataError(
                f"{self.source}: {wanted.name} is {found.dtype} {found.shape}, the model takes {wanted.dtype} "
                f"{(len(self.y), *wanted.shape)}",
                name=wanted.name,
            )
        if not floats:
            _check_below(wanted.name, found, wanted.below, self.source)
        return found.astype(wanted.dtype, copy=False)


@dataclass(frozen=True)
class FittedData:
    """Data that fits the model. Integer samples are scaled when a batch is drawn, not before."""

    x: Array
    y: Array
    spec: DataSpec
    others: Mapping[str, Array] = field(default_factory=dict)
    label: LabelSpec = ONE_CLASS

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, indices: Array) -> Array:
        """Batch of spec.dtype, shape (len(indices), *spec.shape)."""
        picked = self.x[indices]
        wanted = np.dtype(self.spec.dtype)
        if picked.dtype == wanted or np.issubdtype(wanted, np.integer):
            return picked.astype(wanted, copy=False)
        floats = picked.astype(wanted)
        floats *= self.spec.scale
        floats += self.spec.shift
        return floats

    def labels(self, indices: Array) -> Array:
        return self.y[indices]

    def other(self, name: str, indices: Array) -> Array:
        """Rows of the input ``name`` beside x."""
        return self.others[name][indices]

    def facts(self) -> dict[str, Array]:
        """What a program may ask about these samples as a whole, by the label of its ``data`` port.

        ``class_counts``: int64 (classes,), how often each class occurs among the labels; absent where they are no classes.
        """
        if not np.issubdtype(self.y.dtype, np.integer):
            return {}
        counts = np.bincount(self.label.counted(self.y), minlength=self.spec.classes)
        return {"class_counts": counts.astype(np.int64)}

    def first(self, samples: int) -> FittedData:
        """At most ``samples`` rows; all of them for 0."""
        if not samples:
            return self
        others = {name: rows[:samples] for name, rows in self.others.items()}
        return FittedData(self.x[:samples], self.y[:samples], self.spec, others, self.label)


def load(path: Path) -> LocalData:
    """Samples and labels at ``path``: an npz with x and y, a folder of x.npy and y.npy, a folder with a pair of idx
    files, or a folder with one sub-folder of .npy samples per class. DataError if there is none of these, or if a value is
    NaN or infinite.
    """
    try:
        data = _load(path)
    except DataError:
        raise
    except (
        Exception
    ) as error:  # numpy, zipfile, zlib and gzip raise a dozen unrelated types for damaged files
        raise DataError(f"{path} cannot be read as training data: {error}", path=str(path)) from error
    data.check()
    return data


def _check_below(name: str, array: Array, below: int, source: str) -> None:
    """DataError where whole numbers are not 0 .. below-1: a vocabulary has no such token."""
    least, most = int(array.min()), int(array.max())
    if below and not 0 <= least <= most < below:
        raise DataError(
            f"{source}: {name} go from {least} to {most}, the model takes whole numbers from 0 to {below - 1}: prepare the "
            "data with the vocabulary of the federation",
            found=most,
            below=below,
        )


def _check_finite(name: str, array: Array, source: str) -> None:
    """DataError where values are NaN or infinite: a loss would show them as training that diverged."""
    if array.dtype.kind != "f":
        return
    wrong = {"NaN": 0, "infinite": 0}
    first = None
    rows = max(
        1, _SCANNED * len(array) // max(1, array.size)
    )  # a file that is mapped may be larger than memory
    for start in range(0, len(array), rows):
        block = array[start : start + rows]
        finite = np.isfinite(block)
        if finite.all():
            continue
        nan = int(np.isnan(block).sum())
        wrong["NaN"] += nan
        wrong["infinite"] += finite.size - int(finite.sum()) - nan
        if first is None:
            first = start + int(np.argmin(finite.reshape(len(block), -1).all(axis=1)))
    if first is not None:
        count, kinds = sum(wrong.values()), " or ".join(kind for kind in wrong if wrong[kind])
        values = f"1 value of {name} is" if count == 1 else f"{count} values of {name} are"
        text = f"{source}: {values} {kinds}, first at row {first}: repair or remove such rows (rows count from 0)"
        raise DataError(text, count=count, row=first)


def _load(path: Path) -> LocalData:
    if path.suffix == ".npz":
        return _load_archive(path)
    if (path / "x.npy").is_file():
        if not (path / "y.npy").is_file():
            raise DataError(
                f"{path} has x.npy and no y.npy: save the labels of the samples there", path=str(path)
            )
        arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(path.glob("*.npy"))}
        return LocalData(arrays.pop("x"), np.asarray(arrays.pop("y")), str(path), arrays)
    if path.is_dir() and (images := _idx_file(path, "images-idx3-ubyte")):
        labels = _idx_file(path, "labels-idx1-ubyte")
        if labels is None:
            raise DataError(f"{path} has {images.name} but no labels-idx1-ubyte file beside it")
        return LocalData(read_idx(images), read_idx(labels), str(path))
    if path.is_dir() and (classes := sorted(child for child in path.iterdir() if child.is_dir())):
        return _load_classes(path, classes)
    raise DataError(
        f"{path} is no training data: give an .npz with arrays x and y, a folder with x.npy and y.npy, "
        "a folder with idx files, or a folder with one sub-folder of .npy samples per class",
        path=str(path),
    )


def _load_archive(path: Path) -> LocalData:
    if not path.is_file():
        raise DataError(f"there is no file {path}: name the .npz with this device's samples", path=str(path))
    if not is_zipfile(path):
        raise DataError(
            f"{path} is no .npz archive: write one with numpy.savez(file, x=samples, y=labels)",
            path=str(path),
        )
    with np.load(path, allow_pickle=False) as archive:
        if missing := {"x", "y"} - set(archive.files):
            raise DataError(
                f"{path} has no array {' and no array '.join(sorted(missing))}; it has {', '.join(archive.files)}: "
                "samples are called x, their labels y",
                path=str(path),
            )
        others = {name: archive[name] for name in archive.files if name not in ("x", "y")}
        return LocalData(archive["x"], archive["y"], str(path), others)


def _load_classes(path: Path, classes: list[Path]) -> LocalData:
    files = [(label, file) for label, folder in enumerate(classes) for file in sorted(folder.glob("*.npy"))]
    samples = [np.load(file, allow_pickle=False) for _, file in files]
    return LocalData(np.stack(samples), np.array([label for label, _ in files], dtype=np.int64), str(path))


def _idx_file(folder: Path, ending: str) -> Path | None:
    """The training file of that kind, else the only one there is."""
    files = sorted(file for file in folder.iterdir() if ending in file.name)
    return next((file for file in files if file.name.startswith("train")), files[0] if files else None)


@dataclass(frozen=True)
class Batches:
    """Mini-batches of a round, ``batch`` rows each; with replacement if data are short.

    "walk": shuffled once per stream, walked through, wrapped around. "draw": each on its own, without replacement inside.
    A pure function of (seed, stream, step), so a round can be taken up at any step.
    """

    seed: int
    samples: int
    batch: int
    draws: Literal["walk", "draw"] = "walk"

    def indices(self, stream: int, step: int) -> Array:
        """Row numbers, int64, shape (batch,), of batch ``stream`` of local step ``step``."""
        if self.samples < self.batch:
            return _generator(self.seed, stream, step).integers(0, self.samples, self.batch)
        if self.draws == "draw":
            return _generator(self.seed, stream, step).choice(self.samples, self.batch, replace=False)
        order = _generator(self.seed, stream).permutation(self.samples)
        return np.take(order, np.arange(step * self.batch, (step + 1) * self.batch), mode="wrap")


@dataclass(frozen=True)
class Pass:
    """One pass over the data in their order, ``batch`` rows at a time; the last batch is filled from the first rows."""

    samples: int
    batch: int

    def indices(self, step: int) -> Array:
        """Row numbers, int64, shape (batch,)."""
        return self._rows(step) % self.samples

    def mask(self, step: int) -> Array:
        """float32 (batch,): 1 where a row is met for the first time, 0 where it only fills the batch."""
        return (self._rows(step) < self.samples).astype(np.float32)

    def _rows(self, step: int) -> Array:
        return np.arange(step * self.batch, (step + 1) * self.batch)


def noise(seed: int, step: int, port: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Uniform [0, 1) for one noise input of one step."""
    numbers = _generator(seed, 1 << 20, step, port).random(shape, dtype=np.float32)
    return np.asarray(numbers, dtype)  # of shape () numpy draws a bare number


def _generator(*key: int) -> Generator:
    return Generator(Philox(SeedSequence(key)))
