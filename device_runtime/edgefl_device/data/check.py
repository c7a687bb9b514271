"""Check of local data against a bundle: a report with the problems of single rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from edgefl.errors import DataError
from edgefl.wire.bundle.manifest import Manifest
from edgefl_device.config import Source
from edgefl_device.data.problems import Problem, Problems
from edgefl_device.data.samples import BundleParts, FittedData, LabelSpec
from edgefl_device.data.sources import load

_BLOCK = 256
"""Samples that are looked at together."""


class InputReport(msgspec.Struct, frozen=True, kw_only=True):
    """Dtype, shape of one sample, and smallest and largest value of one model input."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float
    most: float


class DataReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking local data against a bundle.

    Attributes:
        source: Path or function that the data come from.
        rows: Number of usable samples.
        inputs: Value range of each model input.
        classes: Number of samples by class name or number.
        bad_rows: Number of rows that cannot be used.
        problems: The first 20 problems of bad rows.
        unread: Names of arrays that the model does not read.
        error: Reason why none of the data can be used; "" if they can.
    """

    source: str
    rows: int = 0
    inputs: tuple[InputReport, ...] = ()
    classes: dict[str, int] = {}
    bad_rows: int = 0
    problems: tuple[Problem, ...] = ()
    unread: tuple[str, ...] = ()
    error: str = ""

    @property
    def fits(self) -> bool:
        """True if there is no error and no bad row."""
        return not self.error and not self.bad_rows


def check(data: Path | Source, manifest: Manifest, parts: BundleParts) -> DataReport:
    """Return the report on local data for a bundle. Bad data are described in the report, not raised.

    Args:
        data: Path or function of the data.
        manifest: The bundle's manifest.
        parts: Blobs and graphs of the bundle that decode files.

    Raises:
        ConfigError: A library that the files need is not installed.
    """
    source = str(data) if isinstance(data, Path) else f"{getattr(data, '__name__', 'data')}()"
    try:
        fitted = load(data, "skip").fitted(manifest.data, LabelSpec.of(manifest), parts)
    except DataError as error:
        found = error.details.get("problems")
        problems = found if isinstance(found, Problems) else Problems()
        return DataReport(
            source=source, bad_rows=problems.count, problems=tuple(problems.first), error=error.message
        )
    return DataReport(
        source=source,
        rows=len(fitted),
        inputs=_inputs(fitted),
        classes=_classes(fitted),
        bad_rows=fitted.skipped.count,
        problems=tuple(fitted.skipped.first),
        unread=fitted.unread,
    )


def _inputs(data: FittedData) -> tuple[InputReport, ...]:
    """Return the value range of each input. Reads blocks of samples, because the data may be larger than memory."""
    ranges: dict[str, tuple[float, float]] = {}
    about: dict[str, tuple[str, tuple[int, ...]]] = {}
    for start in range(0, len(data), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(data)))
        parts = {"x": data.rows(rows), "y": data.labels(rows)}
        for name, part in (parts | {name: data.other(name, rows) for name in data.others}).items():
            least, most = ranges.get(name, (np.inf, -np.inf))
            ranges[name] = (min(least, float(part.min())), max(most, float(part.max())))
            about[name] = (str(part.dtype), part.shape[1:])
    return tuple(
        InputReport(name=name, dtype=dtype, shape=shape, least=ranges[name][0], most=ranges[name][1])
        for name, (dtype, shape) in about.items()
    )


def _classes(data: FittedData) -> dict[str, int]:
    counts = data.facts().get("class_counts")
    if counts is None or data.y.ndim != 1:
        return {}
    names = data.spec.names or tuple(map(str, range(data.spec.classes)))
    return dict(zip(names, counts.tolist(), strict=True))
