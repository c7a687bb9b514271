"""Check of local data against a bundle: a report, and the problems of each row."""

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
    """An input as the model reads it: ``shape`` of one sample, and its smallest and largest value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float
    most: float


class DataReport(msgspec.Struct, frozen=True, kw_only=True):
    """``rows`` samples that fit; ``bad_rows`` that do not, of which ``problems`` has the first 20; ``error``: why the data
    cannot be used at all, "" if they can. ``classes``: how many samples of each, by name or number. ``unread``: what else
    there is, and the model does not read."""

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
        """True if a device can train on all of it."""
        return not self.error and not self.bad_rows


def check(data: Path | Source, manifest: Manifest, parts: BundleParts) -> DataReport:
    """Return the report of a device with these data for this bundle; ConfigError if a library is missing."""
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
    """Return the ranges of all inputs, a block of samples at a time: they may be larger than memory."""
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
