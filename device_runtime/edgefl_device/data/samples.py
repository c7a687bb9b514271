"""Local data as arrays: their check against the manifest, and the batches of a round.

:mod:`edgefl_device.data.sources` loads them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary
from zlib import crc32

import msgspec
import numpy as np
from numpy.random import Generator, Philox, SeedSequence  # numpy itself would load them in the first round

from edgefl.errors import BundleError, DataError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import DataSpec, Draws, Input, Manifest
from edgefl.wire.bundle.readers import SoundSpec
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
    """Interface of samples that are read by row number: an array, or rows that are decoded on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: Any, /) -> Any:
        """Return the samples at the row numbers ``at`` as an array. For a slice, return an object of the same type."""


@dataclass(frozen=True, eq=False)
class DecodedRows:
    """Samples that ``decode`` computes from ``items`` on each access."""

    items: Sequence[Any]
    decode: Callable[[Any], Array]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any, /) -> Any:
        if isinstance(at, slice):
            return DecodedRows(self.items[at], self.decode)
        return np.stack([self.decode(self.items[row]) for row in np.asarray(at).tolist()])


class BundleParts(Protocol):
    """Interface to the parts of a bundle that decode files: its blobs and its feature graphs."""

    def blob(self, ref: BlobRef) -> bytes: ...

    def features(self, name: str) -> Callable[[Array], Array]:
        """Return graph ``name`` as a function of one array."""


class NoBundle:
    """Implementation of :class:`BundleParts` where there is no bundle; every access raises BundleError."""

    def blob(self, ref: BlobRef) -> bytes:
        """Raise BundleError, because the data need a blob and there is no bundle."""
        raise BundleError(
            f"the data are read by blob {ref.sha256[:12]}, and there is no bundle to take it from"
        )

    def features(self, name: str) -> Callable[[Array], Array]:
        """Raise BundleError, because the data need a feature graph and there is no bundle."""
        raise BundleError(f"the data are read by graph {name!r}, and there is no bundle to take it from")


NO_BUNDLE = NoBundle()

_ORDER = 1 << 21  # of batches, beside the streams of rows


@dataclass(frozen=True)
class LabelSpec:
    """Shape and dtype of one sample's label. Integers are class numbers or tokens, floats are regression targets.

    ``ignored`` is the class number that does not count in the loss; None if all count.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "int64"
    # A number besides the classes and counts for nothing, such as -100.
    ignored: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> LabelSpec:
        """Return the labels that the graphs of a bundle read; the default, one class number, if no graph reads labels."""
        graphs = (*(phase.graph for phase in manifest.phases), manifest.evaluate)
        for port in (port for name in graphs for port in manifest.graph(name).inputs_of("batch")):
            if port.label.endswith(".y"):
                return cls(port.shape[1:], port.dtype, port.ignored)
        return cls()

    def fitted(self, y: Array, classes: int, source: str) -> Array:
        """Return labels in the shape that the model takes; floats in its label dtype, whole numbers in the dtype of ``y``.

        Args:
            y: Labels, shape (n, *label).
            classes: Number of classes.
            source: Name of the data, for errors.

        Raises:
            DataError: The shape differs, a float is not finite, or a class is not from 0 to ``classes`` - 1.
        """
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
        """True if labels are regression targets, not classes."""
        return bool(np.issubdtype(self.dtype, np.floating))

    def shaped(self, y: Array, classes: int, source: str) -> Array:
        """Return labels in the shape that the model takes, without checking their values. ``classes`` and ``source``
        are for errors.

        Raises:
            DataError: The shape differs, or the labels are not numbers.
        """
        if self.shape == (1,) and y.ndim == 1:
            y = y[:, None]
        if y.shape[1:] != self.shape:
            wanted = f"{self.dtype} {self.shape}" if self.shape else "one number"
            raise DataError(
                f"{source}: labels have shape {y.shape}, the model takes {wanted} per sample",
                found=y.shape,
                expected=self.shape,
                array="y",
            )
        if y.dtype.kind not in "biuf":
            wanted = "finite numbers" if self.floats else f"integers from 0 to {classes - 1}"
            raise DataError(
                f"{source}: labels are {y.dtype}, the model takes {wanted}: number the classes as the federation does",
                found=str(y.dtype),
            )
        return converted(y, self.dtype) if self.floats else y

    def counted(self, y: Array) -> Iterator[Array]:
        """Yield the labels that count in the loss (all but ``ignored``) as flat blocks."""
        for rows in blocks(y):
            yield rows.reshape(-1) if self.ignored is None else rows[rows != self.ignored]


ONE_CLASS = LabelSpec()


class LocalSource(Protocol):
    """Interface of a device's data. ``len`` is the number of samples as far as it is known without a bundle."""

    @property
    def source(self) -> str: ...

    def __len__(self) -> int: ...

    def fitted(
        self, spec: DataSpec, label: LabelSpec = ONE_CLASS, parts: BundleParts = NO_BUNDLE
    ) -> FittedData:
        """Return the data as the model reads them.

        Args:
            spec: The manifest's description of samples and further inputs.
            label: Shape and dtype of the labels that its graphs read.
            parts: Blobs and graphs of the bundle that decode files.

        Raises:
            DataError: The data do not fit the model; the text names the difference.
        """

    def state(self) -> Hashable:
        """Return a value that changes when rows of the data are added, removed or replaced.

        Computing it costs far less than reading all rows for the model.
        """


@dataclass(frozen=True, eq=False)
class LocalData:
    """Data in arrays as they are stored.

    Attributes:
        x: Samples, shape (n, *sample).
        y: Labels, shape (n, *label).
        source: Name of the data, for errors.
        others: Further arrays by name, n rows each.
        policy: ``refuse`` raises DataError for rows with bad values, ``skip`` drops them.
    """

    x: Array
    y: Array
    source: str
    others: Mapping[str, Array] = field(default_factory=dict)
    policy: Policy = "refuse"

    def __len__(self) -> int:
        return len(self.y)

    def check(self) -> None:
        """Check the arrays as far as it is possible without a bundle.

        Raises:
            DataError: Samples or labels have no row axis, are empty or differ in number; or, with policy ``refuse``,
                they hold NaN or infinite values.
        """
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
        """Return the data as the manifest's ``spec`` and ``label`` describe them, without bad rows if the policy is
        ``skip``.

        ``parts`` are not used.

        Raises:
            DataError: The data do not fit the model, or no row is left; the text names the difference.
        """
        x = self._reshape(spec)
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

    def state(self) -> Hashable:
        """Return a checksum of each array in memory, and size and time of each mapped file."""
        arrays = {**self.others, "x": self.x, "y": self.y}
        return tuple((name, array.shape, array.dtype.str, _content(array)) for name, array in arrays.items())

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

    def _reshape(self, spec: DataSpec) -> Array:
        """Return ``x`` in the model's shape, with a channel axis added if only that is missing. DataError if it does not
        fit.
        """
        x = self.x
        if x.shape[1:] != spec.shape and (x.shape[0], *spec.shape) == (x.shape[0], 1, *x.shape[1:]):
            x = x[:, None]  # grey images are often stored without their single channel
        if x.shape[1:] != spec.shape:
            raise DataError(
                f"{self.source}: samples have shape {x.shape[1:]}, the model takes {spec.shape}: "
                "convert the data, or join a federation that trains on it",
                found=x.shape[1:],
                expected=spec.shape,
                array="x",
            )
        if x.dtype != np.dtype(spec.dtype) and not np.issubdtype(x.dtype, np.integer):
            raise DataError(
                f"{self.source}: samples are {x.dtype}, the model takes {spec.dtype} or integers to be scaled: "
                f"convert them (astype({spec.dtype!r}))",
                found=str(x.dtype),
                expected=spec.dtype,
                array="x",
            )
        if np.issubdtype(spec.dtype, np.integer) and not spec.below:
            check_range("samples", x, spec.dtype, self.source)
        return x

    def _other(self, wanted: Input) -> Array:
        """Return the array of the further input ``wanted``: floats in the model's dtype, whole numbers in their own.
        DataError if it is missing or does not fit.
        """
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


def _content(array: Array) -> Hashable:
    """Return the state of the file that ``array`` maps read-only, or a checksum of numbers in memory that others may
    write to.
    """
    owner: object = array
    while isinstance(owner, np.ndarray) and not owner.flags.writeable:
        owner = owner.base
    if owner is None or isinstance(owner, bytes):  # read from a file: nobody writes to it
        return None
    if isinstance(array, np.memmap) and array.mode == "r" and array.filename is not None:
        return files_state([Path(array.filename)])
    checksum = 0
    if array.dtype.kind in "biuf":  # no model reads others
        for rows in blocks(np.atleast_1d(array)):
            checksum = crc32(np.ascontiguousarray(rows).data, checksum)
    return checksum


def files_state(paths: Iterable[Path]) -> bytes:
    """Return a digest of inode, size and time of the last change of files, in their order. A missing file counts as
    empty.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            digest.update(bytes(24))
        else:
            digest.update(struct.pack("<QQq", found.st_ino, found.st_size, found.st_mtime_ns))
    return digest.digest()


@dataclass(frozen=True)
class FittedData:
    """Data that fit the model; batches are read by row number.

    Attributes:
        x: Samples. Integers are scaled when a batch is read, not before.
        y: Labels.
        spec: Samples that the model takes.
        others: Further inputs by name.
        label: Labels that the model takes.
        skipped: Rows that were left out.
        unread: Names of arrays that the model does not read.
    """

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
        """Return the samples at ``indices`` in the model's dtype, shape (len(indices), *spec.shape)."""
        return as_read(self.stored(indices), self.spec)

    def stored(self, indices: Array) -> Array:
        """Return the samples at ``indices`` as they are stored, before they are scaled."""
        return np.asarray(self.x[indices])

    def labels(self, indices: Array) -> Array:
        return self.y[indices].astype(self.label.dtype, copy=False)

    def other(self, name: str, indices: Array) -> Array:
        """Return the rows at ``indices`` of the further input ``name``, in the model's dtype."""
        wanted = next(each.dtype for each in self.spec.others if each.name == name)
        return self.others[name][indices].astype(wanted, copy=False)

    @cached_property
    def lengths(self) -> Array:
        """Length of each sample without trailing padding (token 0), int64 (n,); the full length if samples are not
        tokens.
        """
        whole = self.spec.shape[0] if self.spec.shape else 1
        if not self.spec.below or len(self.spec.shape) != 1:
            return np.full(len(self), whole, np.int64)
        found = [np.zeros(0, np.int64)]
        for rows in blocks(np.arange(len(self)), whole):
            there = self.stored(rows) != 0
            found.append(np.where(there.any(axis=1), whole - there[:, ::-1].argmax(axis=1), 1))
        return np.concatenate(found)

    def facts(self) -> dict[str, Array]:
        """Return facts about all samples that an algorithm may read, by name (the label of a graph input with role
        ``data``).

        ``class_counts``: int64 (classes,), how often each class occurs among the labels; absent if labels are not
        classes.
        """
        if not np.issubdtype(self.y.dtype, np.integer):
            return {}
        counts = np.zeros(self.spec.classes, np.int64)
        for part in self.label.counted(self.y):
            counts += np.bincount(part, minlength=self.spec.classes)
        return {"class_counts": counts}

    def first(self, samples: int) -> FittedData:
        """Return the first ``samples`` rows as data; all rows if it is 0."""
        if not samples:
            return self
        others = {name: rows[:samples] for name, rows in self.others.items()}
        return replace(self, x=self.x[:samples], y=self.y[:samples], others=others)


@dataclass(frozen=True)
class ChosenRows(FittedData):
    """Rows ``at`` (int64 row numbers) of larger data.

    Samples are not copied; only the labels ``y`` are selected at once.
    """

    at: Array = field(kw_only=True)

    @classmethod
    def of(cls, data: FittedData, at: Array) -> ChosenRows:
        """Return the rows ``at`` of ``data``."""
        return cls(data.x, data.y[at], data.spec, data.others, data.label, data.skipped, data.unread, at=at)

    def stored(self, indices: Array) -> Array:
        return super().stored(self.at[indices])

    def other(self, name: str, indices: Array) -> Array:
        return super().other(name, self.at[indices])

    def first(self, samples: int) -> FittedData:
        return replace(self, y=self.y[:samples], at=self.at[:samples]) if samples else self


_held_out: WeakKeyDictionary[LocalSource, tuple[str, Hashable, Array]] = WeakKeyDictionary()
"""Flags of the held-out rows of each source, with what describes rows and split, and the state of the data."""


def fit_rows(source: LocalSource, manifest: Manifest, parts: BundleParts = NO_BUNDLE) -> FittedData:
    """Return the rows of ``source`` that a bundle uses: all, or one part if its manifest divides rows into two parts.

    One part is for training and one is held out for evaluation. The division is computed once for equal data: a later
    round with the same source, spec and split hashes no row.

    Args:
        source: The device's data.
        manifest: The bundle's manifest.
        parts: Blobs and graphs of the bundle that decode files.

    Raises:
        DataError: The data do not fit the model, or no row is in the part.
    """
    split = manifest.split
    # Before the rows are read, so that the next round notices a change in between.
    state = None if split is msgspec.UNSET else source.state()
    data = source.fitted(manifest.data, LabelSpec.of(manifest), parts)
    if split is msgspec.UNSET:
        return data
    key = repr((manifest.data, data.label, _features_blob(manifest), split.share, split.seed))
    known = _held_out.get(source)
    if known is None or known[:2] != (key, state):
        known = _held_out[source] = key, state, is_held_out(data, split.share, split.seed)
    held_out = known[2]
    at = np.flatnonzero(held_out if split.part == "held-out" else ~held_out)
    if not len(at):
        raise DataError(
            f"{source.source}: none of its {len(data)} rows is in the {split.part} part, {split.share:.0%} of the rows are "
            "held out on average: it needs more rows",
            rows=len(data),
        )
    return ChosenRows.of(data, at)


def _features_blob(manifest: Manifest) -> str:
    """Return the SHA-256 of the graph that computes the samples of sound files; "" if there is none."""
    reader = manifest.data.reader
    name = reader.features if isinstance(reader, SoundSpec) else ""
    return manifest.graph(name).blob.sha256 if name else ""


def is_held_out(data: FittedData, share: float, seed: int) -> Array:
    """Return which rows a :class:`~edgefl.wire.bundle.manifest.Split` holds out, bool (n,).

    The hash of a row covers the seed and the row's inputs as the graphs read them, in the order of the manifest, but not
    its label: equal inputs are in the same part, whatever else the device has.

    Args:
        data: All local rows.
        share: Expected share of the held-out rows.
        seed: Seed of the division.
    """
    most, start = int(share * 2.0**64), seed.to_bytes(8, "little")
    held_out = np.zeros(len(data), bool)
    for indices in blocks(np.arange(len(data)), math.prod(data.spec.shape)):
        parts = [data.rows(indices), *(data.other(each.name, indices) for each in data.spec.others)]
        little = [
            np.ascontiguousarray(part).astype(part.dtype.newbyteorder("<"), copy=False) for part in parts
        ]
        for place, row in enumerate(indices.tolist()):
            drawn = hashlib.sha256(start + b"".join(part[place].tobytes() for part in little)).digest()
            held_out[row] = int.from_bytes(drawn[:8], "little") < most
    return held_out


def as_read(samples: Array, spec: DataSpec) -> Array:
    """Return samples in the model's dtype. Integers are scaled and shifted if the model reads floats."""
    wanted = np.dtype(spec.dtype)
    if samples.dtype == wanted or np.issubdtype(wanted, np.integer):
        return samples.astype(wanted, copy=False)
    floats = samples.astype(wanted)
    floats *= spec.scale
    floats += spec.shift
    return floats


def check_some(rows: int, skipped: Problems, source: str) -> None:
    """Check that at least one row is left.

    Args:
        rows: Number of usable rows.
        skipped: Rows that were left out.
        source: Name of the data, for the error.

    Raises:
        DataError: ``rows`` is 0; the text names the first skipped row.
    """
    if not rows:
        first = f": {skipped}" if skipped.count else ""
        raise DataError(f"{source} has no sample that can be used{first}", problems=skipped)


@dataclass(frozen=True)
class Batches:
    """Row numbers of a round's mini-batches: a pure function of (seed, stream, step), so that a round resumes at any
    step.

    Attributes:
        seed: Seed of the task.
        samples: Number of local rows; with fewer than ``batch``, rows are drawn with replacement.
        batch: Rows of a batch.
        draws: ``walk`` goes through data that are shuffled once per stream, over and over. ``draw`` draws each batch
            independently, without replacement within it. ``length`` sorts shuffled data by ``buckets``, cuts them into
            batches and takes these in random order: every sample once per epoch, with samples of similar length.
        buckets: For ``length``, the index of the shortest graph that each sample fits into.
    """

    seed: int
    samples: int
    batch: int
    draws: Draws = "walk"
    buckets: Array | None = None
    _orders: dict[int, Array] = field(default_factory=dict, repr=False, compare=False)

    def indices(self, stream: int, step: int) -> Array:
        """Return the row numbers of a batch, int64 (batch,).

        Args:
            stream: Number of the batch stream; an algorithm may read several in one step.
            step: Number of the local step.
        """
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
class DataPass:
    """Row numbers of one pass over the data in their order; the last batch is filled up with the first rows."""

    samples: int
    batch: int

    def indices(self, step: int) -> Array:
        """Return the row numbers of batch ``step``, int64 (batch,)."""
        return self._rows(step) % self.samples

    def mask(self, step: int) -> Array:
        """Return float32 (batch,): 1 for rows of the pass, 0 for rows that only fill the last batch."""
        return (self._rows(step) < self.samples).astype(np.float32)

    def _rows(self, step: int) -> Array:
        return np.arange(step * self.batch, (step + 1) * self.batch)


def noise(seed: int, step: int, port: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Return uniform values in [0, 1) for noise input number ``port`` of step ``step``, a pure function of the
    arguments.
    """
    numbers = _generator(seed, 1 << 20, step, port).random(shape, dtype=np.float32)
    return np.asarray(numbers, dtype)  # of shape () numpy draws a bare number


def _generator(*key: int) -> Generator:
    return Generator(Philox(SeedSequence(key)))
