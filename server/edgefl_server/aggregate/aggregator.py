"""Streaming weighted average of updates that may hold only parts of the model.

Memory: one set of sums as large as the model, plus up to 64 buffered updates (256 MiB, or 16 bytes per entry if that
is more). Every value becomes the fixed-point integer ``round(value * weight * 2**fraction_bits)``, and integers are
added exactly. So a set of updates gives the same bits in every order. Updates stay encoded while they are added. ::

    aggregator = Aggregator(layout_of(weights), weight_limit=16)
    checked = aggregator.check(arrays, regions, form)     # UpdateRejected, or an update that may be added
    aggregator.add(checked, weight=1)                     # its arrays must not change until the result
    weights = aggregator.result(weights)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgefl.setup.processor import processor
from edgefl.system.memory import cores
from edgefl.wire.regions import Region, extract
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.decode import decode
from edgefl.wire.update.form import CHANGE_LIMIT, DENSE, VALUE_LIMIT, Form
from edgefl_server.aggregate.accumulator import Accumulator, CpuAccumulator, ModelStep, run_in_threads
from edgefl_server.aggregate.adders import CheckedArrays
from edgefl_server.aggregate.averaging import Average, ChangeMean, HolderMean, PartialAverage, RobustAverage
from edgefl_server.aggregate.checks import check_arrays
from edgefl_server.aggregate.robust import MEAN, RobustRule, change_norm, clip_factor
from edgefl_server.aggregate.scatter import Floats, Layout, TierBlocks, compile_pieces, flatten, layout_of
from edgefl_server.aggregate.statistics import StatisticsBounds, without_negative_variances

__all__ = ["Aggregator", "CheckedArrays", "NormClip", "PartialSum", "layout_of"]

_CHANGES = Form(change=True)
_SUM_BITS = 62  # one bit stays free: each addition may have been rounded up by half a unit


@dataclass(frozen=True)
class NormClip:
    """Bound on the L2 norm of each update's change.

    Attributes:
        limit: Largest norm. A larger change is scaled down to it.
        base: Weights at the begin of the round, from which changes are measured.
        without: Global tensors, such as moving statistics, that do not count in the norm, but are scaled like the
            others.
    """

    limit: float
    base: Mapping[str, Array]
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PartialSum:
    """Sums of one aggregator, to be added to another aggregator of the same round.

    They are integers, so neither the distribution of the updates nor the order of merging changes the result.

    Attributes:
        change: True if the updates hold changes, False if they hold weights.
        weight: Total weight of the updates.
        added: Sums and weights of the entries.
        statistics: Moving statistics of each update, if their median is taken; otherwise empty.
        reports: Reports of an evaluation round (:class:`edgefl_server.aggregate.integer_sums.DeviceSums`).
    """

    change: bool
    weight: int
    added: PartialAverage
    statistics: tuple[npt.NDArray[np.float32], ...] = ()
    reports: tuple[CheckedArrays, ...] = ()


class Aggregator:
    """Weighted mean over the updates that hold each entry: ``sum(w_i * x_i) / sum(w_i)``.

    With weight 1 it is the per-unit average of EmbracingFL (embracingfl.md 2.3: over the clients that trained the
    unit), and with slices the per-entry average of width reduction. Updates of changes give ``old + sum(w_i *
    change_i) / sum(w_i)`` (FedBAT, eq. 11).

    With ``base``, an update counts only at the entries where it differs from ``base``: the mean over non-zero changes
    (FIARSE, section 3 of the paper) instead of the mean over holders (fiarse.md A3). They differ at entries that got
    no gradient, such as the rows of words that a device never saw.

    Moving statistics are clamped to ``statistics`` (:mod:`edgefl_server.aggregate.statistics`), and no variance
    becomes negative.

    Args:
        layout: Positions of the tensors in the flat model.
        weight_limit: Largest sum of all weights of the round. It fixes the number of fraction bits.
        device: Device of the sums: ``cpu``, ``cuda`` or ``auto``.
        threads: Number of cores that add; 0 for all.
        base: Weights of the round's begin, or None for the mean over holders.
        rule: Mean, or a robust rule, which keeps all updates of a round in memory
            (:func:`edgefl_server.aggregate.robust.buffered_bytes`).
        clip: Bound on the norm of each update, or None.
        statistics: Bounds of the moving statistics, or None.
        sums: Accumulator of an earlier round with this layout and device, from :meth:`release_sums`, whose memory is
            reused.

    Raises:
        ValueError: If a robust ``rule`` is combined with ``base``.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        weight_limit: int,
        device: str = "auto",
        threads: int = 0,
        base: Mapping[str, Array] | None = None,
        rule: RobustRule = MEAN,
        clip: NormClip | None = None,
        statistics: StatisticsBounds | None = None,
        sums: Accumulator | None = None,
    ) -> None:
        if base is not None and rule.buffered:
            raise ValueError(
                f"the rule {rule.name} counts every holder; leave out base or choose the rule mean"
            )
        if sums is not None and sums.size != layout.size:
            raise ValueError(f"sums of {sums.size} entries cannot take a model of {layout.size}")
        self.layout = layout
        self.weight_limit = max(1, weight_limit)
        self.total_weight = 0
        self._device = device
        self._threads = threads or cores()
        self._base = None if base is None else flatten(layout, base).astype(np.float32, copy=False)
        self._rule = rule
        self._clip = clip
        self._statistics = statistics
        self._rows: list[npt.NDArray[np.float32]] = []
        self._sums = sums
        self._change = False
        self._released = False
        self._average: Average | None = None
        self._compiled: dict[tuple[int, int], tuple[Mapping[str, Region], Form, TierBlocks]] = {}

    @property
    def fraction_bits(self) -> int:
        """Number of binary fraction digits of the fixed-point sums.

        It depends on the kind of the updates (weights or changes), so it is known after the round's first update.
        """
        largest = CHANGE_LIMIT if self._change else VALUE_LIMIT
        return _SUM_BITS - int(math.log2(largest)) - (self.weight_limit - 1).bit_length()

    def pieces(self, regions: Mapping[str, Region], form: Form = DENSE) -> TierBlocks:
        """Return the compiled layout of updates that hold ``regions`` of the global model, encoded in ``form``.

        It is cached by the identity of both objects, which must not change afterwards.
        """
        key = id(regions), id(form)
        known = self._compiled.get(key)
        if known is None:  # the entry keeps both alive, so their ids stay their own
            made = compile_pieces(self.layout, regions, form)
            known = self._compiled[key] = (regions, form, made)
        return known[2]

    def check(
        self, arrays: Mapping[str, Array], regions: Mapping[str, Region], form: Form = DENSE
    ) -> CheckedArrays:
        """Validate an update and return it in a form that :meth:`add` accepts.

        Args:
            arrays: Encoded arrays by name.
            regions: Positions of the submodel's tensors in the global model.
            form: Encoding of the arrays.

        Raises:
            UpdateRejected: If a name, shape, dtype or value is wrong.
        """
        return check_arrays(arrays, self.pieces(regions, form), self._threads)

    def as_change(self, checked: CheckedArrays, began: Mapping[str, Array]) -> CheckedArrays:
        """Return the difference between a checked update of weights and ``began``, the weights that its device started
        from.

        An update that already holds changes is returned as it is.

        Raises:
            UpdateRejected: If the change is larger than permitted.
        """
        pieces = checked.pieces
        if pieces.form.change:
            return checked
        weights, base = self._decode(checked).named, extract(began, pieces.regions)
        return self.check({name: weights[name] - base[name] for name in base}, pieces.regions, _CHANGES)

    def add(self, checked: CheckedArrays, weight: int, share: float = 1.0) -> None:
        """Add a checked update to the sums.

        Args:
            checked: Update from :meth:`check`; its arrays must not change until the result is computed.
            weight: Weight in the mean, at least 1.
            share: Factor of the update's values, such as a staleness discount. It does not change the weight.

        Raises:
            ValueError: If the sum of weights would exceed ``weight_limit``, or if updates of changes and of
                weights are mixed.
            RuntimeError: After :meth:`release_sums`.
        """
        self._check_weight(weight)
        form = checked.pieces.form
        average = self._average_of(f"one of codec {form.codec!r}", change=form.change)
        factor = float(weight) * share * 2.0**self.fraction_bits
        if self._statistics is not None:
            checked = self._clamp_statistics(checked, self._statistics)
            self._keep_statistics(checked, self._statistics)
        if self._clip is not None:
            checked, part = self._clip_update(checked, self._clip)
            factor *= part
        average.add(checked if average.packed else self._decode(checked), weight, factor)
        self.total_weight += weight

    def partial(self) -> PartialSum | None:
        """Return the sums so far, or None if no update was added.

        The arrays are not copied: the caller must not change them, and the next :meth:`add` changes them.

        Raises:
            RuntimeError: After :meth:`release_sums`.
        """
        self._check_in_use()
        if self._average is None:
            return None
        return PartialSum(self._change, self.total_weight, self._average.added(), tuple(self._rows))

    def take(self, partial: PartialSum) -> None:
        """Add the sums of another aggregator of the same round, which its :meth:`partial` returned.

        Raises:
            ValueError: If the sum of weights would exceed ``weight_limit``, or if updates of changes and of weights
                are mixed.
            RuntimeError: After :meth:`release_sums`.
        """
        self._check_weight(partial.weight)
        self._average_of("another share", change=partial.change).take(partial.added)
        self._rows.extend(partial.statistics)
        self.total_weight += partial.weight

    def _check_weight(self, weight: int) -> None:
        """Check that ``weight`` can be added to the weights so far.

        Raises:
            ValueError: If ``weight`` is below 1, or if the sum would exceed the limit of the round.
            RuntimeError: After :meth:`release_sums`.
        """
        self._check_in_use()
        if weight < 1 or self.total_weight + weight > self.weight_limit:
            raise ValueError(
                f"weight {weight} after {self.total_weight} passes the limit {self.weight_limit}"
            )

    def result(self, old: Mapping[str, Array]) -> Arrays:
        """Return the new model by tensor name, with the dtypes of ``old``.

        Entries are the average of the updates (added to ``old`` for updates of changes), or copies of ``old`` where no
        update holds the entry. Negative variances become 0.

        Raises:
            RuntimeError: After :meth:`release_sums`.
        """
        self._check_in_use()
        if self._average is None:
            return {name: old[name].copy() for name in self.layout.offsets}
        names = self.layout.offsets
        new = self._empty_model(
            np.float32 if all(old[name].dtype == np.float32 for name in names) else np.float64
        )
        renewal = ModelStep(self.layout, old, new, self._change)
        run_in_threads(self._average.plan_renewal(renewal), self._threads)
        arrays = {
            name: new[at : at + old[name].size].reshape(old[name].shape).astype(old[name].dtype, copy=False)
            for name, at in names.items()
        }
        if self._statistics is None:
            return arrays
        arrays |= self._statistics.medians(self._rows, old, change=self._change)
        return without_negative_variances(arrays, self._statistics.names)

    def _empty_model(self, dtype: npt.DTypeLike) -> Floats:
        """Return an uninitialized array for a model, from the pool of the sums if there is one."""
        if self._sums is None:
            return np.empty(self.layout.size, dtype)
        return self._sums.spare.array(self.layout.size, dtype)

    def _average_of(self, which: str, *, change: bool) -> Average:
        """Return the :class:`Average` that sums this round's updates. The first call creates it.

        Args:
            which: Description of the new update, for the text of the error.
            change: True if the new update holds changes, False if it holds weights.

        Raises:
            ValueError: If earlier updates of the round are of the other kind.
        """
        if self._average is None:
            self._change = change
            self._average = self._create_average()
        if change != self._change:
            kinds = ("changes", "weights") if self._change else ("weights", "changes")
            raise ValueError(
                f"the round's updates hold {kinds[0]} and {which} holds {kinds[1]}; give all tiers codecs of one sort"
            )
        return self._average

    def _create_average(self) -> Average:
        scale = 2.0**self.fraction_bits
        if self._rule.buffered:
            return RobustAverage(self.layout, self._rule, scale, self._mask_counted())
        if self._base is not None:
            return ChangeMean(self._base, scale, change=self._change)
        if self._sums is None:
            self._sums = accumulator(self.layout.size, self._device, self._threads)
        else:
            self._sums.reset()
        return HolderMean(self.layout, self._sums, scale)

    def _mask_counted(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the entries that distances between updates use, bool [model]: all except moving statistics."""
        counted = np.ones(self.layout.size, np.bool_)
        for name in self._statistics.names if self._statistics else ():
            start = self.layout.offsets[name]
            counted[start : start + math.prod(self.layout.shapes[name])] = False
        return counted

    def release_sums(self) -> Accumulator | None:
        """Return the accumulator, so that the next round's aggregator can reuse its memory; None if none was created.

        Every later call of this aggregator raises RuntimeError.
        """
        self._check_in_use()
        self._released = True
        return self._sums

    def _check_in_use(self) -> None:
        if self._released:
            raise RuntimeError("this aggregator has given its sums away; make a new one for the next round")

    def _decode(self, update: CheckedArrays) -> CheckedArrays:
        """Return the update with its arrays decoded to float32. An update that is not encoded is returned as it is."""
        pieces = update.pieces
        if not pieces.form.sections:
            return update
        arrays = decode(pieces.form, update.named, pieces.regions, self.layout.shapes)
        return self._dense(arrays, pieces)

    def _dense(self, arrays: Mapping[str, Array], like: TierBlocks) -> CheckedArrays:
        """Return the decoded ``arrays`` (by local tensor name) as a checked float32 update.

        It holds the same entries of the global model as updates of the layout ``like``.
        """
        pieces = self.pieces(like.regions, _CHANGES if like.form.change else DENSE)
        return CheckedArrays(
            pieces, tuple(np.require(arrays[n], np.float32, ["C", "A"]) for n in pieces.sources)
        )

    def _clamp_statistics(self, update: CheckedArrays, bounds: StatisticsBounds) -> CheckedArrays:
        """Return the update with its moving statistics clamped to ``bounds``; ``update`` itself if all are inside."""
        pieces = update.pieces
        arrays = bounds.clamp(pieces.form, update.named, pieces.regions, self.layout.shapes)
        return update if arrays is None else self._dense(arrays, pieces)

    def _keep_statistics(self, update: CheckedArrays, bounds: StatisticsBounds) -> None:
        if bounds.median:
            pieces = update.pieces
            row = bounds.row(pieces.form, update.named, pieces.regions, self.layout.shapes)
            self._rows.append(row)

    def _clip_update(self, update: CheckedArrays, clip: NormClip) -> tuple[CheckedArrays, float]:
        """Clip an update to the norm limit of ``clip``. Return (update, factor by which the caller multiplies its values).

        An update of changes is returned as it is, with the clipping factor. An update of weights beyond the limit is
        returned with its weights moved towards the base model, and factor 1.
        """
        form, regions, shapes = update.pieces.form, update.pieces.regions, self.layout.shapes
        norm = change_norm(form, update.named, regions, shapes, clip.base, without=clip.without)
        share = clip_factor(norm, clip.limit)
        if form.change or share == 1.0:
            return update, share
        weights, base = self._decode(update).named, extract(clip.base, regions)
        pulled = {n: base[n] + np.float32(share) * (weights[n] - base[n]) for n in base}
        return self._dense(pulled, update.pieces), 1.0


def accumulator(size: int, device: str = "auto", threads: int = 0) -> Accumulator:
    """Return a new accumulator of ``size`` entries.

    ``device`` is ``cpu``, ``cuda`` or ``auto`` (:func:`~edgefl.setup.processor.processor`). ``threads`` is for the
    CPU; 0 uses all cores.
    """
    place = processor(device)
    if place == "cpu":
        return CpuAccumulator(size, threads)
    import torch

    from edgefl_server.aggregate.cuda import TorchAccumulator

    return TorchAccumulator(size, torch.device(place))
