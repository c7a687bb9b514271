"""Users with few classes each, and algorithms that can personalize, for the tests of evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.personalize import personalize
from edgefl.analysis.personal.evaluate import AdaptableModel, User, evaluate_user
from edgefl.analysis.personal.report import EvaluationSetting, PersonalReport, summarize
from edgefl.contract.algorithm import Algorithm
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.submodels.catalog import build
from edgefl.submodels.submodel import Submodel
from tests.invariants.embracingfl.tiny import samples, tiny

BATCH = 8


def personal(submodel: Submodel, batch: int = BATCH, **options: float) -> Algorithm:
    """Plain SGD with the step that adapts."""
    objective = Objective.of(submodel)
    algorithm = sgd(objective, batch=batch, steps=2, momentum=0.0, weight_decay=0.0, **options)
    adapted = personalize(objective, batch)
    return replace(algorithm, personalize=adapted, hyper={**algorithm.hyper, "alpha": 0.1})


def whole(model: str = "mlp", batch: int = BATCH) -> tuple[ModelSpec, Algorithm]:
    """A small model, and the algorithm that trains all of it."""
    spec = tiny(model)
    return spec, personal(build(spec, "output_side", cut=0), batch)


def evaluate_users(
    algorithm: Algorithm, weights: Mapping[str, Tensor], users: Sequence[User], **options: Any
) -> PersonalReport:
    """Evaluate the users by a setting of these options."""
    setting = EvaluationSetting(**options)
    adapter = AdaptableModel(algorithm, weights)
    return summarize(setting, [evaluate_user(adapter, user, setting) for user in users])


def users_of(
    spec: ModelSpec,
    sizes: Mapping[int, tuple[int, int]],
    *,
    classes: int = 2,
    dtype: torch.dtype | None = None,
) -> list[User]:
    """A user for each number: (training, test) samples of ``classes`` classes, which differ between users."""
    return [
        User.of(
            number,
            train=_shard(spec, train, 10 + number, number, classes, dtype),
            test=_shard(spec, test, 90 + number, number, classes, dtype),
            group="even" if number % 2 == 0 else "odd",
        )
        for number, (train, test) in sizes.items()
    ]


def _shard(
    spec: ModelSpec, count: int, seed: int, number: int, classes: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    x, y = samples(spec, max(count, 1), seed)
    y = (number + y.remainder(classes)).remainder(spec.classes)
    # The class shows in the samples, so that a step in its direction helps.
    x = x + y.reshape(-1, *[1] * (x.dim() - 1)) / 4
    return (x if dtype is None else x.to(dtype))[:count], y[:count]
