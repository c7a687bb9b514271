"""Each kind of loss in a training step and in evaluation, beside torch on each engine."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses import (
    CTC,
    AbsoluteError,
    BinaryCrossEntropy,
    CausalLM,
    CrossEntropy,
    Huber,
    InfoNCE,
    Loss,
    NTXent,
    Quantile,
    SequenceCrossEntropy,
    SquaredError,
    own_loss,
)
from edgefl.models.spec import sequential
from edgefl.objective.objective import Objective, SelfDistillation
from tests.pairs import FORMATS, by_default, pairs
from tests.parity.forms import checked


def relative(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y).abs() / y.abs().clamp_min(1.0)).mean(dim=1)


def relative_to_all(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).abs().sum() / y.abs().sum().clamp_min(1.0)


LOSSES: dict[str, tuple[Loss, tuple[int, ...]]] = {
    "classes": (CrossEntropy(), (5,)),
    "one logit": (CrossEntropy(), (1,)),
    "pixels": (CrossEntropy(ignore_index=255), (3, 4, 2)),
    "tokens": (SequenceCrossEntropy(ignore_index=-100, label_smoothing=0.1), (5, 4)),
    "next tokens": (CausalLM(), (5, 4)),
    "answers": (BinaryCrossEntropy(), (6,)),
    "squared": (SquaredError(), (2, 3)),
    "absolute": (AbsoluteError(), (2, 3)),
    "huber": (Huber(delta=0.5), (3,)),
    "quantiles": (Quantile(levels=(0.1, 0.5, 0.9)), (2, 3)),
    "two views": (InfoNCE(temperature=0.5), (2, 6)),
    "all views": (NTXent(), (2, 6)),
    "a text": (CTC(length=2), (5, 4)),
    "own": (own_loss(relative, TensorSpec((3,))), (3,)),
    "own of a batch": (own_loss(relative_to_all, TensorSpec((3,))), (3,)),
}
TRAINED_BY = ("sgd", "fedprox", "mimelite", "adamw", "per_fedavg")
# The gradient of all data needs one loss per sample.
ROWS = [row for row in pairs(tuple(LOSSES), TRAINED_BY, FORMATS) if row[:2] != ("own of a batch", "mimelite")]
DEFAULT = [
    (name, "mimelite" if place in (2, 4, 11) else "sgd", FORMATS[place % 2])
    for place, name in enumerate(LOSSES)
]
"""The slow ring has every loss with every algorithm and engine; `mimelite` adds up a gradient over masked batches."""


def steps(name: str, algorithm: str) -> list[Function]:
    """The training steps of ``algorithm`` on a layer with this loss, and its evaluation."""
    loss, output = LOSSES[name]
    module = sequential([("head", nn.Linear(3, output[-1]))])
    made = algorithms.build(algorithm, Objective(module, TensorSpec((*output[:-1], 3)), loss), batch=4)
    own = {id(phase.function): phase.function for each in made.exchanges for phase in each.phases}
    return [*own.values(), made.evaluate]


@pytest.mark.parametrize("name", LOSSES)
def test_clients_in_one_call_lose_what_each_loses_alone(name: str) -> None:
    step = steps(name, "sgd")[0]
    alone = [step.example(seed) for seed in (1, 2)]
    together = {port: torch.stack([each[port] for each in alone]) for port in step.inputs}

    found = torch.vmap(step.fn)(together)

    for client, example in enumerate(alone):
        wanted = step(example)
        torch.testing.assert_close({port: found[port][client] for port in wanted}, wanted)


CLASSES = ("pixels", "tokens", "next tokens")
WAYS: dict[str, dict[str, Any]] = {
    "masked": {"masked": True},
    "distilled": {"distilled": SelfDistillation(0.5)},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "form"), product(CLASSES, WAYS, FORMATS))
def test_masked_loss_and_distillation_find_classes(name: str, way: str, form: str) -> None:
    loss, output = LOSSES[name]
    module = sequential([("head", nn.Linear(3, output[-1]))])
    objective = Objective(module, TensorSpec((*output[:-1], 3)), loss, **WAYS[way])
    step = algorithms.build("sgd", objective, batch=4).phases[0].function
    assert not checked(form, step, seed=3).rounding


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "algorithm", "form"), by_default(sorted({*ROWS, *DEFAULT}), DEFAULT))
def test_every_loss_is_trained_and_evaluated_as_in_torch(name: str, algorithm: str, form: str) -> None:
    for function in steps(name, algorithm):
        assert not checked(form, function, seed=2).rounding
