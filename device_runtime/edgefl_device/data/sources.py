"""Sources of a device's samples: arrays, or files that a bundle's reader decodes.

::

data = load(Path("photos"), "skip")      # one folder per class; unreadable files are skipped fitted =
data.fitted(manifest.data, LabelSpec.of(manifest), parts) fitted.rows(np.arange(32)), fitted.skipped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import ImageSpec, Reader, SeriesSpec, SoundSpec, TableSpec, TextSpec
from edgefl.wire.images import SUFFIXES, UNREAD, check_library
from edgefl.wire.records import RECORDS
from edgefl_device.config import Policy, Source
from edgefl_device.data import arrays
from edgefl_device.data.media import read_images, read_sounds
from edgefl_device.data.problems import Problems
from edgefl_device.data.reading import FileEntry, ReadContext, ReadSamples
from edgefl_device.data.samples import (
    NO_BUNDLE,
    ONE_CLASS,
    BundleParts,
    FittedData,
    LabelSpec,
    LocalSource,
    check_some,
    files_state,
)
from edgefl_device.data.tables import read_series, read_tables
from edgefl_device.data.texts import read_texts

_PIECE = 1 << 20
_IMAGES = (*SUFFIXES, *UNREAD)
_LINES = (*RECORDS, ".tsv", ".txt")
_SUFFIXES = (".npy", ".wav", *_IMAGES, *_LINES)
_READ: dict[type, tuple[tuple[str, ...], Callable[[ReadContext, tuple[FileEntry, ...]], ReadSamples]]] = {
    type(None): ((".npy",), arrays.read_npy_files),
    ImageSpec: (_IMAGES, read_images),
    TableSpec: (RECORDS, read_tables),
    SeriesSpec: (RECORDS, read_series),
    SoundSpec: ((".wav",), read_sounds),
    TextSpec: (_LINES, read_texts),
}
"""What each reader reads (none: arrays): the endings of files, and how they become samples."""
_CONVERSIONS = {
    (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz"): "unpack it",
    (".json", ".ndjson"): "write one object a line, as .jsonl",
    (".parquet", ".feather", ".arrow", ".orc", ".xlsx", ".xls", ".ods", ".db", ".sqlite"): "write it as .csv",
    (".npy", ".pkl", ".pt", ".pth", ".h5", ".hdf5", ".mat", ".safetensors", ".tfrecord"): (
        "write its arrays by numpy.savez(file, x=samples, y=labels)"
    ),
    (".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".wma"): "write it as .wav",
}
"""What to do with files of kinds that are not read, by their endings."""


def load(data: Path | Source, policy: Policy = "refuse") -> LocalSource:
    """Return the samples and labels at a path, or of a function (:data:`edgefl_device.config.Source`).

    A path is an npz with x and y, a folder of x.npy and y.npy, a folder with a pair of idx files; or files that become
    samples as a bundle says (:mod:`edgefl.wire.bundle.readers`): a folder with one sub-folder of files per class (images,
    WAV, text, npy, series), or a file or a folder of CSV, JSON lines or text.

    Args:
        data: The path, or the function, which is called once.
        policy: ``refuse`` raises DataError for rows that cannot be used, ``skip`` leaves them out.

    Raises:
        DataError: ``data`` is none of these or is damaged, or a value of an array is NaN or infinite and bad rows are
            refused.
        ConfigError: The files are images, and Pillow is not installed.
    """
    if callable(data):
        found = arrays.load_function(data, policy)
        found.check()
        return found
    try:
        found_or_none = arrays.load(data, policy)
        files = _files(data, policy) if found_or_none is None else None
    except DataError:
        raise
    except (
        Exception
    ) as error:  # numpy, zipfile, zlib and gzip raise a dozen unrelated types for damaged files
        raise DataError(
            f"{data} cannot be read as training data: {error}", path=str(data), error=str(error)
        ) from error
    if found_or_none is not None:
        found_or_none.check()
        return found_or_none
    assert files is not None
    if all(each.path.suffix.lower() in _IMAGES for each in files.entries):
        check_library()  # before the device goes online, not in its first round
    return files


@dataclass(frozen=True, eq=False)
class SampleFiles:
    """Data files that a bundle's reader decodes. The result is cached until other labels or samples are requested.

    Attributes:
        source: Path of the file or folder, for errors.
        entries: The files, each with its class folder.
        policy: ``refuse`` raises DataError for files and rows that cannot be used, ``skip`` leaves them out.
    """

    source: str
    entries: tuple[FileEntry, ...]
    policy: Policy
    unknown: tuple[str, ...] = ()
    """Endings of the other files there, and the folders in those of classes."""
    nested: tuple[Path, ...] = ()
    """Folders with data inside of those of classes."""
    _last: dict[str, FittedData] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> int:
        return sum(map(_rows_of, self.entries))

    def __len__(self) -> int:
        """Return the number of files in class folders plus the number of lines in other files."""
        return self._rows

    def fitted(
        self, spec: DataSpec, label: LabelSpec = ONE_CLASS, parts: BundleParts = NO_BUNDLE
    ) -> FittedData:
        """Return the samples of these files as the model reads them; a repeated call with equal ``spec`` and ``label``
        returns the cached result.

        Args:
            spec: The manifest's description of samples, further inputs and reader.
            label: Shape and dtype of the labels that its graphs read.
            parts: Blobs and graphs of the bundle that decode files.

        Raises:
            DataError: The files do not fit; the text names the difference.
        """
        key = repr((spec, label))
        if key not in self._last:
            fitted = self._read(spec, label, parts)
            self._last.clear()
            if isinstance(spec.reader, SoundSpec) and spec.reader.features:
                return fitted  # its rows hold a graph of this round
            self._last[key] = fitted
        return self._last[key]

    def state(self) -> bytes:
        """Return a digest of size and time of all files."""
        return files_state(each.path for each in self.entries)

    def _read(self, spec: DataSpec, label: LabelSpec, parts: BundleParts) -> FittedData:
        reading = ReadContext(self.source, spec, label, parts, Problems(self.policy))
        reading.reader = self._reader(spec)
        suffixes, read = _READ[type(reading.reader)]
        entries = tuple(each for each in self.entries if each.path.suffix.lower() in suffixes)
        if not entries:
            raise DataError(
                f"{self.source} has {self._found}, and the federation's samples are read of {', '.join(suffixes)}: convert "
                "the files, or give arrays",
                found=self._found,
                suffixes=suffixes,
            )
        for folder in self.nested:
            files = sum(map(_is_data, folder.iterdir()))
            reading.problems.add(
                str(folder), "is a folder inside of a class's folder; move its files up", files
            )
        samples = read(reading, entries)
        check_some(len(samples.y), reading.problems, self.source)
        y = label.fitted(samples.y, spec.classes, self.source)
        others = [each for each in self._endings if each not in suffixes]
        unread = tuple(f"{count} {kind}" for kind, count in Counter([*others, *self.unknown]).items())
        return FittedData(samples.x, y, spec, samples.others, label, reading.problems, unread)

    def _reader(self, spec: DataSpec) -> Reader | None:
        """Return the reader of these files: the bundle's, the default one for images, or None for npy files."""
        endings = {*self._endings}
        if ".npy" in endings and endings.isdisjoint(_READ[type(spec.reader)][0] if spec.reader else ()):
            return None
        if spec.reader is None and len(spec.shape) == 3 and endings & {*_IMAGES}:
            return ImageSpec()
        if spec.reader is None:
            raise DataError(
                f"{self.source} has {self._found}, and the bundle does not say how they become samples of shape "
                f"{spec.shape}: give arrays (.npz), or have the federation say it (`reader` in its [data])",
                found=self._found,
            )
        return spec.reader

    @property
    def _found(self) -> str:
        return ", ".join(f"{count} {suffix}" for suffix, count in Counter(self._endings).items())

    @cached_property
    def _endings(self) -> tuple[str, ...]:
        return tuple(each.path.suffix.lower() for each in self.entries)


def _files(path: Path, policy: Policy) -> SampleFiles:
    entries: list[FileEntry] = []
    others: list[Path] = [path]
    nested: list[Path] = []
    if path.is_file() and path.suffix.lower() in _LINES:
        entries = [FileEntry(path)]
    elif path.is_dir():
        children = _visible(path)
        others = [child for child in children if child.is_file()]
        entries = [FileEntry(file) for file in others if _is_data(file)]
        for folder in (child for child in children if child.is_dir()):
            inside = _visible(folder)
            others += inside
            entries += [FileEntry(file, folder.name) for file in inside if _is_data(file)]
            nested += [each for each in inside if each.is_dir() and any(map(_is_data, each.iterdir()))]
    if not entries:
        problem = f"{path} is no training data" if path.exists() else f"there is no file or folder {path}"
        raise DataError(
            f"{problem}: give an .npz with arrays x and y, a folder with x.npy and y.npy, a folder with "
            "idx files, a folder with one sub-folder of files per class (.npy, .png, .jpg, .wav, .txt, .csv), or .csv, "
            f".jsonl, .tsv or .txt{_advice(others)}",
            path=str(path),
        )
    unknown = tuple(
        f"{each.name}/" if each.is_dir() else each.suffix.lower() or each.name
        for each in others
        if not _is_data(each) and each not in nested
    )
    return SampleFiles(str(path), tuple(entries), policy, unknown, tuple(nested))


def _advice(paths: Sequence[Path]) -> str:
    """Return advice on the first file or folder of an unsupported kind, such as a conversion; "" if no kind is known."""
    for path in paths:
        for endings, advice in _CONVERSIONS.items():
            if path.suffix.lower() in endings and path.is_file():
                return f"; found {path.name}: {advice}"
        if path.is_dir():
            return f"; found the folder {path.name} inside of {path.parent.name}: name the folder above those of the classes"
    return ""


def _visible(folder: Path) -> list[Path]:
    return [child for child in sorted(folder.iterdir()) if not child.name.startswith(".")]


def _is_data(path: Path) -> bool:
    """Return True for a file with a supported suffix, and for a broken link to one."""
    return path.suffix.lower() in _SUFFIXES and (path.is_file() or path.is_symlink())


def _rows_of(entry: FileEntry) -> int:
    """Return the number of samples in a file as far as it is known without a bundle; 0 if it cannot be opened."""
    suffix = entry.path.suffix.lower()
    if suffix not in _LINES or (entry.folder and suffix not in RECORDS):
        return 1
    try:
        with entry.path.open("rb") as file:
            lines = _lines(file)
    except OSError:  # whoever reads it for a bundle says so
        return 0
    return max(0, lines - (suffix == ".csv"))


def _lines(file: IO[bytes]) -> int:
    """Count the lines that are not blank. Reads pieces, because a line may be larger than memory."""
    count, blank = 0, True
    while piece := file.readline(_PIECE):
        blank = blank and not piece.strip()
        if piece.endswith(b"\n"):
            count, blank = count + (not blank), True
    return count + (not blank)
