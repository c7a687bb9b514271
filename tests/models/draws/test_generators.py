"""Draws by generators of Python and numpy are those of the thread that traces, however the code names them."""

# ruff: noqa: B008, PLW0108 - a lambda looks its names up when it runs, and defaults are among what is tested
from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from random import gauss, getrandbits, shuffle
from random import random as one
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.random import permutation, rand, randn
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.partition.tracer import export_module
from edgefl.models.split import split
from edgefl.models.torch_functions.python_random import patched_generators
from edgefl.objective.objective import Objective
from tests.support.errors import ModelError, refuses

ROWS = TensorSpec((6,))
PYTHON = random.Random(3)
NUMPY = np.random.default_rng(3)
LEGACY: Any = np.random.RandomState(3)
HELD = {"python": random.Random(4), "list": [np.random.default_rng(4)]}
PAIR = (random.Random(5), 1)
LATER = partial(random.uniform, 0.0, 1.0)


def _default(draw: Callable[[], float] = random.random, *, rng: Any = random.Random(6)) -> float:
    return draw() + float(rng.random())


def _shuffled() -> float:
    numbers = [0.1, 0.2]
    shuffle(numbers)
    return numbers[0]


COMPUTED: dict[str, Callable[[], Any]] = {
    "random.random": lambda: random.random() * torch.ones(1),
    "random.gauss": lambda: random.gauss(0, 1),
    "random.choice": lambda: random.choice([0.1, 0.2]),
    "random.sample": lambda: random.sample([0.1, 0.2], 1)[0],
    "random.randbytes": lambda: random.randbytes(1)[0],
    "by name: random": lambda: torch.ones(1) * one(),
    "by name: gauss": lambda: gauss(0, 1),
    "by name: getrandbits": lambda: getrandbits(3),
    "by name: shuffle": _shuffled,
    "np.random.rand": lambda: np.random.rand() * torch.ones(1),
    "np.random.normal": lambda: np.random.normal(),
    "np.random.beta": lambda: np.random.beta(0.2, 0.2),
    "np.random.sample": lambda: float(np.random.sample()),
    "np.random.ranf": lambda: float(np.random.ranf()),
    "by name: rand": lambda: torch.ones(1) * rand(),
    "by name: randn": lambda: randn(),
    "by name: permutation": lambda: int(permutation(4)[0]),
    "hidden": lambda: np.random.mtrand._rand.normal(),
    "own of Python": lambda: PYTHON.gauss(0, 1),
    "own of numpy": lambda: NUMPY.normal(),
    "own of the old kind": lambda: LEGACY.rand() * torch.ones(1),
    "in a dictionary": lambda: HELD["python"].betavariate(1, 2),  # type: ignore[attr-defined]
    "in a list": lambda: HELD["list"][0].normal(),  # type: ignore[index]
    "in a tuple": lambda: PAIR[0].gauss(0, 1),
    "partial": lambda: torch.ones(1) * LATER(),
    "defaults": lambda: float(_default()),
    "made on the way": lambda: np.random.default_rng().normal(),
}


class Scaled(nn.Module):
    """Multiplies by a drawn number."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x * self.draw() if self.training else x))


class Held(nn.Module):
    """Keeps a generator, or a method of one, as an attribute."""

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.layer, self.rng = nn.Linear(6, 4), rng

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x * (self.rng() if callable(self.rng) else self.rng.normal(0, 1))))


class Dropped(nn.Module):
    """Leaves out a layer where ``draw`` is small."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.block, self.layer, self.draw = nn.Linear(6, 6), nn.Linear(6, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.draw() < 0.2):
            x = self.block(x)
        return cast(Tensor, self.layer(x))


@pytest.mark.sample(8)
@pytest.mark.parametrize("way", COMPUTED)
def test_a_number_that_is_computed_with_is_refused(way: str) -> None:
    module = Scaled(COMPUTED[way])
    with refuses(ModelError, chance=True, refused=True):
        export_module(module.train(), ROWS)
    with refuses(ModelError, chance=True, refused=True):
        Objective(split(nn.Sequential(module), sample=ROWS, classes=4).module, ROWS).noise(3)
    export_module(module.eval(), ROWS)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "rng",
    [np.random.default_rng(1), np.random.RandomState(1), random.Random(1).random, np.random.rand, rand],
    ids=("Generator", "RandomState", "own random", "numpy's rand", "imported rand"),
)
def test_a_generator_that_a_module_keeps_is_refused_and_left_as_it_was(rng: Any) -> None:
    module = Held(rng)
    with refuses(ModelError, chance=True, refused=True):
        export_module(module, ROWS)
    assert module.rng is rng


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "draw",
    [
        one,
        rand,
        PYTHON.random,
        LEGACY.random_sample,
        lambda: NUMPY.random(),
        lambda: PYTHON.uniform(0, 1),
        LATER,
    ],
    ids=("one", "rand", "Random", "RandomState", "Generator", "uniform", "partial"),
)
def test_a_layer_left_out_now_and_then_is_announced(draw: Callable[[], float]) -> None:
    with pytest.warns(UserWarning, match=r"random number steers Python \(at .*condition is False"):
        algorithm = export_module(Dropped(draw).train(), ROWS)
    assert len(algorithm.state_dict) == 4


def test_a_generator_with_a_seed_made_on_the_way_gives_constants() -> None:
    module = Scaled(lambda: torch.tensor(np.random.default_rng(1).normal(size=6)).float())
    wanted, x = module(torch.ones(2, 6)), torch.ones(2, 6)
    torch.testing.assert_close(export_module(module, ROWS).module()(x), wanted)


def test_numbers_of_a_seed_are_the_same_beside_a_trace() -> None:
    module = Scaled(lambda: (PYTHON, one, rand, NUMPY))

    def drawn() -> list[float]:
        for seed in (random.seed, np.random.seed, PYTHON.seed):
            seed(1)
        return [one(), random.gauss(0, 1), rand(), np.random.randn(), np.random.randn(), PYTHON.random()]

    wanted = drawn()
    found: list[float] = []
    with patched_generators(module):
        thread = threading.Thread(target=lambda: found.extend(drawn()))
        thread.start()
        thread.join()
    assert found == wanted
