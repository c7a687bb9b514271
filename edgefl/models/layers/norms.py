"""Which normalisation a convolutional model has: one switch for all of its layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from edgefl.errors import ModelError
from edgefl.models.layers.explicit import BatchNorm, BnMode

NormKind = Literal["bn", "gn"]
MakeNorm = Callable[[int], nn.Module]
"""From a number of channels to the layer that normalises them."""

GROUPS = 8
KEEP = 0.9


def make_norm(
    kind: NormKind, *, mode: BnMode = "global", keep: float = KEEP, groups: int = GROUPS
) -> MakeNorm:
    """``bn``: :class:`BatchNorm` with ``mode`` and ``keep``. ``gn``: group norm with ``groups`` groups of neighbours.

    Group norm has the same affine pair of tensors and no statistics, so there is nothing of it to send but what is
    trained: the remedy where moving statistics of skewed clients average badly (fedbat.md 8.4). The paper does not say
    in how many groups; 8 divide the widths of every model here. ModelError for another kind, for an option of the one
    beside the other, and for groups that do not divide the channels.
    """
    if kind == "bn":
        if groups != GROUPS:
            raise ModelError(
                f"batch norm has no groups, found groups={groups} with norm='bn': leave groups out, or take norm='gn'",
                groups=groups,
            )
        return partial(BatchNorm, mode=mode, keep=keep)
    if kind != "gn":
        raise ModelError(f"a norm is 'bn' (batch norm) or 'gn' (group norm), found {kind!r}", norm=kind)
    if mode != "global":
        raise ModelError(
            f"group norm has no batch norm mode, found bn={mode!r} with norm='gn': leave bn out, or take norm='bn'",
            bn=mode,
        )
    if keep != KEEP:
        raise ModelError(
            f"group norm keeps no statistics, found bn_keep={keep} with norm='gn': leave bn_keep out, or take norm='bn'",
            keep=keep,
        )
    return partial(_group_norm, groups=groups)


def _group_norm(channels: int, *, groups: int) -> nn.GroupNorm:
    if groups < 1 or channels % groups:
        raise ModelError(
            f"{groups} groups do not divide {channels} channels: set groups to a divisor of every width",
            groups=groups,
            channels=channels,
        )
    return nn.GroupNorm(groups, channels)
