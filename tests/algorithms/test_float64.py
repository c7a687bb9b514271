"""A simulation of float64 weights and samples computes in float64: nothing on the way is rounded to float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgefl import algorithms
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import applied
from edgefl.codecs.binarize import StepSize, draw
from edgefl.contract.tensors import Tensors
from edgefl.models.exits import with_exits
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.support.reference import Client, begun, drawn, federated, run_round

EXACT = {"aten._to_copy.default"}
"""Of whole numbers, on their way to bytes."""
CODED = [
    "fedbat",
    *(name for name in codecs.CODECS if name not in ("dense", "fedbat", "zerofl", "bifl", "bifl_full")),
]
COUNT = "correct"
"""How many samples were right, float32 by contract."""
OPTIONS: Mapping[str, dict[str, Any]] = {
    "multi_exit": {"kd_weight": 0.3},
    "adamw": {"keep": True},
    "fedbat": {"alpha_range": [5e-4, 5e-2]},
}


class Rounded(TorchDispatchMode):
    """Names of the operations that read float64 and give float32."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {value.dtype for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        made = {value.dtype for value in tree_leaves(out) if isinstance(value, Tensor)}
        if torch.float64 in given and torch.float32 in made:
            self.names.add(str(func))
        return out


def objective_of(algorithm: str) -> Objective:
    plain = build_model("mlp", size=4, hidden=[5, 4] if algorithm == "multi_exit" else [5], classes=3)
    return Objective.of(OutputSide(with_exits(plain) if algorithm == "multi_exit" else plain, 0))


def clients() -> Iterator[Client]:
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        x = torch.randn(8, 1, 4, 4, generator=generator, dtype=torch.float64)
        yield Client(number, x, torch.randint(0, 3, (8,), generator=generator))


def doubled(objective: Objective) -> Tensors:
    return {name: tensor.double() for name, tensor in objective.suffix.state_dict().items()}


def wider(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the floats that are not float64."""
    return {
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dtype != torch.float64
    }


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedbat"])
def test_a_federation_of_float64_rounds_nothing_to_float32(name: str) -> None:
    objective = objective_of(name)
    algorithm = algorithms.build(name, objective, batch=4, steps=2, **OPTIONS.get(name, {}))

    with Rounded() as rounded:
        done = list(
            federated(algorithm, doubled(objective), [*clients()], rounds=2 * len(algorithm.exchanges))
        )

    assert not rounded.names - EXACT
    for each in done:
        assert not wider(each.weights) and not wider(each.server_state)
        assert not any(map(wider, each.updates.values())) and not any(map(wider, each.carries.values()))
        assert all(wider(step) <= {COUNT} for steps in each.steps.values() for step in steps)


@pytest.mark.sample(4)
@pytest.mark.parametrize("codec", CODED)
def test_coding_a_float64_change_rounds_nothing_but_what_travels(codec: str) -> None:
    objective = objective_of("fedavg")
    if codec == "fedbat":
        algorithm = algorithms.build(codec, objective, batch=4, steps=4, **OPTIONS[codec])
    else:
        algorithm = applied(
            codecs.build(codec), algorithms.build("fedavg", objective, batch=4, steps=2), objective
        )
    [client, _] = clients()
    weights, carry = begun(algorithm, doubled(objective)).weights, None

    with Rounded() as rounded:
        for number in (1, 2):
            done = run_round(algorithm, weights, drawn(algorithm, client, 0, number), carry=carry)
            carry = done.carry

    assert not rounded.names - EXACT
    assert not wider(done.carry) and all(wider(step) <= {COUNT} for step in done.metrics)


def test_a_sign_has_the_dtype_of_what_it_stands_for() -> None:
    m, alpha = torch.tensor([0.5], dtype=torch.float64), torch.tensor(1 / 3, dtype=torch.float64)

    told = alpha * draw(m, alpha, torch.zeros(1, dtype=torch.float64))

    assert told.dtype == torch.float64 and float(told) == 1 / 3


def test_a_step_size_at_its_limit_is_the_limit_to_the_last_bit_of_float64() -> None:
    rho, size = torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.01], dtype=torch.float64)
    pull, lr = torch.full((1,), -1e9, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    step_size = StepSize(rho, (1e-3, 0.05))

    moved, _ = step_size.descended(size, torch.zeros_like(size), size, pull, lr)

    torch.testing.assert_close(
        step_size.of(size, moved), torch.tensor([0.05], dtype=torch.float64), rtol=1e-14, atol=0
    )
