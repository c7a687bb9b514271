"""A module beside the units that it was cut into: whether they compute the same, and how long torch takes to train it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.graph.output import Output, giving
from edgefl.models.layers.given import Given, called, joined
from edgefl.models.losses.loss import training_loss
from edgefl.models.spec import ModelSpec
from edgefl.models.user_code import innermost
from edgefl.wire.errors import ModelError

AGREES = 1e-3
"""Largest difference of an output, relative to the largest of it: both sides run torch's own kernels."""
WARM_UP, STEPS = 2, 5


@dataclass(frozen=True)
class AsItCame:
    """``step_ms``: the median training step by torch, on one thread, of the module as it came: forward, the loss, backward
    and ``torch.optim.SGD``. ``difference``: the largest between its output in inference and that of its units, relative to
    the output's largest magnitude."""

    step_ms: float = 0.0
    difference: float = 0.0


def as_it_came(
    module: nn.Module, spec: ModelSpec, first: str, batch: int, seed: int, output: Output = None
) -> AsItCame:
    """Try ``module``, of which ``spec`` was cut, on ``batch`` random samples; ``first`` is what it calls its first input.

    ModelError where it fails on them, or where the units compute something else.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = _random(spec.sample, batch, generator), _random(spec.label, batch, generator)
    others = {name: _random(each, batch, generator) for name, each in spec.others.items()}
    own = _reading(copy.deepcopy(module), first, spec, others)
    with giving(own, output), _one_thread():
        try:
            difference = _difference(own, spec, x, others)
            step_ms = _step_ms(own, spec, x, y)
        except (RuntimeError, IndexError, ValueError) as error:
            source = innermost(error)
            raise ModelError(
                f"{type(module).__name__} fails in torch on random samples: {error}"
                + (f" (at {source})" if source else ""),
                model=spec.name,
                source=source,
            ) from error
    if not difference <= AGREES:
        raise ModelError(
            f"cut into units, {type(module).__name__} gives another output than as it came: they differ by {difference:.1e} "
            "of its largest value in inference; please report the model",
            difference=difference,
        )
    return AsItCame(step_ms, difference)


def _reading(module: nn.Module, first: str, spec: ModelSpec, others: Mapping[str, Tensor]) -> nn.Module:
    """``module`` as one that takes its first input and has the others: in place."""
    if not others:
        return module
    joined(module, {first: spec.sample, **spec.others})
    for part in module.modules():
        if isinstance(part, Given):
            part.value = others[part.name]
    return module


@torch.no_grad()
def _difference(module: nn.Module, spec: ModelSpec, x: Tensor, others: Mapping[str, Tensor]) -> float:
    units = copy.deepcopy(spec.module).eval()
    found = called(units, {"x": x, **others})
    wanted: Tensor = module.eval()(x)
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def _step_ms(module: nn.Module, spec: ModelSpec, x: Tensor, y: Tensor) -> float:
    module.train()
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=1e-3)
    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        training_loss(spec.loss, module(x), y).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[WARM_UP:])


def _random(spec: TensorSpec, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *spec.shape)
    if spec.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=spec.dtype)
    return torch.randint(0, spec.below or 2, shape, generator=generator).to(spec.dtype)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As a device trains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
