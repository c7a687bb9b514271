"""Shared code of all file readers: settings, labels, and samples that are decoded on access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import Reader
from edgefl.wire.records import BadRow, class_number, join_names, parse_number
from edgefl.wire.tensors import Array
from edgefl_device.data.problems import Problems
from edgefl_device.data.samples import BundleParts, DecodedRows, LabelSpec, SampleRows


@dataclass(frozen=True)
class FileEntry:
    """A data file, and the name of its class folder ("" if it is in none)."""

    path: Path
    folder: str = ""


@dataclass(frozen=True, eq=False)
class ReadSamples:
    """Samples ``x``, labels ``y`` and other inputs by name, all with the same number of rows."""

    x: SampleRows
    y: Array
    others: Mapping[str, Array] = field(default_factory=dict)


@dataclass
class ReadContext:
    """Settings and helpers for reading the files of one source.

    Attributes:
        source: Name of the source, for errors.
        spec: Samples that the model takes.
        label: Labels that the model takes.
        parts: Blobs and graphs of the bundle that decode files.
        problems: Receives bad rows.
        reader: The bundle's settings for these files; None for npy and plain images.
    """

    source: str
    spec: DataSpec
    label: LabelSpec
    parts: BundleParts
    problems: Problems
    reader: Reader | None = None

    def check_shape(self, *shapes: tuple[int, ...]) -> None:
        """Check that the model takes samples of one of the ``shapes`` that the reader produces.

        Raises:
            DataError: The model takes another shape.
        """
        if self.spec.shape not in shapes:
            raise DataError(
                f"the bundle's model takes samples of shape {self.spec.shape}, and its reader makes "
                f"{' or '.join(map(str, shapes))}: the federation's `reader` does not go with its data",
                found=shapes,
                expected=self.spec.shape,
            )

    def number(self, value: object) -> float:
        """Return the label in a file as a class number, or as a float if labels are floats.

        Raises:
            BadRow: ``value`` is empty, or no label that the model takes.
        """
        if value is None or value == "":
            raise BadRow("the label is empty")
        if self.label.floats:
            return parse_number(value, "the label", self.label.dtype)
        return class_number(value, self.spec.names, self.spec.classes)

    def is_label(self, text: str) -> bool:
        """Return True if ``text`` is a label as :meth:`number` reads it."""
        try:
            self.number(text)
        except BadRow:
            return False
        return True

    def by_folder(self, entries: Sequence[FileEntry]) -> list[tuple[FileEntry, int]]:
        """Return (file, class number of its folder) for each file. Files in folders of unknown classes are left out and
        added to ``problems``.

        Raises:
            DataError: A file is in no class folder, the model takes other labels than one class a sample, or a folder's
                class is unknown and bad rows are refused.
        """
        if self.label.shape or self.label.floats:
            raise DataError(
                f"{self.source}: a folder gives its files one class, the model takes labels {self.label.dtype} "
                f"{self.label.shape} of each sample: give arrays (.npz)"
            )
        if outside := [each.path.name for each in entries if not each.folder]:
            raise DataError(
                f"{self.source} has {len(outside)} files that are in no folder, such as {outside[0]}: put the files of each "
                f"class in a folder that is called as the class is ({join_names(self.spec.names) or 'its number'})"
            )
        numbers: dict[str, int | None] = {}
        for folder in dict.fromkeys(each.folder for each in entries):
            try:
                numbers[folder] = class_number(folder, self.spec.names, self.spec.classes)
            except BadRow as bad:
                count = sum(each.folder == folder for each in entries)
                self.problems.add(f"{self.source}/{folder}", str(bad), rows=count)
        labelled = ((each, numbers.get(each.folder)) for each in entries)
        return [(each, number) for each, number in labelled if number is not None]

    def decoded(
        self,
        entries: Sequence[tuple[FileEntry, int]],
        decode: Callable[[Path], Array],
        then: Callable[[Array], Array] = np.asarray,
    ) -> ReadSamples:
        """Return samples that are decoded again on each access, so that memory holds one batch.

        Each file is decoded once now, to find broken files before a round begins. They are left out and added to
        ``problems``. A file that breaks later raises DataError on access.

        Args:
            entries: Files with their class numbers, which become the labels.
            decode: Function from a path to an array; raises BadRow.
            then: Function from that array to a sample, applied on access.

        Raises:
            DataError: A file is broken and bad rows are refused.
        """
        good: list[tuple[Path, int]] = []
        for entry, number in entries:
            try:
                decode(entry.path)
            except BadRow as bad:
                self.problems.add(str(entry.path), str(bad))
            else:
                good.append((entry.path, number))

        def again(path: Path) -> Array:
            try:
                return then(decode(path))
            except BadRow as bad:
                raise DataError(
                    f"{path} {bad}; it could be read before: start the device again, which then reads its files anew",
                    path=str(path),
                ) from bad

        rows = DecodedRows([path for path, _ in good], again)
        return ReadSamples(rows, np.array([number for _, number in good], np.int64))
