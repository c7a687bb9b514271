"""A labelled dataset as compact arrays, and the files that devices read."""

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
    """Input beside x, with its rows for training and for testing.

    Attributes:
        train: rows for training, (n, ...), in the dtype that the model reads.
        test: rows for testing, (n, ...).
        below: the values are integers 0 .. below-1; 0 for any values.
    """

    train: Array
    test: Array
    below: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples x (n, ...), other inputs of a model, and labels y (n, ...).

    Images stay uint8, (n, C, H, W); ``x * scale + shift`` makes the floats that a model reads. With ``below``, x are token
    numbers 0 .. below-1, which a model reads as int64. Samples of float32 are read as they are. Labels are integers (int64)
    or floats (float32), of any shape.

    Attributes:
        name: exact name of the data, for results and logs.
        train_x: samples for the training of devices, with labels ``train_y``.
        test_x: samples for the evaluation of the server, with labels ``test_y``.
        classes: number of classes; a vocabulary's size if tokens are labels, 1 if labels are no classes.
        others: inputs beside x, by name.
        top: largest value of a pixel.
        names: names of the classes.
        ignored: a label beside the classes that does not count, such as -100 for padding or 255 for a border.
        owners: source of each training sample (an author, a document), int64, for a partition by owner.
        test_owners: source of each test sample, so that owners are evaluated on their own samples.
        reader: settings with which files of a device become such samples.
        tokenizer: JSON of the tokenizer of texts; empty for bytes.

    Raises:
        DataError: arrays contradict each other.
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
        """Make a dataset of arrays.

        Images are uint8, (n, C, H, W) or grey (n, H, W). They are normalised to mean 0 and deviation 1 over the training
        images; on a server whose devices have their own, over the test images. Samples of floats become float32 and keep
        their values: bring them to a common scale. With ``below`` samples are token numbers 0 .. below-1. Labels are
        integers, ``classes`` by default one more than the largest, or floats, which are no classes.

        Raises:
            DataError: arrays of another type or shape, or values out of range.
        """
        train_x, train_y, test_x, test_y = map(np.asarray, (train_x, train_y, test_x, test_y))
        if len(test_x) == 0 or len(test_y) == 0:
            raise DataError(
                f"{name}: there is one sample at least to test on; found test_x {test_x.shape} and test_y {test_y.shape}"
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
        """Write an npz for :meth:`load` and a federation file's ``data.file``, completely or not at all; return the path."""
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
        """Load the dataset of an npz: the arrays of :meth:`of`, or the two for tests, and all that :meth:`save` wrote."""
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
            counted = [_counted(each, self.ignored) for each in (self.train_y, self.test_y)]
            _check_range(f"{self.name}: labels", counted, self.classes, "classes")

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, {len(self.train_y):,} train and {len(self.test_y):,} test {self._kind} {self.shape}, "
            f"{self.classes} classes)"
        )

    @property
    def _kind(self) -> str:
        return "images" if self.dtype == "float32" and len(self.shape) == 3 else "samples"

    @property
    def pixels(self) -> bool:
        """True if samples are images of integers."""
        return not self.below and self.train_x.dtype == np.uint8 and len(self.shape) == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample; (C, H, W) of an image."""
        return tuple(self.train_x.shape[1:])

    @property
    def dtype(self) -> str:
        """Type of a sample as a model reads it: int64 for tokens, float32 for all others."""
        return "int64" if self.below else "float32"

    def read(self, x: Array) -> Array:
        """Return rows of x as a model reads them: float32, ``x * scale + shift`` for integers; tokens int64."""
        if self.below or x.dtype.kind == "f":
            return x.astype(self.dtype, copy=False)
        floats = x.astype(np.float32)
        floats *= self.scale
        floats += self.shift
        return floats

    def train_batch(self, rows: Array) -> dict[str, Array]:
        """Return ``rows`` of the training set by the parts of a batch, as :meth:`test_batch`."""
        others = {name: other.train[rows] for name, other in self.others.items()}
        return {"x": self.read(self.train_x[rows]), **others, "y": self.train_y[rows]}

    def test_batch(self, rows: Array) -> dict[str, Array]:
        """Return ``rows`` of the test set by the parts of a batch: ``x`` as a model reads it, other inputs, ``y``."""
        others = {name: other.test[rows] for name, other in self.others.items()}
        return {"x": self.read(self.test_x[rows]), **others, "y": self.test_y[rows]}

    def unit(self) -> Dataset:
        """Return the dataset with pixels in [0, 1], not centred (``data.scale = "unit"``), and a name that says so."""
        return replace(self, name=f"{self.name}, pixels in [0, 1]", scale=1.0 / self.top, shift=0.0)

    def limited(self, train: int = 0, test: int = 0, seed: int = 0) -> Dataset:
        """Return at most ``train`` and ``test`` samples, drawn by ``seed`` (0: all of them), with a name that says so."""
        rng = np.random.default_rng(seed)
        rows, held_out = some(rng, len(self.train_y), train), some(rng, len(self.test_y), test)
        if len(rows) == len(self.train_y) and len(held_out) == len(self.test_y):
            return self
        return replace(
            self,
            name=limited_name(self.name, len(rows), len(held_out)),
            train_x=self.train_x[rows],
            train_y=self.train_y[rows],
            test_x=self.test_x[held_out],
            test_y=self.test_y[held_out],
            others={
                name: OtherInput(each.train[rows], each.test[held_out], each.below)
                for name, each in self.others.items()
            },
            owners=None if self.owners is None else self.owners[rows],
            test_owners=None if self.test_owners is None else self.test_owners[held_out],
        )

    def write_device(self, path: Path, rows: Array) -> None:
        """Write the training samples ``rows`` as a device's file."""
        others = {name: each.train[rows] for name, each in self.others.items()}
        write_client(path, self.train_x[rows], self.train_y[rows], **others)


def limited_name(name: str, train: int, test: int) -> str:
    """Return the name of a part of the data ``name``."""
    return f"{name}, {train:,} train and {test:,} test samples"


def some(rng: np.random.Generator, available: int, wanted: int) -> Array:
    """Return ``wanted`` random positions among ``available`` ones, ascending; all of them for 0."""
    if wanted == 0 or wanted >= available:
        return np.arange(available)
    return np.sort(rng.permutation(available)[:wanted])


def write_client(path: Path, x: Array, y: Array, **others: Array) -> None:
    """Write a device's file, an npz, completely or not at all.

    It contains ``x`` (n, ...), ``y`` (n, ...), integers as int64, and the other inputs of a model by name.
    """
    if len(x) != len(y) or len(y) == 0:
        raise DataError(
            f"{path}: a device needs as many samples as labels and at least one, found {len(x)}, {len(y)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, x=x, y=y if y.dtype.kind == "f" else y.astype(np.int64), **others)  # type: ignore[arg-type]


def _labels(y: Array, name: str) -> Array:
    if y.dtype.kind not in "biuf":
        raise DataError(f"{name}: labels are numbers, found {y.dtype} {y.shape}; give each class a number")
    if y.dtype.kind != "f":
        return y.astype(np.int64)
    floats = y.astype(np.float32)
    _check_finite(f"{name}: labels", floats)
    return floats


def _check_finite(what: str, rows: Array) -> None:
    """Raise DataError if a row has a value that is NaN or infinite, or beyond float32."""
    if len(wrong := np.flatnonzero(~np.isfinite(rows).all(axis=tuple(range(1, rows.ndim))))):
        raise DataError(
            f"{what}: expected finite numbers, found NaN or infinite ones in {len(wrong)} rows, first in row {wrong[0]}; "
            "repair or remove these rows (rows count from 0)",
            row=int(wrong[0]),
        )


def _classes(labels: Sequence[Array], ignored: int | None) -> int:
    """Return the largest label that counts plus one; 1 for labels that are no integers."""
    counted = [_counted(each, ignored) for each in labels if each.dtype == np.int64]
    return 1 + max((int(each.max()) for each in counted if each.size), default=0)


def _counted(labels: Array, ignored: int | None) -> Array:
    return labels if ignored is None else labels[labels != ignored]


def _check_range(what: str, arrays: Sequence[Array], below: int, counted: str) -> None:
    found = [(int(each.min()), int(each.max())) for each in arrays if each.size]
    least, most = min((low for low, _ in found), default=0), max((high for _, high in found), default=0)
    if not 0 <= least <= most < below:
        raise DataError(
            f"{what} go from {least} to {most}, and {below} {counted} are 0 to {below - 1}", below=below
        )


def _read(path: str | Path) -> dict[str, Array]:
    """Return the arrays of an npz; test arrays alone also serve as training arrays."""
    remedy = "`Dataset.save` writes one; a folder of photos for each class is read too"
    parts = read_npz(Path(path), remedy)
    if not parts.keys() & {"train_x", "train_y"} and parts.keys() >= {"test_x", "test_y"}:
        parts |= {"train_x": parts["test_x"][:0], "train_y": parts["test_y"][:0]}
    return parts


def _reader(parts: Mapping[str, Array], path: str | Path) -> Reader | None:
    if "reader" not in parts:
        return None
    try:
        reader: Reader = msgspec.json.decode(str(parts["reader"]), type=Reader)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: the reader cannot be read: {error}", path=str(path)) from error
    return reader


def _others(parts: Mapping[str, Array], train: int) -> dict[str, OtherInput]:
    """Return the inputs beside x in a file, which has at least their test rows."""
    names = [key.removeprefix("test.") for key in parts if key.startswith("test.")]
    return {
        name: OtherInput(
            parts.get(f"train.{name}", parts[f"test.{name}"][:train]),
            parts[f"test.{name}"],
            int(parts.get(f"below.{name}", 0)),
        )
        for name in names
    }
