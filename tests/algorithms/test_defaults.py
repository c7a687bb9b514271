"""What algorithms and optimizers do when nothing is said: a default is a promise to every federation file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import pytest

from edgefl import algorithms
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.optimizers import OPTIMIZERS
from tests.algorithms.users import Users

# Options that are not listed have None: absent, or taken from another option.
OF_ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {
        "batch": 32,
        "steps": 10,
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.0001,
        "decay_all": False,
        "masked_loss": False,
        "temperature": 1.0,
    },
    "fedavg": {"batch": 32, "steps": 10, "lr": 0.05},
    "fedavg_update": {"batch": 40, "steps": 10, "lr": 0.001, "alpha": 0.01},
    "fedavg_matched": {"batch": 40, "steps": 10, "factor": 2, "lr": 0.001, "alpha": 0.01},
    "per_fedavg": {
        "batch": 40,
        "steps": 10,
        "lr": 0.001,
        "alpha": 0.01,
        "mode": "hf",
        "inner_steps": 1,
        "hessian_batch": "independent",
        "schedule": "constant",
    },
    "local": {"batch": 32, "steps": 10, "lr": 0.05},
    "fedprox": {"batch": 32, "steps": 10, "lr": 0.05, "mu": 0.01},
    "scaffold": {"batch": 32, "steps": 10, "lr": 0.05, "eta_g": 1.0},
    "fafed": {
        "batch": 32,
        "steps": 10,
        "lr": 0.01,
        "alpha": 0.1,
        "beta": 0.9,
        "rho": 0.01,
        "schedule": "constant",
        "decay_unit": "iteration",
        "first_step": "preconditioned",
        "second_moment": "elementwise",
        "ext": 1.0,
    },
    "stem": {
        "batch": 32,
        "steps": 10,
        "lr": 0.01,
        "alpha": 0.1,
        "schedule": "constant",
        "w": 1.0,
        "sigma": 1.0,
        "decay_unit": "iteration",
        "ext": 1.0,
    },
    "naive_adaptive": {"batch": 32, "steps": 10, "lr": 0.01, "beta": 0.9},
    "local_amsgrad": {"batch": 32, "steps": 10, "lr": 0.001, "beta1": 0.9, "beta2": 0.99, "eps": 0.0001},
    "mimeadam": {"batch": 32, "steps": 10, "lr": 0.001, "beta1": 0.9, "beta2": 0.99, "tau": 0.01},
    "mimelite": {"batch": 32, "steps": 10, "lr": 0.001, "beta1": 0.9, "beta2": 0.99, "tau": 0.01},
    "adamw": {
        "batch": 32,
        "steps": 10,
        "lr": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-08,
        "weight_decay": 0.01,
        "keep": False,
    },
    "tcbgd": {
        "batch": 20,
        "steps": 100,
        "lr": 0.05,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "remask": True,
        "bias": True,
        "freeze_dropped": True,
        "adamw": False,
        "masked_loss": False,
    },
    "multi_exit": {"batch": 32, "steps": 10, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0001},
    "swat": {
        "batch": 64,
        "steps": 10,
        "lr": 0.05,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "sparsity": 0.97,
        "activations": True,
        "masked_loss": False,
        "dense_inference": False,
    },
    "binary": {"batch": 64, "steps": 10, "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, "clip": False},
    "fedbat": {
        "batch": 64,
        "steps": 10,
        "lr": 0.1,
        "rho": 6.0,
        "phi": 0.5,
        "granularity": "tensor",
        "binarize_1d": True,
        "upload_mode": "resample_final",
        "step_size": "learned",
        "statistics": 6,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "masked_loss": False,
    },
}
OF_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "fedadam": {"lr": 0.0316, "beta1": 0.9, "beta2": 0.9, "tau": 0.01},
    "fedyogi": {"lr": 0.0316, "beta1": 0.9, "beta2": 0.9, "tau": 0.01},
    "fedadagrad": {"lr": 0.0316, "beta1": 0.0, "tau": 0.01},
    "fedams": {"lr": 0.0316, "beta1": 0.9, "beta2": 0.9, "tau": 0.01, "variant": "amsgrad"},
    "server_momentum": {"lr": 1.0, "beta": 0.9},
}


def options(factory: Callable[..., object]) -> dict[str, Parameter]:
    """All parameters but the objective, which has no default."""
    return {
        name: each for name, each in signature(factory).parameters.items() if each.default is not each.empty
    }


def test_every_algorithm_and_optimizer_is_listed() -> None:
    assert ALGORITHMS.keys() == OF_ALGORITHMS.keys()
    assert OPTIMIZERS.keys() == OF_OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OF_ALGORITHMS)
def test_the_defaults_of_an_algorithm(name: str) -> None:
    given = {each.name: each.default for each in options(ALGORITHMS[name]).values()}

    assert {option: value for option, value in given.items() if value is not None} == OF_ALGORITHMS[name]
    assert given["eval_batch"] is None


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_the_defaults_of_an_optimizer(name: str) -> None:
    assert {each.name: each.default for each in options(OPTIMIZERS[name]).values()} == OF_OPTIMIZERS[name]


@pytest.mark.parametrize("name", ["sgd", "fedavg", "fedprox", "scaffold", "adamw", "naive_adaptive", "local"])
def test_an_algorithm_announces_its_step_by_default(name: str) -> None:
    objective = Users().objective
    plain = algorithms.build(name, objective)
    other = algorithms.build(name, objective, batch=3, steps=7, lr=0.5, eval_batch=5)

    assert plain.hyper["lr"] == OF_ALGORITHMS[name]["lr"] and other.hyper["lr"] == 0.5
    assert [phase.steps for phase in plain.phases] == [10] and [phase.steps for phase in other.phases] == [7]
    for algorithm, train, check in ((plain, 32, 32), (other, 3, 5)):
        assert algorithm.phases[0].function.inputs["batch.0.x"].shape[0] == train
        assert algorithm.evaluate.inputs["batch.0.x"].shape[0] == check
