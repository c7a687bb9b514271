"""What personalization gave all users together: numbers for people and for programs. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from device_runtime.data import support
from edgefl.wire.errors import DataError

DECILE = 0.1


@dataclass(frozen=True)
class Point:
    """Mean loss and accuracy after ``steps`` steps."""

    steps: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class UserReport:
    """One user. ``samples`` is what it weighs in the weighted mean (its train shard, else its test shard), ``support`` and
    ``query`` are numbers of rows, ``majority`` is the accuracy of its own most frequent class, where labels are classes."""

    number: int
    name: str
    group: str
    samples: int
    support: int
    query: int
    leaks: bool
    majority: float | None
    curve: tuple[Point, ...]

    def after(self, steps: int) -> Point:
        return next(point for point in self.curve if point.steps == steps)

    @property
    def before(self) -> float:
        """Accuracy without a step."""
        return self.curve[0].accuracy


class Evaluated(Protocol):
    """What a report says of how it was made."""

    @property
    def alpha(self) -> float: ...
    @property
    def batch(self) -> int: ...
    @property
    def protocol(self) -> support.Protocol: ...
    @property
    def seed(self) -> int: ...
    @property
    def headline(self) -> int: ...


@dataclass(frozen=True)
class PersonalReport:
    """All users under one protocol; accuracies from 0 to 1, all users alike unless it says otherwise.

    ``mean`` is the headline: after ``steps`` steps; ``before`` that without one. ``std`` is over users, of the population;
    ``worst_decile`` the mean of the tenth of the users (at least one) that fare worst, ``weighted`` the mean by samples.
    ``majority`` is what each user's own most frequent class reaches, the level below which a method has learned nothing.
    ``groups`` has the means of groups of users. ``left_out`` names users that could not be evaluated, and why.
    ``leaks``: samples that judge were adapted to.
    """

    protocol: support.Protocol
    leaks: bool
    note: str
    alpha: float
    batch: int
    steps: int
    seed: int
    mean: float
    before: float
    std: float
    worst_decile: float
    weighted: float
    majority: float | None
    majority_weighted: float | None
    groups: Mapping[str, float]
    curve: tuple[Point, ...]
    users: tuple[UserReport, ...]
    left_out: Mapping[str, str]


def summed_up(
    setting: Evaluated, users: Sequence[UserReport], left_out: Mapping[str, str] | None = None
) -> PersonalReport:
    """The report of these ``users``. DataError without any."""
    if not users:
        reasons = "; ".join(f"{name}: {why}" for name, why in (left_out or {}).items())
        raise DataError(f"there is no user to evaluate{': ' if reasons else ''}{reasons}", left_out=left_out)
    after = [user.after(setting.headline).accuracy for user in users]
    samples = [user.samples for user in users]
    majority = [user.majority for user in users if user.majority is not None]
    known = len(majority) == len(users)
    return PersonalReport(
        protocol=setting.protocol,
        leaks=any(user.leaks for user in users),
        note=support.NOTES[setting.protocol],
        alpha=setting.alpha,
        batch=setting.batch,
        steps=setting.headline,
        seed=setting.seed,
        mean=mean(after),
        before=mean([user.before for user in users]),
        std=math.sqrt(mean([(value - mean(after)) ** 2 for value in after])),
        worst_decile=worst_decile(after),
        weighted=mean(after, samples),
        majority=mean(majority) if known else None,
        majority_weighted=mean(majority, samples) if known else None,
        groups={
            group: mean([value for value, user in zip(after, users, strict=True) if user.group == group])
            for group in sorted({user.group for user in users if user.group})
        },
        curve=tuple(_mean_point([user.after(point.steps) for user in users]) for point in users[0].curve),
        users=tuple(users),
        left_out=dict(left_out or {}),
    )


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The (weighted) mean, exactly rounded, so that it depends on no order."""
    shares = [1.0] * len(values) if weights is None else weights
    return math.fsum(value * share for value, share in zip(values, shares, strict=True)) / math.fsum(shares)


def worst_decile(values: Sequence[float]) -> float:
    """The mean of the lowest tenth, rounded up to whole users."""
    return mean(sorted(values)[: math.ceil(len(values) * DECILE - 1e-9)])


def _mean_point(points: Sequence[Point]) -> Point:
    return Point(points[0].steps, mean([p.loss for p in points]), mean([p.accuracy for p in points]))
