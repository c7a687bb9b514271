"""Labelled datasets as compact arrays, and the data files of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.errors import DataError
from edgefl.system.files import replacing
from edgefl.wire.array_files import read_npz
from edgefl.wire.bundle.readers import Reader

Array = NDArray[Any]
_ARRAYS = ("train_x", "train_y", "test_x", "test_y")
_FACTS: dict[str, Callable[[Any], Any]] = {
    "scale": float,
    "shift": float,
    "top": int,
    "classes": int,
    "below": int,
}


@dataclass(frozen=True, eq=False)
class OtherInput:
    """Data of one additional input of a model, besides the samples x.

    Attributes:
        train: Rows for training, (n, ...), in the dtype that the model reads.
        test: Rows for testing, (n, ...).
        below: Values are integers 0 .. below-1. 0: any values.
    """

    train: Array
    test: Array
    below: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples x (n, ...), additional inputs of a model, and labels y (n, ...).

    Images are uint8, (n, C, H, W); a model reads ``x * scale + shift``. With ``below``, x are token numbers 0 ..
    below-1, which a model reads as int64. Samples of float32 are read unchanged. Labels are integers (int64) or floats
    (float32), of any shape.

    Attributes:
        name: Exact name of the data, for results and logs.
        train_x: Samples for the training of devices.
        train_y: Labels of ``train_x``.
        test_x: Samples for the evaluation on the server.
        test_y: Labels of ``test_x``.
        scale: Factor that turns integers into the floats that a model reads.
        shift: Summand that turns integers into the floats that a model reads.
        classes: Number of classes. The size of the vocabulary if tokens are labels, 1 if labels are no classes.
        top: Largest value that a pixel can have.
        below: Number of tokens if samples are token numbers, else 0.
        others: Inputs besides x, by name.
        names: Names of the classes, in the order of their numbers. Empty: none.
        owners: Number of the source of each training sample (an author, a document), int64, for a partition by owner.
            None: unknown.
        test_owners: Number of the source of each test sample, to evaluate owners on their own samples. None: unknown.
        ignored: Additional label of entries that do not count, such as -100 for padding or 255 for a border. None:
            none.
        reader: Settings with which files of a device become such samples. None: default.
        tokenizer: JSON of the tokenizer of texts. Empty for bytes.

    Raises:
        DataError: Shapes, dtypes or values of the arrays contradict each other.
    """

    name: str
    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array
    scale: float
    shift: float
    classes: int
    # The largest value a pixel can have.
    top: int = 255
    below: int = 0
    others: Mapping[str, OtherInput] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    owners: Array | None = None
    test_owners: Array | None = None
    ignored: int | None = None
    reader: Reader | None = None
    tokenizer: bytes = b""

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            kinds = "biu" if self.below else "biuf"
            if (
                x.ndim < 2
                or x.dtype.kind not in kinds
                or len(y) != len(x)
                or y.dtype not in (np.int64, np.float32)
            ):
                raise DataError(
                    f"{self.name}, {part}: expected samples (n, ...) of {'token numbers' if self.below else 'numbers'} and "
                    f"as many labels, int64 or float32, found {x.dtype} {x.shape} and {y.dtype} {y.shape}",
                    part=part,
                )
            for name, other in self.others.items():
                rows = other.train if part == "train" else other.test
                if len(rows) != len(x):
                    raise DataError(
                        f"{self.name}, {part}: {len(x)} samples have {len(rows)} rows of {name}", part=part
                    )
        for part, x, owners in (
            ("training", self.train_x, self.owners),
            ("test", self.test_x, self.test_owners),
        ):
            if owners is not None and owners.shape != (len(x),):
                raise DataError(
                    f"{self.name}: {len(x)} {part} samples have owners {owners.shape}: one number for each"
                )
        self._check_alike()

    @classmethod
    def of(
        cls,
        train_x: Array,
        train_y: Array,
        test_x: Array,
        test_y: Array,
        *,
        name: str = "own data",
        classes: int | None = None,
        below: int = 0,
        **more: Any,
    ) -> Self:
        """Return a dataset of arrays.

        Images are uint8, (n, C, H, W) or grey (n, H, W). They are normalised to mean 0 and standard deviation 1 over
        the training images, or over the test images if there are no training images. Floats become float32 and are not
        normalised, so bring them to a common scale first.

        Args:
            train_x: Training samples (n, ...). n is 0 if devices have their own data.
            train_y: Their labels (n, ...): integers are class numbers, floats are targets of a regression.
            test_x: Test samples, at least one.
            test_y: Their labels.
            name: Name of the data.
            classes: Number of classes. None: one more than the largest integer label.
            below: Number of tokens if samples are token numbers, else 0.
            more: Further attributes of the dataset, such as ``names`` or ``owners``.

        Raises:
            DataError: Arrays have another type or shape, or values are out of range.
        """
        train_x, train_y, test_x, test_y = map(np.asarray, (train_x, train_y, test_x, test_y))
        if len(test_x) == 0 or len(test_y) == 0:
            raise DataError(
                f"{name}: there is one sample at least to test on; found test_x {test_x.shape} and test_y {test_y.shape}",
                found=(test_x.shape, test_y.shape),
            )
        y = [_labels(each, name) for each in (train_y, test_y)]
        count = _classes(y, more.get("ignored")) if classes is None else classes
        if below:
            return cls(name, train_x, y[0], test_x, y[1], 1.0, 0.0, count, below=below, **more)
        if train_x.dtype.kind == "f" or test_x.dtype.kind == "f":
            x = [each.astype(np.float32) for each in (train_x, test_x)]
            for part, rows in zip(_ARRAYS[::2], x, strict=True):
                _check_finite(f"{name}: {part}", rows)
            return cls(name, x[0], y[0], x[1], y[1], 1.0, 0.0, count, **more)
        if test_x.dtype != np.uint8 or test_x.ndim not in (3, 4):
            raise DataError(
                f"{name}: samples are images (uint8, (n, H, W) or (n, C, H, W)), floats, or token numbers, which have "
                f"`below`, the size of their vocabulary; found {test_x.dtype} {test_x.shape}"
            )
        x = [each[:, None] if each.ndim == 3 else each for each in (train_x, test_x)]
        pixels = train_x if len(train_x) else test_x
        mean, deviation = float(pixels.mean()), float(pixels.std()) or 1.0
        top = max(int(each.max()) for each in x if len(each)) or 1
        return cls(name, x[0], y[0], x[1], y[1], 1.0 / deviation, -mean / deviation, count, top, **more)

    def save(self, path: str | Path) -> Path:
        """Write the dataset to an npz file, atomically, and return its path.

        :meth:`load` reads the file, and so does a federation file with ``data.file``. Missing folders are created.
        """
        parts: dict[str, Any] = {key: getattr(self, key) for key in (*_ARRAYS, *_FACTS)}
        for name, other in self.others.items():
            parts |= {f"train.{name}": other.train, f"test.{name}": other.test, f"below.{name}": other.below}
        parts |= {"name": np.array(self.name), "names": np.array(self.names, np.str_)}
        owners = {"owners": self.owners, "test_owners": self.test_owners}
        parts |= {key: numbers for key, numbers in owners.items() if numbers is not None}
        parts |= {} if self.ignored is None else {"ignored": self.ignored}
        if self.reader is not None:
            parts |= {"reader": np.array(msgspec.json.encode(self.reader).decode())}
            parts |= {"tokenizer": np.frombuffer(self.tokenizer, np.uint8)}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as file:
            np.savez_compressed(file, **parts)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a dataset from an npz file.

        Args:
            path: File of :meth:`save`, or an npz with the four arrays of :meth:`of`. The training arrays may be
                missing.

        Raises:
            DataError: The file is missing or damaged, or its arrays contradict each other.
        """
        parts = _read(path)
        try:
            arrays = [parts[key] for key in _ARRAYS]
        except KeyError as error:
            raise DataError(
                f"{path} has no array {error}; it has {', '.join(parts) or 'none'}: it needs test_x and test_y, and train_x "
                "and train_y too where its samples are spread over devices",
                path=str(path),
            ) from error
        try:
            facts = {key: kind(parts[key]) for key, kind in _FACTS.items() if key in parts}
            ignored = int(parts["ignored"]) if "ignored" in parts else None
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{path}: {', '.join(_FACTS)} are single numbers: {error}", path=str(path)
            ) from error
        more: dict[str, Any] = {
            "names": tuple(map(str, parts.get("names", ()))),
            "owners": parts.get("owners"),
            "test_owners": parts.get("test_owners"),
            "ignored": ignored,
            "others": _others(parts, len(arrays[0])),
            "reader": _reader(parts, path),
            "tokenizer": bytes(parts.get("tokenizer", b"")),
        }
        given = {key: facts.pop(key) for key in ("classes", "below") if key in facts}
        train_x, train_y, test_x, test_y = arrays
        name = str(parts.get("name", Path(path).name))
        made = cls.of(train_x, train_y, test_x, test_y, name=name, **given, **more)
        return replace(made, **facts)

    def _check_alike(self) -> None:
        """Raise DataError if training and test data differ in shape or dtype, or if values are out of range."""
        if self.names and not len({*self.names}) == len(self.names) == self.classes:
            raise DataError(
                f"{self.name}: {self.classes} classes have as many different names, found {', '.join(self.names)}"
            )
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise DataError(
                f"{self.name}: training samples have shape {self.train_x.shape[1:]}, test samples {self.test_x.shape[1:]}: "
                "bring them to one"
            )
        if (self.train_y.shape[1:], self.train_y.dtype) != (self.test_y.shape[1:], self.test_y.dtype):
            raise DataError(
                f"{self.name}: training labels are {self.train_y.dtype} {self.train_y.shape}, test labels "
                f"{self.test_y.dtype} {self.test_y.shape}: bring them to one"
            )
        if self.below:
            _check_range(f"{self.name}: token numbers", (self.train_x, self.test_x), self.below, "tokens")
        for name, other in self.others.items():
            if other.below:
                _check_range(f"{self.name}: {name}", (other.train, other.test), other.below, "values")
        if self.train_y.dtype == np.int64:
            counted = [_select_counted(each, self.ignored) for each in (self.train_y, self.test_y)]
            _check_range(f"{self.name}: labels", counted, self.classes, "classes")

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, {len(self.train_y):,} train and {len(self.test_y):,} test {self._kind} {self.shape}, "
            f"{self.classes} classes)"
        )

    @property
    def _kind(self) -> str:
        """Noun for the samples in texts: "images" or "samples"."""
        return "images" if self.dtype == "float32" and len(self.shape) == 3 else "samples"

    @property
    def pixels(self) -> bool:
        """True if samples are uint8 images."""
        return not self.below and self.train_x.dtype == np.uint8 and len(self.shape) == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, such as (C, H, W) for an image."""
        return tuple(self.train_x.shape[1:])

    @property
    def dtype(self) -> str:
        """Dtype in which a model reads samples: int64 for tokens, else float32."""
        return "int64" if self.below else "float32"

    def read(self, x: Array) -> Array:
        """Return rows of x as a model reads them: int64 for tokens, float32 for others.

        Integers that are no tokens become ``x * scale + shift``; floats are not scaled.
        """
        if self.below or x.dtype.kind == "f":
            return x.astype(self.dtype, copy=False)
        floats = x.astype(np.float32)
        floats *= self.scale
        floats += self.shift
        return floats

    def train_batch(self, rows: Array) -> dict[str, Array]:
        """Return a training batch by input name: ``x`` as a model reads it, the other inputs, and the labels ``y``.

        Args:
            rows: Row numbers of the training samples.
        """
        others = {name: other.train[rows] for name, other in self.others.items()}
        return {"x": self.read(self.train_x[rows]), **others, "y": self.train_y[rows]}

    def test_batch(self, rows: Array) -> dict[str, Array]:
        """Return a test batch by input name: ``x`` as a model reads it, the other inputs, and the labels ``y``.

        Args:
            rows: Row numbers of the test samples.
        """
        others = {name: other.test[rows] for name, other in self.others.items()}
        return {"x": self.read(self.test_x[rows]), **others, "y": self.test_y[rows]}

    def unit(self) -> Dataset:
        """Return a copy whose pixels are read as values in [0, 1] instead of normalised ones (``data.scale = "unit"``).

        Its name ends in ", pixels in [0, 1]".
        """
        return replace(self, name=f"{self.name}, pixels in [0, 1]", scale=1.0 / self.top, shift=0.0)

    def limited(self, train: int = 0, test: int = 0, seed: int = 0) -> Dataset:
        """Return a dataset with a random subset of the samples, or this one if the limits exclude none.

        The name of a subset contains the numbers of samples.

        Args:
            train: Most training samples. 0: all.
            test: Most test samples. 0: all.
            seed: Seed of the choice.
        """
        rng = np.random.default_rng(seed)
        rows, held_out = choose(rng, len(self.train_y), train), choose(rng, len(self.test_y), test)
        if len(rows) == len(self.train_y) and len(held_out) == len(self.test_y):
            return self
        return replace(self._at(rows, held_out), name=limited_name(self.name, len(rows), len(held_out)))

    def validation_split(self, share: float, most: int = 0) -> Dataset:
        """Return a dataset that tests on a share of this one's training samples, and trains on the rest.

        The test samples of this one are in neither part. The choice is the same for every seed, so that runs with
        different seeds never train on a sample that another one is measured on.

        Args:
            share: Share of the training samples, above 0 and below 1.
            most: Most test samples of the result; more are in neither part. 0: no limit.

        Raises:
            DataError: A part would have no sample.
        """
        order = np.random.default_rng(0).permutation(len(self.train_y))
        count = round(share * len(order))
        if not 0 < count < len(order):
            raise DataError(
                f"expected samples to train on and samples for validation, found {share:g} of the {len(order)} "
                f"training samples of {self.name}: change data.validation, or use more samples",
                share=share,
                samples=len(order),
            )
        train, validation = np.sort(order[count:]), np.sort(order[: min(count, most or count)])
        on_training = replace(
            self,
            name=f"{self.name}, validation split",
            test_x=self.train_x,
            test_y=self.train_y,
            others={
                name: OtherInput(each.train, each.train, each.below) for name, each in self.others.items()
            },
            test_owners=self.owners,
        )
        return on_training._at(train, validation)

    def _at(self, train: Array, test: Array) -> Dataset:
        """Return the dataset of the training samples and test samples at these row numbers."""
        return replace(
            self,
            train_x=self.train_x[train],
            train_y=self.train_y[train],
            test_x=self.test_x[test],
            test_y=self.test_y[test],
            others={
                name: OtherInput(each.train[train], each.test[test], each.below)
                for name, each in self.others.items()
            },
            owners=None if self.owners is None else self.owners[train],
            test_owners=None if self.test_owners is None else self.test_owners[test],
        )

    def write_device(self, path: Path, rows: Array) -> None:
        """Write the training samples ``rows`` to a device's data file (:func:`write_client`)."""
        others = {name: each.train[rows] for name, each in self.others.items()}
        write_client(path, self.train_x[rows], self.train_y[rows], **others)


def limited_name(name: str, train: int, test: int) -> str:
    """Return the name of a subset of the data ``name`` with these numbers of samples."""
    return f"{name}, {train:,} train and {test:,} test samples"


def choose(rng: np.random.Generator, available: int, wanted: int) -> Array:
    """Return ``wanted`` random positions below ``available``, ascending; all of them if there are not more than
    ``wanted``.

    Args:
        rng: Random generator.
        available: Number of positions to choose from.
        wanted: Number of positions to choose. 0: all.
    """
    if wanted == 0 or wanted >= available:
        return np.arange(available)
    return np.sort(rng.permutation(available)[:wanted])


def write_client(path: Path, x: Array, y: Array, **others: Array) -> None:
    """Write a device's data file, an npz, atomically.

    Args:
        path: Path of the file. Missing folders are created.
        x: Samples (n, ...).
        y: Labels (n, ...). Integers are stored as int64.
        others: Additional inputs of the model by name, each (n, ...).

    Raises:
        DataError: There are no samples, or their number differs from that of the labels.
    """
    if len(x) != len(y) or len(y) == 0:
        raise DataError(
            f"{path}: a device needs as many samples as labels and at least one, found {len(x)}, {len(y)}",
            samples=len(x),
            labels=len(y),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, x=x, y=y if y.dtype.kind == "f" else y.astype(np.int64), **others)  # type: ignore[arg-type]


def _labels(y: Array, name: str) -> Array:
    """Return the labels ``y`` as int64, or as float32 if they are floats.

    Raises:
        DataError: They are no finite numbers. The text names the data as ``name``.
    """
    if y.dtype.kind not in "biuf":
        raise DataError(f"{name}: labels are numbers, found {y.dtype} {y.shape}; give each class a number")
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    floats = y.astype(np.float32)
    _check_finite(f"{name}: labels", floats)
    return floats


def _check_finite(what: str, rows: Array) -> None:
    """Raise DataError if a row has a value that is NaN, infinite or beyond float32. ``what`` names the rows in the text."""
    if len(wrong := np.flatnonzero(~np.isfinite(rows).all(axis=tuple(range(1, rows.ndim))))):
        raise DataError(
            f"{what}: expected finite numbers, found NaN or infinite ones in {len(wrong)} rows, first in row {wrong[0]}; "
            "repair or remove these rows (rows count from 0)",
            row=int(wrong[0]),
        )


def _classes(labels: Sequence[Array], ignored: int | None) -> int:
    """Return the number of classes: one more than the largest integer label that is not ``ignored``; 1 if there is none."""
    counted = [_select_counted(each, ignored) for each in labels if each.dtype == np.int64]
    return 1 + max((int(each.max()) for each in counted if each.size), default=0)


def _select_counted(labels: Array, ignored: int | None) -> Array:
    """Return the labels that are not ``ignored``, flat; all labels if ``ignored`` is None."""
    return labels if ignored is None else labels[labels != ignored]


def _check_range(what: str, arrays: Sequence[Array], below: int, counted: str) -> None:
    """Raise DataError unless all values of ``arrays`` are in 0 .. below-1.

    ``what`` names the values in the text, ``counted`` the things that are numbered, such as "classes".
    """
    found = [(int(each.min()), int(each.max())) for each in arrays if each.size]
    least, most = min((low for low, _ in found), default=0), max((high for _, high in found), default=0)
    if not 0 <= least <= most < below:
        raise DataError(
            f"{what} go from {least} to {most}, and {below} {counted} are 0 to {below - 1}", below=below
        )


def _read(path: str | Path) -> dict[str, Array]:
    """Return the arrays of an npz file by name. If it has only test arrays, training arrays without rows are added.

    Raises:
        DataError: The file is missing or damaged.
    """
    remedy = "`Dataset.save` writes one; a folder of photos for each class is read too"
    parts = read_npz(Path(path), remedy)
    if not parts.keys() & {"train_x", "train_y"} and parts.keys() >= {"test_x", "test_y"}:
        parts |= {"train_x": parts["test_x"][:0], "train_y": parts["test_y"][:0]}
    return parts


def _reader(parts: Mapping[str, Array], path: str | Path) -> Reader | None:
    """Return the reader stored in the arrays ``parts`` of the file ``path``, or None if there is none.

    Raises:
        DataError: The reader is malformed.
    """
    if "reader" not in parts:
        return None
    try:
        reader: Reader = msgspec.json.decode(str(parts["reader"]), type=Reader)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: the reader cannot be read: {error}", path=str(path)) from error
    return reader


def _others(parts: Mapping[str, Array], train: int) -> dict[str, OtherInput]:
    """Return the additional inputs in a file, by name.

    Args:
        parts: Arrays of the file: ``test.<name>``, and ``train.<name>``, which may be missing.
        train: Number of training samples. A missing ``train.<name>`` gets the first rows of the test array.
    """
    names = [key.removeprefix("test.") for key in parts if key.startswith("test.")]
    return {
        name: OtherInput(
            parts.get(f"train.{name}", parts[f"test.{name}"][:train]),
            parts[f"test.{name}"],
            int(parts.get(f"below.{name}", 0)),
        )
        for name in names
    }
