"""Exactly k largest magnitudes of each group, their thresholds, and guards for small submodels (fiarse.md 2.3, 2.6).

    k = max(1, floor(gamma d)),    M0 = the k largest |x|, ties by lowest flat index,    theta = min |x[M0]|

and theta = 0 with M0 all ones for gamma = 1 (fiarse.md A8). Masks are nested in gamma. During local training the mask is
M0 AND |x| >= theta: the comparison alone would exceed the budget for ties or zeros (fiarse.md A7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.wire.regions import EntryRegion
from edgefl.wire.tensors import Array, Arrays


@dataclass(frozen=True)
class Guards:
    """Entries that are held regardless of rank, and the comparison of entries of different tensors (fiarse.md 8.1, A9).

    All are off by default. Guarded entries are part of the budget: they are taken first, and the rest of it goes by
    rank. So a submodel never exceeds its size.

    Attributes:
        min_keep: Smallest number of kept entries of each tensor.
        dense: Paths or patterns of tensors that are held whole.
        relative: True: rank entries relative to the spread of their tensor's initial values.
    """

    # Every tensor keeps at least this many of its largest entries, or all if it has fewer.
    min_keep: int = 0
    # Tensors that are held whole, such as ("stem", "head"): paths, or patterns of names with * and ?.
    dense: tuple[str, ...] = ()
    # Rank by |x| / s with s the spread of a tensor's initial values, so that layers of any fan-in compete equally.
    relative: bool = False

    def __post_init__(self) -> None:
        if self.min_keep < 0:
            raise ModelError(f"min_keep is at least 0, found {self.min_keep}", min_keep=self.min_keep)

    def whole(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names among ``names`` whose tensors are held whole because of :attr:`dense`.

        Raises:
            ModelError: A pattern of ``dense`` matches no name.
        """
        whole_names: set[str] = set()
        for pattern in self.dense:
            fitting = {name for name in names if _fits(name, pattern)}
            if not fitting:
                raise ModelError(
                    f"no weight fits {pattern!r} of the guard 'dense'; there are {', '.join(names)}",
                    pattern=pattern,
                    names=tuple(names),
                )
            whole_names |= fitting
        return frozenset(whole_names)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def scales(initial: Mapping[str, Array]) -> dict[str, float]:
    """Return the standard deviation of each tensor's initial values, by name, for :attr:`Guards.relative`.

    For a tensor of equal values, such as a bias of zeros, all tensors of its layer are measured together, because they
    share a fan-in. If these are equal too, the whole model is measured.
    """
    layers: dict[str, list[Array]] = {}
    for name, values in initial.items():
        layers.setdefault(layer_of(name), []).append(values)
    return {
        name: _spread([values]) or _spread(layers[layer_of(name)]) or _spread(list(initial.values())) or 1.0
        for name, values in initial.items()
    }


def layer_of(name: str) -> str:
    """Return the path of the layer that holds the tensor ``name``: all before the last dot."""
    return name.rpartition(".")[0]


def _spread(parts: Sequence[Array]) -> float:
    """Return the standard deviation (divided by n) of all entries of ``parts``, 0 if they are equal."""
    size = sum(part.size for part in parts)
    first = float(parts[0].reshape(-1)[0])
    if all(bool((part == first).all()) for part in parts):
        return 0.0
    mean = sum(float(part.sum(dtype=np.float64)) for part in parts) / size
    return math.sqrt(sum(float(np.square(part - mean).sum(dtype=np.float64)) for part in parts) / size)


Mask = npt.NDArray[np.bool_]
Groups = tuple[tuple[str, ...], ...]
"""Names of the tensors of each group that is ranked separately."""

FOUR_SIZES = (1 / 64, 1 / 16, 1 / 4, 1.0)
FIVE_SIZES = (0.04, 0.16, 0.36, 0.64, 1.0)
"""Capacities of the paper (fiarse.md 2.10): those of width slices by 1/8, 1/4, 1/2, 1 and by .2, .4, .6, .8, 1."""

NO_GUARDS = Guards()


@dataclass(frozen=True)
class GroupThreshold:
    """Result for one group of tensors that were ranked together.

    Attributes:
        names: Names of the tensors.
        entries: Number of their entries.
        kept: Number of kept entries.
        theta: Threshold by rank alone, a float32 number. It is relative to a tensor's scale if the guard
            ``relative`` is on.
    """

    names: tuple[str, ...]
    entries: int
    kept: int
    theta: float


@dataclass(frozen=True, eq=False)
class ImportanceMasks:
    """Submodel of size ``gamma``: a bool mask and a threshold per tensor, in the order of the model's weights.

    Attributes:
        gamma: Share of the entries.
        masks: Mask of each tensor, by name. True: the entry is held.
        theta: Threshold of each tensor, a float32 number: its group's, times the tensor's scale if the guard
            ``relative`` is on. It never exceeds the smallest kept |x| of the tensor. So ``masks AND |x| >=
            theta`` equals ``masks`` at the start of training, despite rounding and guards. A tensor that is
            guarded as dense has 0: training never drops its entries.
        groups: Results of the groups that were ranked separately.
        guards: Guards of the cut.
    """

    gamma: float
    masks: Mapping[str, Mask]
    theta: Mapping[str, float]
    groups: tuple[GroupThreshold, ...]
    guards: Guards = NO_GUARDS

    @property
    def kept(self) -> int:
        """Number of held entries, k."""
        return sum(group.kept for group in self.groups)

    @property
    def entries(self) -> EntryRegion:
        """Positions of the held entries in the concatenation of the masked tensors."""
        flat = np.concatenate([mask.reshape(-1) for mask in self.masks.values()])
        return EntryRegion(tuple(self.masks), np.flatnonzero(flat).astype(np.int64, copy=False))

    @property
    def fractions(self) -> dict[str, float]:
        """Kept fraction of each tensor, by name."""
        return {name: float(mask.mean()) for name, mask in self.masks.items()}

    def apply(self, weights: Mapping[str, Array]) -> Arrays:
        """Return ``weights`` by name with zeros for entries that are not held. Tensors without a mask are unchanged."""
        return {
            name: np.where(self.masks[name], array, np.zeros((), array.dtype))
            if name in self.masks
            else array
            for name, array in weights.items()
        }


def kept_count(gamma: float, entries: int) -> int:
    """Return the number of entries to keep, k = max(1, floor(gamma * entries)), corrected for rounding of the product.

    For example, 0.29 of 100 is 29, although the product is 28.999999999999996. gamma and the product are each rounded by
    up to 1.1e-16 of their size, which exceeds 1e-9 in large models.
    """
    return max(1, math.floor(gamma * entries * (1 + 4e-16) + 1e-9))


def check_gamma(gamma: float) -> None:
    """Raise ModelError unless ``gamma`` lies in (0, 1]."""
    if not 0.0 < gamma <= 1.0:
        raise ModelError(f"a submodel's size gamma lies in (0, 1], found {gamma}", gamma=gamma)


def cut(
    weights: Mapping[str, Array],
    gamma: float,
    groups: Groups,
    guards: Guards = NO_GUARDS,
    scales: Mapping[str, float] | None = None,
) -> ImportanceMasks:
    """Return the masks and thresholds of the ``gamma`` share of the tensors in ``groups``. gamma need not have been
    trained.

    Each group keeps exactly :func:`kept_count` entries, guarded ones first. A tensor guarded by ``min_keep`` may keep
    entries below its group's threshold; its own threshold is then its smallest kept |x|.

    Args:
        weights: Tensors by global name.
        gamma: Share of the entries, in (0, 1].
        groups: Names of the tensors that are ranked together.
        guards: Entries that are held regardless of rank.
        scales: Result of :func:`scales`, for the guard ``relative``.

    Raises:
        ModelError: gamma is out of range, a group has no entries, a tensor is missing, listed twice or not finite, or
            guards alone exceed the budget. The error then has the smallest gamma that is large enough.
    """
    check_gamma(gamma)
    _check(weights, groups)
    names = [name for group in groups for name in group]
    whole = guards.whole(names)
    divisors = _divisors(names, guards, scales)
    masks: dict[str, Mask] = {}
    theta: dict[str, float] = {}
    ranked: list[GroupThreshold] = []
    for group in groups:
        arrays = {name: weights[name] for name in group}
        outcome = (
            _keep_all(arrays)
            if gamma == 1.0
            else _keep_by_rank(arrays, gamma, whole, guards.min_keep, divisors)
        )
        masks.update(outcome[1])
        ranked.append(outcome[0])
        for name in group:
            dense = name in whole or gamma == 1.0
            scale = divisors.get(name, 1.0)
            theta[name] = 0.0 if dense else _tensor_theta(arrays[name], masks[name], outcome[0].theta * scale)
    ordered = [name for name in weights if name in masks]
    return ImportanceMasks(
        gamma, {name: masks[name] for name in ordered}, {n: theta[n] for n in ordered}, tuple(ranked), guards
    )


def top_mask(importance: Array, k: int) -> Mask:
    """Return a mask of the k largest entries of a flat array without NaN, ties by lowest index; 1 <= k <= size."""
    smallest = np.partition(importance, importance.size - k)[importance.size - k]
    mask: Mask = importance > smallest
    ties = np.flatnonzero(importance == smallest)
    mask[ties[: k - np.count_nonzero(mask)]] = True
    return mask


def _keep_all(arrays: Mapping[str, Array]) -> tuple[GroupThreshold, dict[str, Mask]]:
    """Return (result of the group, masks by name) that keep all entries of ``arrays``, with threshold 0."""
    entries = sum(array.size for array in arrays.values())
    masks: dict[str, Mask] = {name: np.ones(array.shape, np.bool_) for name, array in arrays.items()}
    return GroupThreshold(tuple(arrays), entries, entries, 0.0), masks


def _keep_by_rank(
    arrays: Mapping[str, Array],
    gamma: float,
    whole: frozenset[str],
    min_keep: int,
    divisors: Mapping[str, float],
) -> tuple[GroupThreshold, dict[str, Mask]]:
    """Return (result of a group, masks by name) that keep the largest and the guarded entries of the group.

    Args:
        arrays: Tensors of the group, by name.
        gamma: Share of the entries to keep.
        whole: Names of the tensors that are held whole.
        min_keep: Smallest number of kept entries of each tensor.
        divisors: Scale of each tensor, by which its magnitudes are divided. Empty: none are.

    Raises:
        ModelError: The guarded entries alone exceed the share.
    """
    importance = np.concatenate(
        [_importance(array, divisors.get(name)) for name, array in arrays.items()], dtype=None
    )
    k = kept_count(gamma, importance.size)
    guarded = _guarded_mask(arrays, whole, min_keep)
    if guarded is None:
        mask = top_mask(importance, k)
    else:
        _check_budget(tuple(arrays), gamma, k, guarded, _guarded_mask(arrays, whole, 0))
        mask = top_mask(np.where(guarded, np.inf, importance), k)
    group = GroupThreshold(tuple(arrays), importance.size, k, _round_down(_threshold(importance, mask)))
    return group, _split_mask(mask, arrays)


def _importance(array: Array, scale: float | None) -> Array:
    flat = np.abs(array.reshape(-1))
    # In float64, so that two magnitudes of one tensor that differ keep their order.
    return flat if scale is None else flat.astype(np.float64) / scale


def _threshold(importance: Array, kept: Mask) -> float:
    """Return the smallest importance kept by rank. Guarded entries below a dropped one are not counted.

    If all kept entries are guarded, return the largest dropped importance.
    """
    outside = np.max(importance, where=~kept, initial=-np.inf)
    inside = np.min(importance, where=kept & (importance >= outside), initial=np.inf)
    return float(inside if np.isfinite(inside) else outside)


def _tensor_theta(array: Array, mask: Mask, theta: float) -> float:
    """Return the threshold of a tensor: ``theta``, but at most its smallest kept magnitude."""
    return _round_down(min(theta, float(np.min(np.abs(array), where=mask, initial=np.inf))))


def _round_down(value: float) -> float:
    """Return the largest float32 number that is not above ``value``."""
    rounded = np.float32(value)
    return float(rounded if float(rounded) <= value else np.nextafter(rounded, np.float32(-np.inf)))


def _split_mask(flat: Mask, arrays: Mapping[str, Array]) -> dict[str, Mask]:
    """Return the flat mask split into the shapes of ``arrays``, by name."""
    ends = np.cumsum([array.size for array in arrays.values()])
    parts = np.split(flat, ends[:-1])
    return {
        name: part.reshape(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


def _guarded_mask(arrays: Mapping[str, Array], whole: frozenset[str], min_keep: int) -> Mask | None:
    """Return a flat mask of the entries that are held regardless of rank, or None if there are none.

    Args:
        arrays: Tensors by name.
        whole: Names of the tensors that are held whole.
        min_keep: Number of largest entries that each other tensor keeps. 0: none.
    """
    if not min_keep and whole.isdisjoint(arrays):
        return None
    parts: list[Mask] = []
    for name, array in arrays.items():
        least = array.size if name in whole else min(min_keep, array.size)
        parts.append(top_mask(np.abs(array.reshape(-1)), least) if least else np.zeros(array.size, np.bool_))
    return np.concatenate(parts)


def _check_budget(names: tuple[str, ...], gamma: float, k: int, guarded: Mask, dense: Mask | None) -> None:
    """Raise ModelError if the guarded entries are more than the budget ``k``. The error has a gamma that is large
    enough.

    Args:
        names: Names of the tensors.
        gamma: Share of the entries.
        k: Number of entries to keep.
        guarded: Flat mask of all guarded entries.
        dense: Flat mask of the entries of tensors that are held whole. None: there are none.
    """
    needed = int(np.count_nonzero(guarded))
    if needed <= k:
        return
    by_dense = 0 if dense is None else int(np.count_nonzero(dense))
    guilty = "dense" if by_dense > k else "min_keep" if not by_dense else "dense with min_keep"
    # Rounded up, so that what the message says does fit.
    fitting = min(1.0, math.ceil(needed / guarded.size * 1e6) / 1e6)
    raise ModelError(
        f"the guard {guilty} alone keeps {needed} of the {guarded.size} entries of the {len(names)} tensors that begin "
        f"with {names[0]!r}, but gamma={gamma:g} keeps k={k}; loosen the guard, or take gamma >= {fitting:g}",
        guard=guilty,
        k=k,
        needed=needed,
        gamma=gamma,
        smallest_gamma=fitting,
    )


def _divisors(
    names: Sequence[str], guards: Guards, scales: Mapping[str, float] | None
) -> Mapping[str, float]:
    """Return the scale of each tensor, by name, if importance is relative, else {}.

    Raises:
        ModelError: A scale is missing or not above 0.
    """
    if not guards.relative:
        return {}
    for name in names:
        scale = (scales or {}).get(name, 0.0)
        if not (scale > 0.0 and math.isfinite(scale)):
            raise ModelError(
                f"the guard 'relative' needs a positive scale of {name!r}, found {scale}; give cut the scales of the "
                "model's initial weights",
                name=name,
                scale=scale,
            )
    return scales or {}


def _check(weights: Mapping[str, Array], groups: Groups) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group:
            if name not in weights or name in seen:
                what = "is listed twice" if name in seen else "is not among the weights"
                raise ModelError(
                    f"the tensor {name!r} of a group {what}; list each maskable tensor once", name=name
                )
            seen.add(name)
            if not np.isfinite(weights[name]).all():
                raise ModelError(
                    f"{name!r} has entries that are NaN or infinite, so importance cannot rank it; go back to the last "
                    "good weights, and lower the learning rate",
                    name=name,
                )
        if sum(weights[name].size for name in group) == 0:
            raise ModelError(
                f"the group {group} has no entries to choose from; leave it out or merge it with another",
                group=group,
            )
    if not groups:
        raise ModelError("there is no group of tensors to choose from", groups=groups)
