"""``edgefl ls algorithms`` and ``edgefl ls optimizers``: costs as the specifications have them, options with defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.algorithms.quantized.swat import swat
from edgefl.cli import app
from edgefl.cli.catalog.inspection import algorithm_table
from edgefl.errors import ConfigError
from edgefl.optimizers import OPTIMIZERS
from tests.cli.runner import runner
from tools import facts as live
from tools.facts import summary


@pytest.fixture(scope="module", autouse=True)
def algorithms_are_measured_once() -> Iterator[None]:
    """Every listing of algorithms has the same rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "algorithm_rows", cache(live.algorithm_rows))
        yield


@cache
def _listed(what: str) -> dict[str, dict[str, Any]]:
    ran = runner().invoke(app, ["ls", what, "--json"])
    assert ran.exit_code == 0, ran.output
    return {row["name"]: row for row in json.loads(ran.output)}


def test_every_algorithm_and_optimizer_is_listed_with_a_line_about_it() -> None:
    assert list(_listed("algorithms")) == list(ALGORITHMS)
    assert list(_listed("optimizers")) == list(OPTIMIZERS)
    for row in (*_listed("algorithms").values(), *_listed("optimizers").values()):
        assert 20 < len(row["what"]) < 125 and row["what"].endswith("."), row["name"]
    assert "SWAT" in summary(swat)


PARAMETERS = 64 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10
HEAD, BEGUN = (32 * 10 + 10) / PARAMETERS, 1 / PARAMETERS
"""Shares of the last layer and of one number in the small model of the listing."""


@pytest.mark.parametrize(
    ("name", "cost"),
    [
        # Of fafed.md 2.3 and per_fedavg.md 2.9: gradients, up, down and kept in models.
        ("fedavg", (1, 1, 1, 0)),
        ("scaffold", (1, 2, 2, 1)),
        ("stem", (2, 2, 2, 1)),
        ("fafed", (2, 3, 3, 1)),
        ("per_fedavg", (4, 1, 1, 0)),
        # By their formulas.
        ("local", (1, 0, 1, 1)),
        ("fedper", (1, 1 - HEAD, 1, HEAD + BEGUN)),
        ("fedrep", (1, 1 - HEAD, 1, HEAD + BEGUN)),
        ("local_amsgrad", (1, 3, 2, 2)),
        ("mimeadam", (2, 2, 5, 0)),
        ("mimelite", (1, 2, 3, 0)),
    ],
)
def test_what_a_round_costs_is_what_the_formulas_say(name: str, cost: tuple[int, ...]) -> None:
    row = _listed("algorithms")[name]

    found = (row["gradients"], row["up"], row["down"], row["kept"])
    assert found == pytest.approx(cost, rel=2e-3)
    assert row["everyone"] is (name in ("scaffold", "fafed", "stem"))


def test_exchanges_and_passes_over_the_data_are_told() -> None:
    rows = _listed("algorithms")
    people = {row["name"]: row for row in algorithm_table(list(rows.values()))}

    assert (rows["mimeadam"]["exchanges"], rows["mimeadam"]["full"]) == (2, True)
    assert people["mimeadam"]["gradients"] == "2 + full"
    assert people["fafed"]["exchanges"] == "1 + 1 once"
    assert people["scaffold"]["up/down/kept"] == "2/2/1"
    assert _listed("optimizers")["fedams"]["server_state"] == ["m", "v", "vhat"]
    assert _listed("optimizers")["fedams"]["options"]["variant"] == "amsgrad"
    assert _listed("optimizers")["fedadam"]["options"]["tau"] == 0.01


def test_one_is_shown_with_its_options() -> None:
    told = runner().invoke(app, ["ls", "optimizers", "fedadam"])
    assert told.exit_code == 0 and "option tau" in told.output and "0.01" in told.output
    wrong = runner().invoke(app, ["ls", "optimizers", "adam"])
    assert isinstance(wrong.exception, ConfigError) and "there are: fedadam" in wrong.exception.message


def test_options_are_marked_as_compiled_in_or_as_scalars_of_the_task() -> None:
    rows = _listed("algorithms")
    assert rows["sgd"]["scalars"] == ["lr"] and rows["per_fedavg"]["scalars"] == [
        "alpha",
        "delta0",
        "lr",
        "schedule",
    ]
    assert rows["fedbat"]["scalars"] == ["lr", "rho"]
    assert {"lr", "alpha", "schedule", "beta", "rho", "ext"} <= set(rows["fafed"]["scalars"])
    assert rows["fafed"]["server_options"] == ["first_step"] and rows["scaffold"]["server_options"] == [
        "eta_g"
    ]
    assert not any(set(row["scalars"]) & set(row["server_options"]) for row in rows.values())
    told = runner().invoke(app, ["ls", "algorithms", "sgd"]).output
    assert "option lr, scalar of the task" in told and "option batch, compiled in" in told
    assert "compiled in" not in runner().invoke(app, ["ls", "optimizers", "fedadam"]).output
