"""The ends of every range: what lies on them is taken where the range is closed, and refused where it is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edgefl import algorithms, optimizers
from edgefl.algorithms.adaptive.schedules import Constant, Decaying, positive, share
from edgefl.contract.options import above_zero, at_least_zero, below_one, counts
from edgefl.errors import ConfigError, EdgeflError
from tests.algorithms.users import Users

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
        ("fafed", {"ext": 1.0, "alpha": TINY, "eval_batch": 1}),
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
        ("fafed", {"eval_batch": 0}, "eval_batch is at least 1"),
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
        with pytest.raises(ConfigError, match=f"{option} is {wrong}"):
            optimizers.build(name, **{**options, option: wrong})


@pytest.mark.parametrize(
    ("check", "taken", "refused"),
    [
        (above_zero, (TINY, 1.0, 1e300), (0.0, -TINY, INFINITE, NOT_A_NUMBER)),
        (at_least_zero, (0.0, TINY, 1e300), (-TINY, INFINITE, NOT_A_NUMBER)),
        (below_one, (0.0, 1.0 - 2**-53), (-TINY, 1.0, NOT_A_NUMBER)),
        (counts, (1, 2), (0, -1, 1.0)),
    ],
)
def test_ends_of_the_four_ranges(check: Any, taken: tuple[float, ...], refused: tuple[float, ...]) -> None:
    for value in taken:
        check("this", number=value)
    for value in refused:
        with pytest.raises(ConfigError, match="this: number is ") as error:
            check("this", number=value)
        assert error.value.details["option"] == "number"


def test_the_ends_of_the_ranges_of_schedules() -> None:
    positive("size", TINY)
    share("alpha", 1.0)
    share("alpha", TINY)
    for value in (0.0, -1.0, INFINITE, NOT_A_NUMBER):
        with pytest.raises(ConfigError, match="size is a finite number above 0"):
            positive("size", value)
    for value in (0.0, 1.0 + 2**-52, NOT_A_NUMBER):
        with pytest.raises(ConfigError, match="alpha, the weight of the fresh gradient"):
            share("alpha", value)
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
