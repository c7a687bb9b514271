"""Algorithms by name: options and their ranges, the graph for one user, and what the server keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch

from edgefl import algorithms, optimizers
from edgefl.algorithms.adaptive.schedules import Constant, Decaying, check_positive, check_weight
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.config import parse
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.options import check_above_zero, check_below_one, check_counts, check_not_negative
from edgefl.contract.tensors import prefixed, select
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.optimizers import OPTIMIZERS, with_optimizer
from edgefl.submodels.output_side.submodel import OutputSide
from tests.algorithms.users import Users, flat
from tests.support.errors import ConfigError, EdgeflError, refuses
from tools.facts import scalars_of, server_options_of

KEPT = {
    "fedavg": set(),
    "fedprox": set(),
    "scaffold": {"c"},
    "local_amsgrad": {"m", "v", "vhat"},
    "mimeadam": {"c", "m", "v"},
    "mimelite": {"c", "m", "v"},
    "local": set(),
    "adamw": set(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_server_keeps_and_who_has_to_be_there(name: str) -> None:
    algorithm = algorithms.build(name, Users().objective)

    assert set(algorithm.server_state) == KEPT[name]
    assert algorithm.whole is (name == "scaffold")
    assert algorithm.name == name
    assert [each.name for each in algorithm.exchanges] == [name] * (2 if name == "mimeadam" else 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedavg", {"batch": 0}, "batch is 0; set it to a whole number of at least 1"),
        ("fedavg", {"steps": -1}, "steps is -1"),
        ("fedavg", {"lr": -0.1}, "lr is -0.1; set it to a finite number of at least 0"),
        ("fedavg", {"lr": float("inf")}, "lr is inf"),
        ("fedavg_update", {"alpha": -1.0}, "alpha is -1.0; set it to a finite number of at least 0"),
        ("fedavg_matched", {"factor": 0}, "factor is 0; set it to a whole number of at least 1"),
        ("fedprox", {"mu": -0.5}, "algorithm 'fedprox': mu is -0.5; set it to a finite number of at least 0"),
        (
            "scaffold",
            {"steps": 0},
            "algorithm 'scaffold': steps is 0; set it to a whole number of at least 1",
        ),
        ("scaffold", {"lr": 0.0}, "lr is 0.0; set it to a finite number above 0"),
        ("scaffold", {"eta_g": 0.0}, "eta_g is 0.0"),
        (
            "fedadam",
            {},
            "'fedadam' is an optimizer of the server and no algorithm: set algorithm fedavg and optimizer",
        ),
        ("local_amsgrad", {"eps": 0.0}, "eps is 0.0; set it to a finite number above 0"),
        ("local_amsgrad", {"beta2": 1.0}, r"beta2 is 1.0; set it to a number in \[0, 1\)"),
        ("mimeadam", {"tau": 0.0}, "algorithm 'mimeadam': tau is 0.0"),
        ("mimelite", {"beta1": -0.1}, "algorithm 'mimelite': beta1 is -0.1"),
        ("adamw", {"weight_decay": -0.1}, "weight_decay is -0.1"),
        ("adamw", {"eps": 0.0}, "algorithm 'adamw': eps is 0.0"),
        ("local", {"lr": -1.0}, "algorithm 'local': lr is -1.0"),
        ("fedavg", {"momentum": 0.9}, "algorithm 'fedavg' has no option 'momentum'"),
        ("fedavg", {"personal": "yes"}, "personal is 'yes'; set it to the step size"),
        ("fedavg", {"personal": True}, "personal is True; set it to the step size"),
        ("fedavg", {"personal": -0.1}, "alpha is -0.1"),
        ("fedavg_update", {"personal": 0.1}, "has a scalar 'alpha' of its own; leave out personal"),
        ("binary", {"personal": 0.1}, "weights in a form of its own.*leave out personal"),
    ],
)
def test_unusable_options_name_a_remedy(name: str, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithms.build(name, Users().objective, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [each for each in KEPT if each != "local"])
def test_any_algorithm_can_have_the_graph_for_one_user(name: str) -> None:
    users = Users()
    plain = algorithms.build(name, users.objective, batch=4, steps=2, lr=0.01)
    personal = algorithms.build(name, users.objective, batch=4, steps=2, lr=0.01, personal=0.05)

    assert plain.personalize is None
    assert personal.personalize is not None
    assert personal.hyper == {**plain.hyper, "alpha": 0.05}
    rounds = 2 * len(plain.exchanges)
    np.testing.assert_array_equal(
        flat(users.run(plain, rounds)[-1].weights), flat(users.run(personal, rounds)[-1].weights)
    )


@pytest.mark.parametrize("name", ["fedavg_update", "fedavg_matched"])
def test_fedavg_with_update_takes_one_step_of_size_alpha_at_test_time(name: str) -> None:
    users = Users()
    algorithm = algorithms.build(name, users.objective, batch=4, alpha=0.03)
    assert algorithm.personalize is not None
    client, rows = users.clients[1], slice(0, 4)
    batch = {"batch.0.x": client.x[rows], "batch.0.y": client.y[rows]}

    scalar = {"hyper.alpha": torch.tensor(algorithm.hyper["alpha"], dtype=torch.float64)}
    adapted = algorithm.personalize(prefixed("weights", users.spec.weights) | batch | scalar)

    wanted = users.theta - 0.03 * users.gradient(1, users.theta, rows)
    np.testing.assert_allclose(flat(select(adapted, "weights")), wanted, rtol=1e-12)
    assert algorithm.draws == "draw"


def test_a_federation_file_names_optimizer_and_personalization() -> None:
    tables = {
        "algorithm": {"name": "fedavg", "personal": 0.02},
        "optimizer": {"name": "fedams", "options": {"lr": 0.1, "variant": "max_stabilisation"}},
    }
    federation = parse(tables, source="here")

    algorithm = algorithms.build(
        federation.algorithm.name, Users().objective, **federation.algorithm.arguments
    )
    algorithm = with_optimizer(algorithm, federation.optimizer.name, **federation.optimizer.options)

    assert algorithm.server.name == "fedams"
    assert algorithm.hyper["alpha"] == 0.02
    assert parse({}, source="here").optimizer.name == "none"


# -- what algorithms and optimizers do when nothing is said: a default is a promise to every federation file --


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
    "fedper": {"batch": 32, "steps": 10, "lr": 0.05, "momentum": 0.0},
    "fedrep": {"batch": 32, "head_steps": 10, "steps": 10, "lr": 0.05, "momentum": 0.0},
    "fedbn": {"norms": "batch", "batch": 32, "steps": 10, "lr": 0.05, "momentum": 0.0},
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


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_the_defaults_of_an_optimizer(name: str) -> None:
    assert {each.name: each.default for each in options(OPTIMIZERS[name]).values()} == OF_OPTIMIZERS[name]


@pytest.mark.parametrize("name", ["sgd", "fedavg", "fedprox", "scaffold", "adamw", "naive_adaptive", "local"])
def test_an_algorithm_announces_its_step_by_default(name: str) -> None:
    objective = Users().objective
    plain = algorithms.build(name, objective)
    other = algorithms.build(name, objective, batch=3, steps=7, lr=0.5)

    assert plain.hyper["lr"] == OF_ALGORITHMS[name]["lr"] and other.hyper["lr"] == 0.5
    assert [phase.steps for phase in plain.phases] == [10] and [phase.steps for phase in other.phases] == [7]
    for algorithm, batch in ((plain, 32), (other, 3)):
        for function in (algorithm.phases[0].function, algorithm.evaluate):
            assert function.inputs["batch.0.x"].shape[0] == batch


# -- the ends of every range -----------------------------------------------------------------------------------


TINY, INFINITE, NOT_A_NUMBER = 5e-324, float("inf"), float("nan")
EACH_ONCE = {"batch": 1, "steps": 1}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"batch": 1, "steps": 0, "lr": 0.0}),
        ("fedavg_update", {"alpha": 0.0}),
        ("fedavg_matched", {"factor": 1}),
        ("fedprox", {"batch": 1, "steps": 0, "lr": 0.0, "mu": 0.0}),
        ("scaffold", {**EACH_ONCE, "lr": TINY, "eta_g": TINY}),
        ("adamw", {"batch": 1, "steps": 0, "lr": 0.0, "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.0}),
        ("local", {"batch": 1, "steps": 0, "lr": 0.0}),
        ("local_amsgrad", {**EACH_ONCE, "lr": TINY, "eps": TINY, "beta1": 0.0, "beta2": 0.0}),
        ("mimeadam", {"batch": 1, "steps": 0, "lr": 0.0, "beta1": 0.0, "beta2": 0.0, "tau": TINY}),
        ("mimelite", {"batch": 1, "steps": 0, "lr": 0.0, "beta1": 0.0, "beta2": 0.0, "tau": TINY}),
        ("naive_adaptive", {**EACH_ONCE, "lr": TINY, "beta": 0.0}),
        ("fafed", {**EACH_ONCE, "alpha": 1.0, "beta": 0.0, "ext": 0.0, "rho": TINY, "opening_steps": 1}),
        ("fafed", {"ext": 1.0, "alpha": TINY}),
        ("stem", {**EACH_ONCE, "alpha": 1.0, "ext": 0.0, "opening_steps": 1, "clip": TINY}),
        ("per_fedavg", {"batch": 1, "steps": 0, "lr": 0.0, "alpha": 0.0, "inner_steps": 1, "delta": TINY}),
        ("fedbat", {"phi": 1.0, "rho": 0.0, "alpha_range": (0.1, 0.1)}),
        ("fedbat", {"steps": 10, "phi": 0.1}),
        ("fedbat", {"steps": 10, "phi": 0.9, "upload_mode": "last_forward"}),
        ("fedbat", {"phi": 0.0, "step_size": "largest"}),
        ("swat", {"sparsity": 0.0}),
    ],
)
def test_what_lies_on_a_closed_end_is_taken(name: str, options: Mapping[str, Any]) -> None:
    assert algorithms.build(name, Users().objective, **options).name == name


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("naive_adaptive", {"lr": 0.0}, "lr"),
        ("naive_adaptive", {"lr": INFINITE}, "lr"),
        ("naive_adaptive", {"beta": 1.0}, r"beta.*\[0, 1\), found 1.0"),
        ("naive_adaptive", {"beta": -TINY}, "beta"),
        ("naive_adaptive", {"batch": 0}, "batch is at least 1, found 0"),
        ("naive_adaptive", {"steps": 0}, "steps is at least 1, found 0"),
        ("fafed", {"beta": -TINY}, "beta"),
        ("fafed", {"ext": -TINY}, "ext"),
        ("fafed", {"ext": 1.0 + 2**-52}, "ext"),
        ("fafed", {"batch": 0}, "batch is at least 1"),
        ("fafed", {"schedule": "theory", "devices": 3}, "needs smoothness"),
        ("fafed", {"schedule": "theory", "smoothness": 1.0}, "needs smoothness"),
        ("stem", {"clip": 0.0}, "clip"),
        ("stem", {"schedule": "decaying", "decay_unit": "epoch", "epoch_steps": 0}, "epoch_steps"),
        ("stem", {"schedule": "original", "c": 0.0}, "c is a finite number above 0"),
        ("adamw", {"beta1": 1.0}, "beta1"),
        ("adamw", {"beta2": 1.0}, "beta2"),
        ("local_amsgrad", {"beta1": 1.0}, "beta1"),
        ("local_amsgrad", {"lr": 0.0}, "lr"),
        ("mimeadam", {"beta1": 1.0}, "beta1"),
        ("mimelite", {"beta2": 1.0}, "beta2"),
        ("per_fedavg", {"delta0": 0.0}, "delta0"),
        ("per_fedavg", {"delta": 1e-3, "delta0": 1e-3}, "not both"),
        ("fedbat", {"phi": 1.0 + 2**-52}, "phi is the share"),
        ("fedbat", {"phi": -TINY}, "phi is the share"),
        ("fedbat", {"rho": -TINY}, "rho is at least 0"),
        ("fedbat", {"rho": INFINITE}, "rho is at least 0 and finite"),
        ("fedbat", {"steps": 10, "phi": 0.09}, "steps is none"),
        ("fedbat", {"phi": 1.0, "upload_mode": "last_forward"}, "leaves none"),
        ("fedbat", {"alpha_range": (0.0, 0.1)}, "two numbers above 0"),
        ("fedbat", {"alpha_range": (0.2, 0.1)}, "the smaller first"),
        ("fedbat", {"alpha_range": (0.1, 0.2), "step_size": "largest"}, "alpha_range limits learned"),
        ("swat", {"sparsity": 1.0}, r"lies in \[0, 1\)"),
        ("swat", {"sparsity": -TINY}, r"lies in \[0, 1\)"),
    ],
)
def test_what_lies_outside_is_named(name: str, options: Mapping[str, Any], named: str) -> None:
    with pytest.raises(EdgeflError, match=named):
        algorithms.build(name, Users().objective, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedadam", {"lr": TINY, "tau": TINY, "beta1": 0.0, "beta2": 0.0}),
        ("fedyogi", {"lr": TINY, "tau": TINY, "beta1": 0.0, "beta2": 0.0}),
        ("fedadagrad", {"lr": TINY, "tau": TINY, "beta1": 0.0}),
        ("fedams", {"lr": TINY, "tau": TINY, "beta1": 0.0, "beta2": 0.0}),
        ("server_momentum", {"lr": TINY, "beta": 0.0}),
    ],
)
def test_optimizers_take_closed_ends_and_refuse_open_ones(name: str, options: Mapping[str, float]) -> None:
    assert optimizers.build(name, **options).name == name
    for option in options:
        wrong = 1.0 if option.startswith("beta") else 0.0
        with refuses(ConfigError, option=option, value=wrong):
            optimizers.build(name, **{**options, option: wrong})


@pytest.mark.parametrize(
    ("check", "taken", "refused"),
    [
        (check_above_zero, (TINY, 1.0, 1e300), (0.0, -TINY, INFINITE, NOT_A_NUMBER)),
        (check_not_negative, (0.0, TINY, 1e300), (-TINY, INFINITE, NOT_A_NUMBER)),
        (check_below_one, (0.0, 1.0 - 2**-53), (-TINY, 1.0, NOT_A_NUMBER)),
        (check_counts, (1, 2), (0, -1, 1.0)),
    ],
)
def test_ends_of_the_four_ranges(check: Any, taken: tuple[float, ...], refused: tuple[float, ...]) -> None:
    for value in taken:
        check("this", number=value)
    for value in refused:
        with refuses(ConfigError, option="number", value=...):
            check("this", number=value)


def test_the_ends_of_the_ranges_of_schedules() -> None:
    check_positive("size", TINY)
    check_weight("alpha", 1.0)
    check_weight("alpha", TINY)
    for value in (0.0, -1.0, INFINITE, NOT_A_NUMBER):
        with refuses(ConfigError, name="size", value=..., above=0):
            check_positive("size", value)
    for value in (0.0, 1.0 + 2**-52, NOT_A_NUMBER):
        with refuses(ConfigError, name="alpha", value=...):
            check_weight("alpha", value)
    for wrong in ({"size": 0.0, "fresh": 0.5}, {"size": 1.0, "fresh": 0.0}):
        with pytest.raises(ConfigError):
            Constant(**wrong)
        with pytest.raises(ConfigError):
            Decaying(**wrong)


def test_alpha_of_the_original_schedule_is_at_most_one() -> None:
    assert Decaying(1.0, 0.5, c=4.0).alpha(1) == 1.0
    assert Decaying(1.0, 0.5, c=0.25).alpha(1) == 0.25
    assert Decaying(1.0, 0.5).alpha(1) == 0.5
    assert Decaying(1.0, 0.5, unit="epoch", epoch_steps=1).eta(2) < Decaying(
        1.0, 0.5, unit="epoch", epoch_steps=2
    ).eta(2)


# -- what a catalogue calls a scalar of the task, or the server's, is not in what devices compute with -----


CASES = [
    ("fafed", {"lr": 0.5}),
    ("fafed", {"alpha": 0.7, "schedule": "decaying", "w": 2.0}),
    ("fafed", {"first_step": "plain"}),
    ("fafed", {"schedule": "theory", "smoothness": 2.0, "devices": 8, "h": 0.1}),
    ("stem", {"lr": 0.5, "alpha": 0.7, "schedule": "original", "c": 2.0, "sigma": 3.0}),
    ("stem", {"schedule": "decaying", "decay_unit": "epoch", "epoch_steps": 2}),
    ("per_fedavg", {"schedule": "diminishing"}),
    ("scaffold", {"eta_g": 0.5}),
    ("mimeadam", {"beta2": 0.5}),
    ("mimelite", {"beta2": 0.5}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_announced_or_the_servers_changes_no_function(name: str, options: dict[str, Any]) -> None:
    objective = Objective.of(OutputSide(build_model("mlp", size=4, hidden=[3]), 0))
    usual, other = (algorithms.build(name, objective, batch=2, steps=2, **chosen) for chosen in ({}, options))

    assert options.keys() <= scalars_of(other) | server_options_of(other)
    for mine, its in zip(_functions(usual), _functions(other), strict=True):
        assert mine.inputs == its.inputs
        expected, results = (each(each.example(seed=3)) for each in (mine, its))
        assert expected.keys() == results.keys()
        assert all(torch.equal(expected[key], results[key]) for key in expected)


def _functions(algorithm: Algorithm) -> list[Any]:
    return [function for exchange in algorithm.exchanges for function in exchange.functions]
