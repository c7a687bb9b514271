"""Local AdamW on a transformer, beside torch's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.support.reference import run_round

STEPS, LR, DECAY = 4, 3e-3, 0.3


def _transformer() -> ModelSpec:
    """In float64: biases of keys have gradient 0, of whose rounding Adam would make full steps."""
    spec = build_model("vit", size=8, width=12, in_channels=1, classes=3)
    spec.module.double()
    return replace(spec, sample=TensorSpec(spec.sample.shape, torch.float64))


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64), torch.arange(8) % 3


def _ours(spec: ModelSpec, batch: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
    objective = Objective.of(OutputSide(spec, 0))
    assert not objective.noise(8)
    algorithm = algorithms.build("adamw", objective, batch=8, steps=STEPS, lr=LR, weight_decay=DECAY)

    def feed(_function: Function, _step: int) -> Tensors:
        return {"batch.0.x": batch[0], "batch.0.y": batch[1]}

    return run_round(algorithm, {n: t.clone() for n, t in spec.weights.items()}, feed).update


def _theirs(spec: ModelSpec, batch: tuple[torch.Tensor, torch.Tensor], *, decay_all: bool) -> Tensors:
    kernels: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for path, module in spec.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            kernel = parameter.dim() >= 2 and not isinstance(module, nn.Embedding)
            (kernels if kernel or decay_all else others).append((f"{path}.{name}", parameter))
    groups = [
        {"params": [parameter for _, parameter in group], "weight_decay": decay}
        for group, decay in ((kernels, DECAY), (others, 0.0))
        if group
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    spec.module.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(spec.module(batch[0]), batch[1]).backward()
        optimizer.step()
    return dict(spec.weights)


def test_steps_on_a_transformer_equal_torchs_adamw(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    ours, theirs = _ours(_transformer(), batch), _theirs(_transformer(), batch, decay_all=False)

    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_decay_of_biases_and_norms_would_show(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    ours, theirs = _ours(_transformer(), batch), _theirs(_transformer(), batch, decay_all=True)

    apart = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
    assert max(apart[name] for name in apart if theirs[name].dim() == 1) > 1e-3
