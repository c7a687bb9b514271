"""A labelled image dataset as integers, and the files that devices read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgefl.system.files import replacing
from edgefl.wire.errors import DataError

Array = NDArray[Any]
_FACTS: dict[str, Callable[[Any], Any]] = {"scale": float, "shift": float, "top": int}


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Images stay uint8, (n, C, H, W); ``x * scale + shift`` makes the floats a model reads. Labels are int64, (n,).

    ``train_x`` and ``train_y`` are what devices train on, ``test_x`` and ``test_y`` what the server evaluates on.
    ``classes`` is the number of classes, ``top`` the largest value a pixel can have. ``name`` says exactly which data these
    are, for results and logs. DataError for arrays of another shape or dtype.
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

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x.ndim != 4 or x.dtype != np.uint8 or y.shape != (len(x),) or y.dtype != np.int64:
                remedy = "; make pixels whole numbers from 0 to 255" if x.dtype != np.uint8 else ""
                raise DataError(
                    f"{self.name}, {part}: expected images uint8 (n, C, H, W) and labels int64 (n,), found "
                    f"{x.dtype} {x.shape} and {y.dtype} {y.shape}{remedy}",
                    part=part,
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
    ) -> Self:
        """Images uint8, (n, C, H, W) or grey (n, H, W), and whole numbers (n,); normalised to mean 0 and deviation 1 over
        the training images. ``classes``: by default one more than the largest label. DataError for anything else.

        Without training samples, as on a server whose devices have their own, over the test images.
        """
        train_x, train_y, test_x, test_y = map(np.asarray, (train_x, train_y, test_x, test_y))
        x = [each[:, None] if each.ndim == 3 else each for each in (train_x, test_x)]
        y = [each.astype(np.int64) for each in (train_y, test_y) if np.issubdtype(each.dtype, np.integer)]
        if len(y) != 2 or len(test_x) == 0 or len(test_y) == 0:
            raise DataError(
                f"{name}: labels are whole numbers, and there is one sample at least to test on; found "
                f"{train_y.dtype} {train_y.shape} and {test_y.dtype} {test_y.shape}"
            )
        pixels = train_x if len(train_x) else test_x
        mean, deviation = float(pixels.mean()), float(pixels.std()) or 1.0
        count = 1 + max(int(labels.max()) for labels in y if len(labels)) if classes is None else classes
        top = max(int(each.max()) for each in x if len(each)) or 1
        return cls(name, x[0], y[0], x[1], y[1], 1.0 / deviation, -mean / deviation, count, top)

    def save(self, path: str | Path) -> Path:
        """Write an npz that :meth:`load` and a federation file's ``data.file`` read, whole or not at all. Gives the path."""
        parts = {
            "train_x": self.train_x,
            "train_y": self.train_y,
            "test_x": self.test_x,
            "test_y": self.test_y,
        }
        facts = {"scale": self.scale, "shift": self.shift, "classes": self.classes, "top": self.top}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as file:
            np.savez_compressed(file, **parts, **facts, name=np.array(self.name))  # type: ignore[arg-type]
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The dataset in an npz: the four arrays of :meth:`of`, or the two to test on alone; what else :meth:`save` wrote
        is taken as it is."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                parts = {key: archive[key] for key in archive.files}
            if not parts.keys() & {"train_x", "train_y"} and parts.keys() >= {"test_x", "test_y"}:
                parts |= {"train_x": parts["test_x"][:0], "train_y": parts["test_y"][:0]}
            arrays = [parts[key] for key in ("train_x", "train_y", "test_x", "test_y")]
        except FileNotFoundError as error:
            raise DataError(f"there is no file {path}; `Dataset.save` writes one", path=str(path)) from error
        except KeyError as error:
            raise DataError(
                f"{path} has no array {error}: it needs test_x and test_y, and train_x and train_y too where its samples "
                "are spread over devices",
                path=str(path),
            ) from error
        except Exception as error:  # numpy, zipfile and zlib raise unrelated types for damaged files
            raise DataError(f"{path} cannot be read as a dataset: {error}", path=str(path)) from error
        try:
            given = {key: kind(parts[key]) for key, kind in _FACTS.items() if key in parts}
            classes = int(parts["classes"]) if "classes" in parts else None
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{path}: scale, shift, classes and top are single numbers: {error}", path=str(path)
            ) from error
        made = cls.of(*arrays, name=str(parts.get("name", Path(path).name)), classes=classes)
        return replace(made, **given)

    def _check_alike(self) -> None:
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise DataError(
                f"{self.name}: training images have shape {self.train_x.shape[1:]}, test images {self.test_x.shape[1:]}: "
                "bring them to one"
            )
        labels = np.concatenate([self.train_y, self.test_y])
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
            raise DataError(
                f"{self.name}: labels go from {labels.min()} to {labels.max()}, and {self.classes} classes are 0 to "
                f"{self.classes - 1}",
                classes=self.classes,
            )

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, {len(self.train_y):,} train and {len(self.test_y):,} test images {self.shape}, "
            f"{self.classes} classes)"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image."""
        return tuple(self.train_x.shape[1:])

    def floats(self, x: Array) -> Array:
        """Images as float32, normalised: ``x * scale + shift``."""
        floats = x.astype(np.float32)
        floats *= self.scale
        floats += self.shift
        return floats

    def unit(self) -> Dataset:
        """The same with pixels in [0, 1] and not centred (``data.scale = "unit"``); the name says so."""
        return replace(self, name=f"{self.name}, pixels in [0, 1]", scale=1.0 / self.top, shift=0.0)

    def limited(self, train: int = 0, test: int = 0, seed: int = 0) -> Dataset:
        """At most ``train`` and ``test`` samples, drawn by ``seed`` (0: all of them); the name says so."""
        rng = np.random.default_rng(seed)
        rows, held_out = _some(rng, len(self.train_y), train), _some(rng, len(self.test_y), test)
        if len(rows) == len(self.train_y) and len(held_out) == len(self.test_y):
            return self
        return replace(
            self,
            name=f"{self.name}, {len(rows):,} train and {len(held_out):,} test samples",
            train_x=self.train_x[rows],
            train_y=self.train_y[rows],
            test_x=self.test_x[held_out],
            test_y=self.test_y[held_out],
        )


def _some(rng: np.random.Generator, available: int, wanted: int) -> Array:
    if wanted == 0 or wanted >= available:
        return np.arange(available)
    return np.sort(rng.permutation(available)[:wanted])


def write_client(path: Path, x: Array, y: Array) -> None:
    """Write a device's file: npz with ``x`` (n, ...) and ``y`` (n,) int64; whole or not at all."""
    if len(x) != len(y) or len(y) == 0:
        raise DataError(
            f"{path}: a device needs as many samples as labels and at least one, found {len(x)}, {len(y)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, x=x, y=y.astype(np.int64))
