"""Width slices that are far larger than they were asked for, as operations hold channels that no rule can cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from edgefl.submodels.channels.axes import Atom, atoms
from edgefl.submodels.channels.selection import Channels, counts, elements, leading
from edgefl.wire.errors import ModelError

Keep: TypeAlias = Callable[[float, int], int]
"""(ratio, size): how many of ``size`` channels stay."""
_Stuck: TypeAlias = Mapping[str, Mapping[Atom, int]]

# Tensors that an error tells about; it carries them all.
_TOLD = 4
# Reasons for which a dimension is whole in any smaller model: nobody takes it for the width of a layer.
_MEANT = (
    "the model's input", "the model's output", "nothing reads it", "positions", "rows are looked up",
    "entries are looked up", "entries are taken by their number", "padding",
)  # fmt: skip


def check_share(model: str, channels: Channels, ratio: float, keep: Keep) -> None:
    """Raises ModelError, with the operations and what fits, where the slice of ``ratio`` is far too large for them."""
    stuck = _stuck(channels)
    if not stuck or not _is_bloated(channels, stuck, ratio, keep):
        return
    selection = leading(counts(channels, partial(keep, ratio)))
    every = elements(channels, {})
    share = elements(channels, selection) / every
    smallest = elements(channels, leading(counts(channels, lambda _: 1))) / every
    largest = sorted(stuck, key=lambda name: -elements(channels, selection, [name]))
    reasons = {name: _told(stuck[name]) for name in largest}
    reason_text = "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:_TOLD])
    fits = _smallest_gamma(channels, stuck, ratio, keep)
    raise ModelError(
        f"a slice of {model} of gamma {ratio**2:.4g} would keep {100 * share:.1f} % of its entries, for there are "
        f"channels that no rule can cut ({reason_text}). The smallest gamma that fits is {fits:.2g}; at any, at least "
        f"{100 * smallest:.1f} % stays. Tiers of kind output_side or importance fit any model",
        model=model,
        gamma=ratio**2,
        share=share,
        smallest=smallest,
        fits=fits,
        reasons=reasons,
    )


def _stuck(channels: Channels) -> _Stuck:
    """Per state tensor that has some, the groups of channels that stay whole, and their dimension."""
    stuck: dict[str, Mapping[Atom, int]] = {}
    for name, axes in channels.axes.items():
        own = {atom: dim for dim, axis in enumerate(axes) for atom in atoms(axis) if _is_stuck(atom)}
        if own:
            stuck[name] = own
    return stuck


def _is_stuck(atom: Atom) -> bool:
    return atom.reason is not None and not atom.reason.startswith(_MEANT)


def _told(own: Mapping[Atom, int]) -> str:
    return ", ".join(
        f"{atom.size} entries of dimension {dim} because of {atom.reason}" for atom, dim in own.items()
    )


def _is_bloated(channels: Channels, stuck: _Stuck, ratio: float, keep: Keep) -> bool:
    """Whether far more stays than if the stuck channels were cut too, and most of it is in their tensors."""
    selection = leading(counts(channels, partial(keep, ratio)))
    freed = leading({atom: keep(ratio, atom.size) for own in stuck.values() for atom in own})
    every, slice_size = elements(channels, {}), elements(channels, selection)
    meant = max(ratio**2, elements(channels, {**selection, **freed}) / every)
    # Twice as much as was meant or, where that is much already, more than halfway to the whole model.
    is_large = slice_size / every > min(2 * meant, (1 + meant) / 2)
    return is_large and 2 * elements(channels, selection, list(stuck)) > slice_size


def _smallest_gamma(channels: Channels, stuck: _Stuck, ratio: float, keep: Keep) -> float:
    """In hundredths, above the refused ratio; 1 is the model itself."""
    tried = (number / 100 for number in range(math.floor(100 * ratio**2) + 1, 100))
    return next((gamma for gamma in tried if not _is_bloated(channels, stuck, math.sqrt(gamma), keep)), 1.0)
