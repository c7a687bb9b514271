"""Statistics of devices' data: the request, the groups of values, and the form of the integer sums that devices report."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Literal, get_args

import msgspec

from edgefl.errors import ConfigError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SeriesSpec, SoundSpec
from edgefl.wire.tensors import Array

STATISTICS = "statistics"
"""Name of the exchange in files and messages."""

Statistic = Literal["classes", "moments", "missing", "histogram", "lengths"]
STATISTIC_NAMES: tuple[Statistic, ...] = get_args(Statistic)

FRACTION_BITS = 30
"""Binary fraction digits of a value and of its square: each is rounded to the nearest multiple of 2^-30."""
LIMB_BITS = 30
"""Bits of a limb. Limb k of a sum counts 2^(30 k) times 2^-30. All limbs but the last are from 0 to 2^30 - 1 before they
are added up."""
VALUE_LIMBS, SQUARE_LIMBS = 2, 3
"""Limbs of a sum of values, and of a sum of squares."""
LARGEST = 2.0**30
"""Largest magnitude of a value that the moments cover."""
GATHER_S = 10.0
"""Time for which a server waits for devices to connect, if it does not know their number."""
MOST_CLASSES = 8192
"""Largest number of classes whose labels are counted."""
_MOST_GROUPS = 4096


class StatisticsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics that a server asks devices for.

    Attributes:
        ask: Names of statistics. Empty: all that the data have, with ``histogram`` if there are edges.
        edges: Ascending edges of the bins of a histogram, in the values that the model reads.
        devices: Number of devices to wait for. 0: those of ``round.min_devices`` if that is above 1, else all that
            connect within :data:`GATHER_S`.
    """

    ask: tuple[Statistic, ...] = ()
    edges: tuple[float, ...] = ()
    devices: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.ask) - set(STATISTIC_NAMES)):
            raise ConfigError(
                f"there is no statistic {', '.join(unknown)}: ask for {', '.join(STATISTIC_NAMES)}",
                unknown=unknown,
            )
        pairs = zip(self.edges, self.edges[1:], strict=False)
        if self.edges and (
            len(self.edges) < 2
            or not all(map(math.isfinite, self.edges))
            or any(low >= high for low, high in pairs)
        ):
            raise ConfigError(
                "edges of a histogram should be two or more finite numbers in ascending order, such as 0,0.5,1, found "
                f"{','.join(format(edge, 'g') for edge in self.edges)}",
                edges=self.edges,
            )
        if "histogram" in self.ask and not self.edges:
            raise ConfigError("a histogram needs the edges of its bins: give them, such as 0,0.25,0.5,0.75,1")

    def of(self, data: DataSpec, *, has_classes: bool) -> tuple[Statistic, ...]:
        """Return the statistics that this request asks for and that the data have, in the order of
        :data:`STATISTIC_NAMES`.

        Args:
            data: Shape and dtype of the devices' samples.
            has_classes: True if their labels are class numbers, not more than :data:`MOST_CLASSES`.

        Raises:
            ConfigError: The request names a statistic that such data do not have.
        """
        tokens = data.below > 0
        have: dict[Statistic, bool] = {
            "classes": has_classes,
            "moments": not tokens,
            "missing": not tokens,
            "histogram": not tokens and bool(self.edges),
            "lengths": tokens,
        }
        wanted = self.ask or tuple(name for name in STATISTIC_NAMES if have[name])
        if wrong := [name for name in wanted if not have[name]]:
            kind = "texts" if tokens else "numbers"
            raise ConfigError(
                f"samples that are {kind} have no {', '.join(wrong)}: ask for "
                f"{', '.join(name for name in STATISTIC_NAMES if have[name])}"
                + (
                    f"; labels are counted if they are class numbers below {MOST_CLASSES}"
                    if "classes" in wrong
                    else ""
                ),
                ask=self.ask,
            )
        return tuple(name for name in STATISTIC_NAMES if name in wanted)


class ValueGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of a sample's values that have statistics of their own: channels, or features.

    Attributes:
        kind: ``channel``, ``feature``, or ``value`` if all values are one group.
        axis: Axis of a sample along which the groups lie; None for one group.
        names: Names of the groups.
    """

    kind: Literal["channel", "feature", "value"]
    axis: int | None
    names: tuple[str, ...]

    @classmethod
    def of(cls, data: DataSpec) -> ValueGroups:
        """Return the groups of samples: features of a vector, channels (the first axis) of all else."""
        reader, shape = data.reader, data.shape
        columns: tuple[str, ...] = getattr(reader, "columns", ())
        axis = len(shape) - 1 if isinstance(reader, SeriesSpec) and reader.channels_last else 0
        if not shape or shape[axis] > _MOST_GROUPS or (isinstance(reader, SoundSpec) and len(shape) == 1):
            return cls(kind="value", axis=None, names=("all",))
        names = columns if len(columns) == shape[axis] else tuple(map(str, range(shape[axis])))
        return cls(kind="feature" if len(shape) == 1 or columns else "channel", axis=axis, names=names)


def value_of(limbs: Array) -> list[Fraction]:
    """Return the exact sums, one for each group, that ``limbs`` (limbs, groups) hold."""
    return [
        sum(
            (
                Fraction(int(limb) << (LIMB_BITS * place), 1 << FRACTION_BITS)
                for place, limb in enumerate(each)
            ),
            Fraction(),
        )
        for each in limbs.T.tolist()
    ]
