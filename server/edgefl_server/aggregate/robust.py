"""Robust averages: coordinate-wise median, trimmed mean, multi-Krum, and clipping of norms.

Median and trimmed mean (Yin et al., ICML 2018, definitions 1 and 2) need all updates of an entry at once. Multi-Krum
(:func:`edgefl_server.aggregate.averaging.select_rows`) needs all updates of a tier. So the server keeps the updates until
the round ends; :func:`buffered_bytes` computes the memory for that. Each update has weight 1 there, whatever number
of samples it claims, because a claimed weight would let one device count as many. Clipping handles one update at a
time and needs no memory.

Limit: if half or more of the updates of an entry are bad, no rule can separate good from bad. That is so for a
submodel that only one device holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from edgefl.errors import ConfigError
from edgefl.wire.regions import Region, spans
from edgefl.wire.tensors import Array
from edgefl.wire.update.decode import decode, iter_scales, read, split
from edgefl.wire.update.form import CodeEncoding, Form

RuleName = Literal["mean", "median", "trimmed_mean", "multi_krum"]
SHARED = ("trimmed_mean", "multi_krum")
"""Rules with the parameter ``trim``, the share of updates that may be bad."""

Floats = npt.NDArray[np.floating]
Held = npt.NDArray[np.bool_]

_HAIR = 1e-9
"""Tolerance for rounding: 0.29 * 100 is slightly below 29, but must drop 29."""

BLOCK = 1 << 18
"""Values combined at a time, so that the scratch memory nearly stays in the cache."""

_WIDEST = 1 << 15
"""Largest number of entries combined at a time."""

_SCRATCH = BLOCK * (3 * 8 + 4 + 2) + _WIDEST * 96
"""Largest scratch memory of a thread in bytes: for each value three float64 copies, a sorted copy and two marks, and
twelve numbers for each entry."""


@dataclass(frozen=True)
class RobustRule:
    """Rule that combines the updates of an entry into one number.

    Attributes:
        name: Name of the rule.
        trim: Fraction in (0, 0.5). For the trimmed mean, the share of the updates that is dropped at each end. For
            multi-Krum, the share of a tier's updates that may be bad. To resist f bad updates of n, ``floor(trim *
            n)`` must be at least f (:func:`unprotected`). Other rules ignore it.

    Raises:
        ConfigError: For an unknown rule or an invalid ``trim``.
    """

    name: RuleName = "mean"
    trim: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in get_args(RuleName):
            raise ConfigError(
                f"the rule is {self.name!r}; choose one of {', '.join(get_args(RuleName))}", name=self.name
            )
        if not 0.0 <= self.trim < 0.5:
            raise ConfigError(
                f"trim is {self.trim}; choose a share of at least 0 and below 0.5", trim=self.trim
            )
        if self.name in SHARED and not self.trim:
            raise ConfigError(
                f"the rule {self.name} with trim 0 leaves out nothing; choose a share such as 0.34, or the rule mean",
                trim=self.trim,
            )
        if self.trim and self.name not in SHARED:
            raise ConfigError(
                f"trim is {self.trim}, which the {self.name} does not use; choose the rule {' or '.join(SHARED)}",
                trim=self.trim,
            )

    @property
    def buffered(self) -> bool:
        """Return True if all updates of a round must be kept until its end."""
        return self.name != "mean"

    def left_out(self, holders: int) -> int:
        """Return the number of ``holders`` of an entry that may be bad without moving the result far.

        Median and trimmed mean drop this number at either end. For multi-Krum it is f, with 2 f + 2 < holders. It is
        0 for mean.
        """
        if self.name == "mean":
            return 0
        most = (holders - 3) // 2 if self.name == "multi_krum" else (holders - 1) // 2
        share = holders if self.name == "median" else math.floor(self.trim * holders + _HAIR)
        return max(0, min(share, most))


MEAN = RobustRule()


def combine(values: Floats, held: Held, rule: RobustRule = MEAN) -> tuple[npt.NDArray[np.float64], Held]:
    """Combine K updates entry by entry.

    Of the h holders of an entry

    * mean: sum / h;
    * median: the middle value, or the mean of the two middle values if h is even;
    * trimmed mean: drop the floor(trim * h) smallest values and as many of the largest, at most so many that one
      remains; take the mean;
    * multi-Krum: sum / h, of updates selected before (:func:`edgefl_server.aggregate.averaging.select_rows`).

    The order of the updates does not change a bit of the result.

    Args:
        values: float32 or float64 [K, n], finite where ``held`` is true.
        held: True at the entries that an update holds, bool [K, n].
        rule: Rule to apply.

    Returns:
        The combined values, float64 [n], with 0 at entries without a holder, and the mask of entries with one,
        bool [n].

    Raises:
        ValueError: If the shapes differ or are not two-dimensional.
    """
    if values.ndim != 2 or values.shape != held.shape:
        raise ValueError(
            f"values {list(values.shape)} and held {list(held.shape)} must both be [updates, entries]"
        )
    updates, entries = values.shape
    result, anyone = np.zeros(entries, np.float64), np.zeros(entries, np.bool_)
    width = min(_WIDEST, max(1, BLOCK // max(1, updates)))
    for start in range(0, entries if updates else 0, width):
        part = slice(start, start + width)
        anyone[part] = held[:, part].any(axis=0)
        result[part] = np.where(anyone[part], _combine(values[:, part], held[:, part], rule), 0.0)
    return result, anyone


def _combine(values: Floats, held: Held, rule: RobustRule) -> npt.NDArray[np.float64]:
    """Return the combined value of each entry in one block, float64 [entries]; undefined where no update holds the
    entry.

    Values are sorted per entry, with infinity for updates that do not hold it, so that these come last.
    """
    rows = np.where(held, values, np.inf).astype(values.dtype, copy=False)
    rows += 0.0  # makes -0.0 a plain 0: sorting takes them for equal and would keep their order of arrival
    ordered = np.sort(np.ascontiguousarray(rows.T), axis=1)
    # An entry without holders has one holder of infinity, which the caller drops.
    holders = np.maximum(held.sum(axis=0), 1)
    known = [0 if rule.name == "multi_krum" else rule.left_out(count) for count in range(len(values) + 1)]
    dropped = np.array(known, np.int64)[holders]
    return _mean_between(ordered, dropped, holders - dropped)


def _mean_between(
    ordered: Floats, first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return, for each row of ``ordered``, the mean of its elements ``first`` to ``stop - 1``, float64 [rows]."""
    lowest, highest = (
        np.take_along_axis(ordered, place[:, None], axis=1)[:, 0].astype(np.float64)
        for place in (first, stop - 1)
    )
    total = np.zeros(len(ordered), np.float64)
    for place in range(int(first.min(initial=0)), int(stop.max(initial=0))):
        counts = (first <= place) & (place < stop)
        total += np.where(counts, ordered[:, place], 0.0)
    # Rounding may carry the mean of equal numbers a hair past them.
    return np.clip(total / (stop - first), lowest, highest)


def unprotected(rule: RobustRule, holders: int) -> bool:
    """Return True if a robust ``rule`` cannot drop any of the ``holders`` of an entry.

    A single bad update can then move the result without bound. For the plain mean the result is False.
    """
    return rule.buffered and holders > 0 and not rule.left_out(holders)


def buffered_bytes(updates: int, entries: int, threads: int = 1) -> int:
    """Return the peak memory in bytes of a buffered rule, for ``updates`` updates of ``entries`` entries.

    It counts every update as float32, a second copy of the latest one, the new model, and the scratch memory of
    ``threads``.
    """
    return (updates + 2) * entries * 4 + threads * _SCRATCH


def clip_factor(norm: float, limit: float) -> float:
    """Return min(1, limit / norm), the factor that scales a change of L2 norm ``norm`` to at most ``limit``.

    Raises:
        ConfigError: If ``limit`` is not above 0.
    """
    if not limit > 0.0:
        raise ConfigError(f"the limit of an update's norm is {limit}; choose a number above 0", limit=limit)
    return 1.0 if norm <= limit else limit / norm


def change_norm(
    form: Form,
    arrays: Mapping[str, Array],
    regions: Mapping[str, Region],
    shapes: Mapping[str, tuple[int, ...]],
    base: Mapping[str, Array],
    *,
    without: Collection[str] = (),
) -> float:
    """Return the L2 norm of the change that an update makes to the global weights.

    One-bit codes have a closed form, sqrt(sum over tensors of scale^2 * entries); other forms are decoded.

    Args:
        form: Encoding of the update.
        arrays: Encoded arrays by name.
        regions: Positions of the update's tensors in the global model.
        shapes: Shapes of the global tensors.
        base: Global weights of the round's begin. Not used if the form holds changes.
        without: Global tensors to leave out, such as moving statistics: one large variance would hide a change.

    Raises:
        ProtocolError: If the arrays do not fit ``form``.
    """
    if form.change and form.sections:
        squares = _squares_of_sections(form, arrays, regions, shapes, without)
    else:
        entries = decode(form, arrays, regions, shapes)
        squares = _squares_of_tensors(entries, regions, shapes, None if form.change else base, without)
    return math.sqrt(math.fsum(squares))


def _squares_of_sections(
    form: Form,
    arrays: Mapping[str, Array],
    regions: Mapping[str, Region],
    shapes: Mapping[str, tuple[int, ...]],
    without: Collection[str],
) -> Iterator[float]:
    for coded in split(form, arrays, regions, shapes):
        region, encoding = regions[coded.name], coded.section.encoding
        if isinstance(encoding, CodeEncoding) and len({abs(level) for level in encoding.levels}) == 1:
            level = np.float32(encoding.levels[0])
            for part, count, scale in iter_scales(coded, region, shapes):
                if part not in without:
                    yield float(scale * level) ** 2 * count
        else:
            entries = read(coded, region, shapes)
            for part, where, _ in spans(coded.name, region, shapes):
                if part not in without:
                    yield _square(entries[where])


def _squares_of_tensors(
    tensors: Mapping[str, Array],
    regions: Mapping[str, Region],
    shapes: Mapping[str, tuple[int, ...]],
    base: Mapping[str, Array] | None,
    without: Collection[str],
) -> Iterator[float]:
    for name, region in regions.items():
        flat = tensors[name].reshape(-1)
        for part, where, positions in spans(name, region, shapes):
            if part in without:
                continue
            old = None if base is None else base[part].reshape(-1)
            yield _square(flat[where], old if old is None or positions is None else old[positions])


def _square(entries: Array, old: Array | None = None) -> float:
    """Return the sum of ``(entries - old)**2`` in float64, computed block by block."""
    total = 0.0
    for start in range(0, entries.size, BLOCK):
        part = slice(start, start + BLOCK)
        moved = entries[part].astype(np.float64)
        if old is not None:
            moved -= old[part]
        total += float(np.square(moved, out=moved).sum())
    return total
