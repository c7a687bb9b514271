"""Metrics of every user before and after a few steps on the user's own data (per_fedavg.md 2.6).

An adapter computes the steps for each user::

    users = [User.of(0, train=(x, y), test=(x, y))]
    setting, adapter = EvaluationSetting(alpha=0.03), AdaptableModel(algorithm, weights)

The report has the means over all users. ::

    report = summed_up(setting, [evaluate_user(adapter, user, setting) for user in users])
    report.mean, report.before, report.worst_decile

All methods get the same support batches, which depend only on (seed, user, step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from edgefl.algorithms.personalize import ALPHA
from edgefl.algorithms.submodels.frozen_forward import multi_step_forward
from edgefl.analysis.personal.report import EvaluationSetting, UserReport
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, arrays, prefixed, role_of, select
from edgefl.errors import ConfigError, DataError
from edgefl.wire.bundle.manifest import SAMPLE
from edgefl.wire.metrics import add_sums
from edgefl.wire.tensors import Array
from edgefl_device.data import support
from edgefl_device.data.support import SampleShards
from edgefl_device.personal.personalize import AdaptationPoint, point_of

EVALUATION_ROWS = 500
"""Rows of one evaluation call; static batch norm needs many."""

CLASS_COUNTS = "data.class_counts"
"""Input port of the number of samples of each class in the user's support."""

Rows = Mapping[str, Tensor]
"""Samples in the layout of the trained part (``x``), their labels (``y``), and further inputs by name."""


@dataclass(frozen=True, eq=False)
class User:
    """A user's samples and shards.

    Attributes:
        number: number of the user, which seeds its random streams.
        x: samples, (n, *sample).
        y: labels, (n, *label).
        shards: rows of the train and of the test shard.
        name: name in reports; the number by default.
        group: class of users with a reported mean of its own.
        others: further inputs by name, (n, *input).

    Raises:
        DataError: if the shards share a row or exceed the samples.
    """

    number: int
    x: Tensor
    y: Tensor
    shards: SampleShards
    name: str = ""
    group: str = ""
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = np.concatenate([self.shards.train, self.shards.test])
        if len(np.unique(rows)) != len(rows) or (
            len(rows) and not 0 <= rows.min() <= rows.max() < len(self.y)
        ):
            raise DataError(
                f"user {self.name or self.number}: the train and the test shard should be different rows from 0 to "
                f"{len(self.y) - 1}",
                user=self.number,
            )

    @classmethod
    def of(
        cls,
        number: int,
        *,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        name: str = "",
        group: str = "",
        others: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> User:
        """Return a user whose train and test samples are separate arrays.

        Args:
            number: number of the user.
            train: (x, y) of the train shard.
            test: (x, y) of the test shard.
            name: name in reports.
            group: class of users with a reported mean of its own.
            others: further inputs by name, each for (train, test).
        """
        size, every = len(train[1]), len(train[1]) + len(test[1])
        x, y = torch.cat([train[0], test[0]]), torch.cat([train[1], test[1]])
        more = {name: torch.cat(both) for name, both in (others or {}).items()}
        return cls(number, x, y, SampleShards(np.arange(size), np.arange(size, every)), name, group, more)


@dataclass(frozen=True, eq=False)
class AdaptableModel:
    """Model of a tier, to be adapted to single users.

    An adaptation step returns new tensors and leaves ``weights`` unchanged.

    Attributes:
        algorithm: algorithm with the functions ``personalize`` and ``evaluate``.
        weights: tensors of both functions by name.
        prefix: forward passes of frozen chunks before the trained part.

    Raises:
        ConfigError: if the algorithm has no function ``personalize``.
    """

    algorithm: Algorithm
    weights: Mapping[str, Tensor]
    prefix: Sequence[Function] = ()

    def __post_init__(self) -> None:
        if self.algorithm.personalize is None:
            raise ConfigError(
                f"algorithm {self.algorithm.name!r} has no personalize function; give it one by "
                "edgefl.algorithms.personalize.personalize",
                algorithm=self.algorithm.name,
            )

    @property
    def step(self) -> Function:
        assert self.algorithm.personalize is not None
        return self.algorithm.personalize

    def rows(self, user: User, at: Array) -> Rows:
        """Return samples of a user as parts of a batch, by name: ``x``, ``y``, and further inputs.

        ``at``: indices of the samples, int64 (m,). If the model has frozen units before the trained ones, ``x`` is the
        output of the frozen units.
        """
        rows = torch.from_numpy(at)
        x, others = user.x[rows], {name: each[rows] for name, each in user.others.items()}
        others |= {SAMPLE: x}
        if self.prefix:
            x = multi_step_forward(self.prefix, self.weights, x, others)
        return {"x": x, "y": user.y[rows], **others}


def evaluate_user(adapter: AdaptableModel, user: User, setting: EvaluationSetting) -> UserReport:
    """Evaluate one user before and after adaptation steps on its own samples.

    Args:
        adapter: the model to adapt.
        user: the user.
        setting: the protocol, with the numbers of steps after which metrics are taken.

    Returns:
        The user's metrics by number of steps.

    Raises:
        DataError: if the protocol cannot split the user's samples.
    """
    labels = user.y.numpy()
    parts = support.split(setting.protocol, user.shards, labels, seed=setting.seed, user=user.number)
    judged = adapter.rows(user, parts.query)
    same = np.array_equal(parts.support, parts.query)
    batches = _SupportBatches(
        adapter, user.number, judged if same else adapter.rows(user, parts.support), setting
    )
    points, now = [], prefixed("weights", adapter.weights)
    for done in range(setting.curve[-1] + 1):
        if done in setting.curve:
            points.append(_evaluate_rows(adapter.algorithm.evaluate, now, judged, done))
        if done < setting.curve[-1] and setting.alpha > 0:
            stepped = select(adapter.step(batches.feeds(now, done)), "weights")
            now = now | prefixed("weights", stepped)
    return UserReport(
        number=user.number,
        name=user.name or str(user.number),
        group=user.group,
        samples=len(user.shards.train) or len(user.shards.test),
        support=len(parts.support),
        query=len(parts.query),
        leaks=parts.leaks,
        majority=support.majority(labels, parts.support, parts.query),
        curve=tuple(points),
    )


@dataclass(frozen=True, eq=False)
class _SupportBatches:
    """Inputs of a user's adaptation steps: batches of its ``support`` samples, noise, and the scalars of ``setting`` and
    ``adapter``.
    """

    adapter: AdaptableModel
    user: int
    support: Rows
    setting: EvaluationSetting

    def feeds(self, weights: Tensors, step: int) -> Tensors:
        """Return all inputs of adaptation step number ``step`` (from 0), by the names of the function's inputs.

        They include ``weights``, a batch of the support samples, noise and scalars.

        Raises:
            ConfigError: if a scalar has no value, or the noise has another batch size.
        """
        ports, y = self.adapter.step.inputs, self.support["y"]
        at = torch.from_numpy(self._positions(step))
        inputs = weights | {f"batch.0.{part}": each[at] for part, each in self.support.items()}
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        noise = [name for name in ports if role_of(name) == "noise"]
        for name, spec in ports.items():
            if name in noise:
                place = noise.index(name)
                made = support.uniform(spec.shape, step, place, seed=self.setting.seed, user=self.user)
                inputs[name] = torch.from_numpy(made).to(dtype)
            elif role_of(name) == "hyper":
                inputs[name] = torch.tensor(self._scalar(name.partition(".")[2]), dtype=dtype)
            elif name == CLASS_COUNTS:
                ignored = ports["batch.0.y"].ignored
                counted = y.reshape(-1) if ignored is None else y[y != ignored]
                inputs[name] = torch.bincount(counted, minlength=spec.shape[0])
        return {name: inputs[name] for name in ports}

    def _positions(self, step: int) -> Array:
        """Return the indices of the support samples in the batch of step number ``step``.

        A support smaller than a batch is used whole. If noise fixes the batch size, its samples repeat instead.

        Raises:
            ConfigError: The algorithm draws noise for batches of another size than the setting's.
        """
        ports, wanted = self.adapter.step.inputs, self.setting.batch
        fixed = any(role_of(name) == "noise" and spec.shape for name, spec in ports.items())
        own = ports["batch.0.x"].shape[0]
        if fixed and own != wanted:
            raise ConfigError(
                f"algorithm {self.adapter.algorithm.name!r} draws noise for batches of {own}, and "
                f"personalization has batches of {wanted}: set its batch to {own}",
                batch=wanted,
            )
        key = {"seed": self.setting.seed, "user": self.user}
        return support.batch_rows(len(self.support["y"]), wanted, step, clip=not fixed, **key)

    def _scalar(self, name: str) -> float:
        known = {**self.adapter.algorithm.hyper, ALPHA: self.setting.alpha}
        if name not in known:
            raise ConfigError(
                f"personalization reads hyper.{name}, for which algorithm {self.adapter.algorithm.name!r} has no "
                f"value; list it "
                "in Algorithm.hyper",
                hyper=name,
            )
        return known[name]


def _evaluate_rows(evaluate: Function, weights: Tensors, judged: Rows, steps: int) -> AdaptationPoint:
    """Return the mean metrics over all rows of ``judged``, computed in groups of nearly equal size.

    Args:
        evaluate: function that computes metrics of a batch.
        weights: weights after the steps, by name.
        judged: samples to evaluate on, as parts of a batch.
        steps: number of adaptation steps, for the result.
    """
    count, sums = len(judged["y"]), dict[str, Array]()
    own = {name: tensor for name, tensor in weights.items() if name in evaluate.inputs}
    dtype = next((tensor.dtype for tensor in own.values() if tensor.is_floating_point()), torch.float32)
    for rows in torch.arange(count).tensor_split(math.ceil(count / EVALUATION_ROWS)):
        batch = {part: each[rows] for part, each in judged.items()}
        batch |= {"mask": torch.ones(len(rows), dtype=dtype)}
        sums = add_sums(sums, arrays(select(evaluate(own | prefixed("batch.0", batch)), "metric")))
    return point_of(steps, evaluate.metrics, sums)
