"""Local data as arrays: checked against the manifest, and the batches drawn from them.

Where they come from: :mod:`edgefl_device.data.sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator, Philox, SeedSequence  # numpy itself would load them in the first round

from edgefl.errors import BundleError, DataError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import DataSpec, Draws, Input, Manifest
from edgefl.wire.tensors import Array
from edgefl_device.config import Policy
from edgefl_device.data.problems import (
    Problems,
    bad_values,
    blocks,
    check_below,
    check_finite,
    check_range,
    converted,
)


class SampleRows(Protocol):
    """Samples by row number: an array, or a substitute for one that memory could not hold."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: Any, /) -> Any:
        """Return the samples at these row numbers (an array) as an array; for a slice, those rows as the same type."""


@dataclass(frozen=True, eq=False)
class DecodedRows:
    """Samples that are decoded from ``items`` on each access."""

    items: Sequence[Any]
    decode: Callable[[Any], Array]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any, /) -> Any:
        if isinstance(at, slice):
            return DecodedRows(self.items[at], self.decode)
        return np.stack([self.decode(self.items[row]) for row in np.asarray(at).tolist()])


class BundleParts(Protocol):
    """Parts of a bundle that read files: its blobs, and its graphs that make samples of file contents."""

    def blob(self, ref: BlobRef) -> bytes: ...

    def features(self, name: str) -> Callable[[Array], Array]:
        """Return graph ``name`` as a function of one array."""


class NoBundle:
    """Parts of data that are read without a bundle."""

    def blob(self, ref: BlobRef) -> bytes:
        """Raise BundleError."""
        raise BundleError(
            f"the data are read by blob {ref.sha256[:12]}, and there is no bundle to take it from"
        )

    def features(self, name: str) -> Callable[[Array], Array]:
        """Raise BundleError."""
        raise BundleError(f"the data are read by graph {name!r}, and there is no bundle to take it from")


NO_BUNDLE = NoBundle()

_ORDER = 1 << 21  # of batches, beside the streams of rows


@dataclass(frozen=True)
class LabelSpec:
    """One sample's label: integers are class numbers (one, or one per token), floats are answers or targets."""

    shape: tuple[int, ...] = ()
    dtype: str = "int64"
    # A number besides the classes and counts for nothing, such as -100.
    ignored: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> LabelSpec:
        """Return the labels that the bundle's graphs read; one class number if none reads any."""
        graphs = (*(phase.graph for phase in manifest.phases), manifest.evaluate)
        for port in (port for name in graphs for port in manifest.graph(name).inputs_of("batch")):
            if port.label.endswith(".y"):
                return cls(port.shape[1:], port.dtype, port.ignored)
        return cls()

    def fitted(self, y: Array, classes: int, source: str) -> Array:
        """Return ``y`` (n, *shape), or (n,) if a label is (1,): floats in this dtype, whole numbers in their own;
        DataError says what differs."""
        y = self.shaped(y, classes, source)
        if self.floats:
            if not np.isfinite(y).all():
                raise DataError(f"{source}: labels are not finite, the model takes finite numbers")
            return y
        whole = np.issubdtype(y.dtype, np.integer)
        if not whole or not all(
            part.min() >= 0 and part.max() < classes for part in self.counted(y) if part.size
        ):
            beside = "" if self.ignored is None else f", or {self.ignored} for none"
            raise DataError(
                f"{source}: labels are {y.dtype} from {y.min()} to {y.max()}, "
                f"the model takes integers from 0 to {classes - 1}{beside}",
                classes=classes,
            )
        return y.astype(np.int64) if y.dtype == np.uint64 else y  # beside signed numbers those become floats

    @property
    def floats(self) -> bool:
        """True if labels are numbers, and no classes."""
        return bool(np.issubdtype(self.dtype, np.floating))

    def shaped(self, y: Array, classes: int, source: str) -> Array:
        """Return ``y`` (n, *shape), numbers in this dtype, classes in their own; DataError for another shape, or for no
        numbers."""
        if self.shape == (1,) and y.ndim == 1:
            y = y[:, None]
        if y.shape[1:] != self.shape:
            wanted = f"{self.dtype} {self.shape}" if self.shape else "one number"
            raise DataError(
                f"{source}: labels have shape {y.shape}, the model takes {wanted} per sample",
                found=y.shape,
                expected=self.shape,
            )
        if y.dtype.kind not in "biuf":
            wanted = "finite numbers" if self.floats else f"integers from 0 to {classes - 1}"
            raise DataError(
                f"{source}: labels are {y.dtype}, the model takes {wanted}: number the classes as the federation does",
                found=str(y.dtype),
            )
        return converted(y, self.dtype) if self.floats else y

    def counted(self, y: Array) -> Iterator[Array]:
        """Yield the labels that count, flat, some at a time: all but the ``ignored``."""
        for rows in blocks(y):
            yield rows.reshape(-1) if self.ignored is None else rows[rows != self.ignored]


ONE_CLASS = LabelSpec()


class LocalSource(Protocol):
    """The samples of a device. ``len`` is what is known of their number before a bundle says how they are read."""

    @property
    def source(self) -> str: ...

    def __len__(self) -> int: ...

    def fitted(
        self, spec: DataSpec, label: LabelSpec = ONE_CLASS, parts: BundleParts = NO_BUNDLE
    ) -> FittedData:
        """Return the data as the manifest reads them; DataError names the difference."""


@dataclass(frozen=True)
class LocalData:
    """Samples x, shape (n, *sample), labels y, shape (n, *label), and what else there is of each sample by name, as they
    lie in the file. ``policy``: what becomes of rows with values that do not fit."""

    x: Array
    y: Array
    source: str
    others: Mapping[str, Array] = field(default_factory=dict)
    policy: Policy = "refuse"

    def __len__(self) -> int:
        return len(self.y)

    def check(self) -> None:
        """Raise DataError for single values, for different numbers of samples and labels, and for NaN or infinite values
        where bad rows are refused."""
        if self.x.ndim == 0 or self.y.ndim == 0:
            raise DataError(f"{self.source} should hold arrays of samples and labels, found single values")
        if len(self.x) != len(self.y) or len(self.y) == 0:
            raise DataError(
                f"{self.source} has {len(self.x)} samples and {len(self.y)} labels: it needs as many, and at least one"
            )
        if self.policy == "refuse":
            for name, array in {"x": self.x, "y": self.y}.items():
                check_finite(name, array, self.source)

    def fitted(
        self, spec: DataSpec, label: LabelSpec = ONE_CLASS, parts: BundleParts = NO_BUNDLE
    ) -> FittedData:
        """Return the data as the manifest reads them; DataError names the difference."""
        x = self._shaped(spec)
        others = {each.name: self._other(each) for each in spec.others}
        if self.policy == "skip":
            return self._without_bad_rows(x, others, spec, label)
        if np.issubdtype(spec.dtype, np.integer):
            check_below("samples", x, spec.below, self.source)
        for each in spec.others:
            if np.issubdtype(each.dtype, np.floating):
                check_finite(each.name, others[each.name], self.source)
            else:
                check_below(each.name, others[each.name], each.below, self.source)
        read = {each.name: others[each.name].astype(each.dtype, copy=False) for each in spec.others}
        y = label.fitted(self.y, spec.classes, self.source)
        return FittedData(x, y, spec, read, label, unread=self._unread(spec))

    def _unread(self, spec: DataSpec) -> tuple[str, ...]:
        wanted = {each.name for each in spec.others}
        return tuple(f"array {name!r}" for name in self.others if name not in wanted)

    def _without_bad_rows(
        self, x: Array, others: Mapping[str, Array], spec: DataSpec, label: LabelSpec
    ) -> FittedData:
        tokens = np.issubdtype(spec.dtype, np.integer)
        below = {each.name: each.below for each in spec.others} | {"x": spec.below if tokens else 0}
        below |= {"y": 0 if label.floats else spec.classes}
        y = label.shaped(self.y, spec.classes, self.source)
        y = y if label.ignored is None else np.where(y == label.ignored, 0, y)
        skipped, good = Problems("skip"), np.ones(len(y), bool)
        for row, text in bad_values({**others, "x": x, "y": y}, below):
            good[row] = False
            skipped.add(f"{self.source}, row {row}", text)
        kept = np.flatnonzero(good)
        check_some(len(kept), skipped, self.source)
        rows: SampleRows = DecodedRows(kept.tolist(), lambda row: np.asarray(x[row])) if skipped.count else x
        labels = label.fitted(self.y[kept], spec.classes, self.source)
        beside = {each.name: others[each.name][kept].astype(each.dtype, copy=False) for each in spec.others}
        return FittedData(rows, labels, spec, beside, label, skipped, self._unread(spec))

    def _shaped(self, spec: DataSpec) -> Array:
        """Return x in the shape that the model takes, and of a type that it can read."""
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
                f"{self.source}: samples are {x.dtype}, the model takes {spec.dtype} or integers to be scaled: "
                f"convert them (astype({spec.dtype!r}))",
                found=str(x.dtype),
                expected=spec.dtype,
            )
        if np.issubdtype(spec.dtype, np.integer) and not spec.below:
            check_range("samples", x, spec.dtype, self.source)
        return x

    def _other(self, wanted: Input) -> Array:
        """Return the array of an input besides x: floats in its dtype, whole numbers in their own, which it holds."""
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
        if floats:
            return converted(found, wanted.dtype)
        if not wanted.below and wanted.dtype != "bool":
            check_range(wanted.name, found, wanted.dtype, self.source)
        return found


@dataclass(frozen=True)
class FittedData:
    """Data that fits the model. Integer samples are scaled when a batch is drawn, not before. ``skipped``: the rows that
    were left out. ``unread``: what else there is, and the model does not read."""

    x: SampleRows
    y: Array
    spec: DataSpec
    others: Mapping[str, Array] = field(default_factory=dict)
    label: LabelSpec = ONE_CLASS
    skipped: Problems = field(default_factory=Problems)
    unread: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, indices: Array) -> Array:
        """Return a batch of spec.dtype, shape (len(indices), *spec.shape)."""
        return as_read(self.x[indices], self.spec)

    def labels(self, indices: Array) -> Array:
        return self.y[indices].astype(self.label.dtype, copy=False)

    def other(self, name: str, indices: Array) -> Array:
        """Return rows of the input ``name``."""
        wanted = next(each.dtype for each in self.spec.others if each.name == name)
        return self.others[name][indices].astype(wanted, copy=False)

    @cached_property
    def lengths(self) -> Array:
        """Tokens of each sample up to its last one that is no padding (token 0), int64 (n,); all, where x are no tokens."""
        whole = self.spec.shape[0] if self.spec.shape else 1
        if not self.spec.below or len(self.spec.shape) != 1:
            return np.full(len(self), whole, np.int64)
        found = [np.zeros(0, np.int64)]
        for rows in blocks(np.arange(len(self)), whole):
            there = np.asarray(self.x[rows]) != 0
            found.append(np.where(there.any(axis=1), whole - there[:, ::-1].argmax(axis=1), 1))
        return np.concatenate(found)

    def facts(self) -> dict[str, Array]:
        """Return the facts about all samples that an algorithm may read, by the label of the ``data`` port.

        ``class_counts``: int64 (classes,), how often each class occurs among the labels; absent where they are no classes.
        """
        if not np.issubdtype(self.y.dtype, np.integer):
            return {}
        counts = np.zeros(self.spec.classes, np.int64)
        for part in self.label.counted(self.y):
            counts += np.bincount(part, minlength=self.spec.classes)
        return {"class_counts": counts}

    def first(self, samples: int) -> FittedData:
        """Return at most ``samples`` rows; all of them for 0."""
        if not samples:
            return self
        others = {name: rows[:samples] for name, rows in self.others.items()}
        return replace(self, x=self.x[:samples], y=self.y[:samples], others=others)


def as_read(samples: Array, spec: DataSpec) -> Array:
    """Return samples as the model reads them: integers are scaled if it reads floats."""
    wanted = np.dtype(spec.dtype)
    if samples.dtype == wanted or np.issubdtype(wanted, np.integer):
        return samples.astype(wanted, copy=False)
    floats = samples.astype(wanted)
    floats *= spec.scale
    floats += spec.shift
    return floats


def check_some(rows: int, skipped: Problems, source: str) -> None:
    """Raise DataError if no row is left."""
    if not rows:
        first = f": {skipped}" if skipped.count else ""
        raise DataError(f"{source} has no sample that can be used{first}", problems=skipped)


@dataclass(frozen=True)
class Batches:
    """Mini-batches of a round, ``batch`` rows each; with replacement if data are short.

    "walk": shuffled once per stream, walked through, wrapped around. "draw": each on its own, without replacement inside.
    "length": shuffled, then ordered by ``buckets`` (which of the lengths that there are graphs for each sample needs), cut
    into batches, and these taken in random order: every sample once per epoch, and short ones among themselves.
    A pure function of (seed, stream, step), so a round can be taken up at any step. What is shuffled once is kept.
    """

    seed: int
    samples: int
    batch: int
    draws: Draws = "walk"
    buckets: Array | None = None
    _orders: dict[int, Array] = field(default_factory=dict, repr=False, compare=False)

    def indices(self, stream: int, step: int) -> Array:
        """Return the row numbers, int64, shape (batch,), of batch ``stream`` of local step ``step``."""
        if self.samples < self.batch:
            return _generator(self.seed, stream, step).integers(0, self.samples, self.batch)
        if self.draws == "draw":
            return _generator(self.seed, stream, step).choice(self.samples, self.batch, replace=False)
        order, place = self._order(stream), step
        if self.draws == "length" and self.buckets is not None:
            count = -(-self.samples // self.batch)
            place = int(_generator(self.seed, stream, _ORDER).permutation(count)[step % count])
        return np.take(order, np.arange(place * self.batch, (place + 1) * self.batch), mode="wrap")

    def _order(self, stream: int) -> Array:
        if stream not in self._orders:
            order = _generator(self.seed, stream).permutation(self.samples)
            if self.draws == "length" and self.buckets is not None:
                order = order[np.argsort(self.buckets[order], kind="stable")]
            self._orders[stream] = order
        return self._orders[stream]


@dataclass(frozen=True)
class Pass:
    """One pass over the data in their order, ``batch`` rows at a time; the last batch is filled from the first rows."""

    samples: int
    batch: int

    def indices(self, step: int) -> Array:
        """Return row numbers, int64, shape (batch,)."""
        return self._rows(step) % self.samples

    def mask(self, step: int) -> Array:
        """Return float32 (batch,): 1 for rows of the pass, 0 for rows that only fill the batch."""
        return (self._rows(step) < self.samples).astype(np.float32)

    def _rows(self, step: int) -> Array:
        return np.arange(step * self.batch, (step + 1) * self.batch)


def noise(seed: int, step: int, port: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Return uniform [0, 1) values for one noise input of one step."""
    numbers = _generator(seed, 1 << 20, step, port).random(shape, dtype=np.float32)
    return np.asarray(numbers, dtype)  # of shape () numpy draws a bare number


def _generator(*key: int) -> Generator:
    return Generator(Philox(SeedSequence(key)))
