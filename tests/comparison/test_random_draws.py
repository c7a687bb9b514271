"""Draws of a module: numbers that torch repeats are refused, all others become new numbers of each step."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from edgefl.comparison.compare import compare
from edgefl.comparison.random_draws import GeneratorStates, RandomDrawMode, RandomStream
from edgefl.models.split import split
from tests.comparison.test_compare import SAMPLE, Net
from tests.support.errors import ModelError, refuses

Draws = Callable[[Tensor], Tensor]
OWN = torch.Generator().manual_seed(7)
KEPT = OWN.get_state()


def made(h: Tensor) -> Tensor:
    return h * torch.rand(6, generator=torch.Generator().manual_seed(0))


def unseeded(h: Tensor) -> Tensor:
    return h + torch.randn(6, generator=torch.Generator())


def seeded(h: Tensor) -> Tensor:
    return h + torch.randn(6, generator=OWN.manual_seed(7))


def put_back(h: Tensor) -> Tensor:
    OWN.set_state(KEPT)
    return torch.empty_like(h).bernoulli_(0.5, generator=OWN)


def process_wide(h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(h)


def of_c(h: Tensor) -> Tensor:
    torch.default_generator.manual_seed(0)
    return F.dropout(h)


def forked(h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        return nn.init.normal_(torch.empty_like(h))


def between_layers(h: Tensor) -> Tensor:
    torch.manual_seed(0)
    out: Tensor = nn.GRU(6, 6, 2, dropout=0.5)(h)[0]
    return out


def shared(h: Tensor) -> Tensor:
    """One mask for two tensors, as reversible layers draw it, and another one in the next step."""
    state = torch.get_rng_state()
    first = F.dropout(h)
    torch.set_rng_state(state)
    return first + F.dropout(2 * h)


def fresh(h: Tensor) -> Tensor:
    return F.dropout(h) + torch.rand(6, generator=OWN)


def anew(h: Tensor) -> Tensor:
    OWN.seed()
    torch.seed()
    return fresh(h)


def run(draws: Draws) -> list[Tensor]:
    """Return the results of two steps, and leave all generators as they were."""
    before, generators = OWN.get_state(), GeneratorStates()
    results = []
    with torch.random.fork_rng(devices=[]):
        for step in range(2):
            with RandomDrawMode(RandomStream(step), generators):
                results.append(draws(torch.ones(4, 6)))
    OWN.set_state(before)
    return results


@pytest.mark.parametrize(
    "draws", [made, unseeded, seeded, put_back, process_wide, of_c, forked, between_layers, shared]
)
def test_numbers_that_torch_repeats_are_refused(draws: Draws) -> None:
    with refuses(ModelError, refused=True, repeated=True):
        run(draws)


@pytest.mark.parametrize("draws", [fresh, anew])
def test_numbers_that_torch_draws_anew_are_others_in_each_step(draws: Draws) -> None:
    one, other = run(draws)
    assert not torch.equal(one, other)


def test_numbers_of_each_sample_in_vmap_are_refused() -> None:
    def dropped(h: Tensor) -> Tensor:
        return torch.vmap(F.dropout, randomness="different")(h)

    with pytest.raises(ModelError, match=r"inside of torch\.vmap \(at .*test_random_draws"):
        run(dropped)


class Generating(Net):
    """Draws from a generator of its own, which it seeds by the number of the call, again after ``period`` calls."""

    def __init__(self, period: int | None = None) -> None:
        super().__init__()
        self.source, self.period, self.step = torch.Generator().manual_seed(3), period, 0

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        if self.period is not None:
            self.step += 1
            self.source.manual_seed(self.step % self.period)
        return h + torch.randn(6, generator=self.source)


@pytest.mark.parametrize("period", [None, 10**6])
def test_a_generator_of_a_module_draws_new_numbers_and_is_put_back(period: int | None) -> None:
    module = Generating(period)
    before = module.source.get_state()
    spec = split(module, sample=SAMPLE, classes=3)
    assert torch.equal(module.source.get_state(), before)
    compare(spec)
    assert torch.equal(module.source.get_state(), before)


@pytest.mark.parametrize("period", [1, 7])
def test_a_generator_that_a_module_seeds_alike_is_refused(period: int) -> None:
    with pytest.raises(ModelError, match=r"drew before \(at .*test_random_draws"):
        compare(split(Generating(period), sample=SAMPLE, classes=3))


class Dropping(Net):
    """Weakens a layer now and then by a generator of its own."""

    def __init__(self, rate: float, seed: bool = False) -> None:
        super().__init__()
        self.source, self.kept, self.rate, self.seed = random.Random(0), np.random.default_rng(0), rate, seed

    def between(self, h: Tensor) -> Tensor:
        if self.seed:
            self.source.seed(0)
        if self.training and (self.source.random() < self.rate or self.kept.random() < self.rate):
            return 0.5 * h
        return h


def test_generators_of_python_and_numpy_steer_both_sides_alike_and_stay() -> None:
    module = Dropping(0.3)
    before = module.source.getstate(), str(module.kept.bit_generator.state)
    with pytest.warns(UserWarning, match="steers Python"):
        compare(split(module, sample=SAMPLE, classes=3))
    assert (module.source.getstate(), str(module.kept.bit_generator.state)) == before
    assert isinstance(vars(module)["kept"], np.random.Generator)


def test_a_seed_for_a_generator_of_python_is_refused() -> None:
    with pytest.raises(ModelError, match=r"seeds Python's .*test_random_draws.*register_buffer"):
        compare(split(Dropping(0.6, seed=True), sample=SAMPLE, classes=3))


class Initialising(Net):
    """Draws noise by the functions that people initialise weights with."""

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        normal, uniform = torch.empty_like(h), torch.empty(6)
        nn.init.uniform_(uniform, 0.5, b=1.5)
        return (
            h * uniform
            + nn.init.kaiming_uniform_(h.new_empty(6, 6)).mean(0)
            + nn.init.normal_(normal, std=0.1)
        )


def test_functions_of_nn_init_draw_numbers_of_each_step() -> None:
    compare(split(Initialising(), sample=SAMPLE, classes=3))


class Checkpointed(Net):
    """Dropout and a batch norm, recomputed in the backward pass by all forms of torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.4)
        self.stack = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))

    def between(self, h: Tensor) -> Tensor:
        h.requires_grad_(True)  # as transformers does for the reentrant form
        h = checkpoint(lambda x: F.dropout(self.norm(x), 0.2, self.training), h, use_reentrant=False)
        h = checkpoint(self.drop, h, use_reentrant=True)
        out: Tensor = checkpoint_sequential(self.stack, 2, h, use_reentrant=False)
        return out


def test_checkpointing_is_a_plain_call() -> None:
    compare(split(Checkpointed(), sample=SAMPLE, classes=3))
