"""Averages that a few bad updates cannot move far: coordinate-wise median, trimmed mean, and clipping of norms.

Median and trimmed mean (Yin et al., ICML 2018, definitions 1 and 2) look at all updates of an entry at once. Multi-Krum
(:func:`edgefl_server.aggregate.averaging.chosen`) looks at all updates of a tier. So the server keeps the updates until
the round ends; :func:`buffered_bytes` computes the memory for that. Each update counts once there, whatever number of
samples it claims: a weight that the sender chooses would let one device be many. Clipping works on one update as it
arrives and costs no memory.

Limit: where half of the updates of an entry or more are bad (a submodel that only one device holds, say), no rule can
separate good from bad.
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
from edgefl.wire.update.form import Codes, Form

RuleName = Literal["mean", "median", "trimmed_mean", "multi_krum"]
SHARED = ("trimmed_mean", "multi_krum")
"""Rules that say how many may be bad, as a share."""

Floats = npt.NDArray[np.floating]
Held = npt.NDArray[np.bool_]

_HAIR = 1e-9
"""0.29 times 100 is a hair below 29, which must still drop 29."""

BLOCK = 1 << 18
"""Values worked on at a time, so that scratch nearly stays in a processor's cache."""

_WIDEST = 1 << 15
"""Entries worked on at a time."""

_SCRATCH = BLOCK * (3 * 8 + 4 + 2) + _WIDEST * 96
"""Most bytes of a thread's scratch: a block's values side by side and two marks of each, three copies of them as float64,
and twelve numbers per entry."""


@dataclass(frozen=True)
class MeanRule:
    """Rule that combines the updates of an entry into one number.

    ``trim``, in [0, 0.5), for the trimmed mean: the share of the holders that is dropped at each end; for multi-Krum:
    the share of a tier's updates that may be bad. To be safe from f bad updates of n it must be at least f / n, and
    floor(trim * n) at least f wherever n devices hold an entry (:func:`unprotected`). ConfigError for an unknown rule
    or an invalid trim; 0 is invalid for these two.
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
        """Return how many of ``holders`` of an entry can be bad without moving the result far.

        Median and trimmed mean leave out this number at either end. For multi-Krum it is f, with 2 f + 2 < holders.
        """
        if self.name == "mean":
            return 0
        most = (holders - 3) // 2 if self.name == "multi_krum" else (holders - 1) // 2
        share = holders if self.name == "median" else math.floor(self.trim * holders + _HAIR)
        return max(0, min(share, most))


MEAN = MeanRule()


def combine(values: Floats, held: Held, rule: MeanRule = MEAN) -> tuple[npt.NDArray[np.float64], Held]:
    """Return the result, float64 [n], and a mask of the entries that any update holds, bool [n]; the result is 0 elsewhere.

    ``values`` is float32 or float64 [K, n], finite where ``held``, bool [K, n], is true; of the h holders of an entry

    * mean: sum / h;
    * median: the middle one, or the mean of the two middle ones if h is even;
    * trimmed mean: the mean of those that remain when the floor(trim * h) smallest and as many of the largest are
      dropped; at least one remains;
    * multi-Krum: sum / h, of updates that were chosen before (:func:`edgefl_server.aggregate.averaging.chosen`).

    The result lies between the smallest and the largest that count, and no order of the updates changes a bit of it.
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


def _combine(values: Floats, held: Held, rule: MeanRule) -> npt.NDArray[np.float64]:
    """Combine one block.

    Rows are updates; sorted, the holders' values come first, smallest first, then infinities for holes.
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
    """Return the mean of the places first .. stop - 1 of each row of ``ordered``."""
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


def unprotected(rule: MeanRule, holders: int) -> bool:
    """Return True if a robust ``rule`` leaves out none of the ``holders`` of an entry.

    Then a single bad update can move the result as far as it likes.
    """
    return rule.buffered and holders > 0 and not rule.left_out(holders)


def buffered_bytes(updates: int, entries: int, threads: int = 1) -> int:
    """Return the most bytes that a buffered rule needs for so many updates of a model of so many entries: every update as
    float32, the latest one a second time while it is added, the new model, and the scratch of each thread.
    """
    return (updates + 2) * entries * 4 + threads * _SCRATCH


def clip_factor(norm: float, limit: float) -> float:
    """Return min(1, limit / norm), the factor that limits a change of this L2 norm to ``limit``.

    ConfigError unless ``limit`` is above 0.
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
    """Return the L2 norm of the change of the weights that a device trained.

    ``base`` holds the global weights that the round began with; an update of changes does not read it. ``without`` names
    global tensors that do not count: moving statistics are not trained, and one large variance would hide a change. One
    bit has a closed form, sqrt(sum over tensors of scale^2 * entries); all else is decoded. ProtocolError for arrays
    that do not fit ``form``.
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
        if isinstance(encoding, Codes) and len({abs(level) for level in encoding.levels}) == 1:
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
    """Sum of (entries - old)^2 in float64, block by block."""
    total = 0.0
    for start in range(0, entries.size, BLOCK):
        part = slice(start, start + BLOCK)
        moved = entries[part].astype(np.float64)
        if old is not None:
            moved -= old[part]
        total += float(np.square(moved, out=moved).sum())
    return total
