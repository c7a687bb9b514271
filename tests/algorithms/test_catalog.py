"""Algorithms by name: options and their ranges, the graph for one user, and what the server keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from edgefl import algorithms
from edgefl.config import parse
from edgefl.contract.tensors import prefixed, select
from edgefl.errors import ConfigError
from edgefl.optimizers import with_optimizer
from tests.algorithms.users import Users, flat

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
