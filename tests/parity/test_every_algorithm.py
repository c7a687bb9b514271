"""Every function of every algorithm beside torch, on each engine."""

from __future__ import annotations

from itertools import product

import pytest

from edgefl import algorithms
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.models.exits import early_exits
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog as kinds
from edgefl.submodels.submodel import Submodel
from tests.pairs import FORMATS, by_default
from tests.parity.forms import checked

NETS = {"mlp": {"size": 4, "hidden": (5,)}, "fedbat_cnn": {"size": 4, "widths": (3, 4)}}
WITH_EXITS = {"multi_exit"}
WITH_BATCH_NORM = ("fedbat", "multi_exit", "per_fedavg", "scaffold", "swat")
CASES = [(name, "fedbat_cnn" if name in WITH_EXITS else "mlp") for name in ALGORITHMS]
RARE = [(name, "fedbat_cnn") for name in WITH_BATCH_NORM if name not in WITH_EXITS]
"""An MLP has no place for exits. Batch norm and pooling have tests of their own, so few algorithms need both nets."""
ROWS = [(name, net, form) for (name, net), form in product(CASES, FORMATS)]
ROWS += [(name, net, form) for (name, net), form in zip(RARE, FORMATS * len(RARE), strict=False)]
DEFAULT = [
    ("sgd", "mlp", "onnx"),
    ("naive_adaptive", "mlp", "executorch"),
    ("multi_exit", "fedbat_cnn", "onnx"),
    ("binary", "mlp", "executorch"),
]
"""The slow ring has all. In the default ring the steps of FedProx, SCAFFOLD, Per-FedAvg, FAFED, SWAT, AdamW, local AMSGrad,
MimeAdam and FedBAT's ``finish`` are compared by tests of their own."""
OPTIONS: dict[str, dict[str, float]] = {"sgd": {"personal": 0.1}, "multi_exit": {"kd_weight": 0.3}}


def submodel(name: str, net: str) -> Submodel:
    if name in WITH_EXITS:
        return kinds.build(early_exits(base=net, classes=3, **NETS[net]), "early_exit", exit=2)
    return kinds.build(build_model(net, classes=3, seed=1, **NETS[net]), "output_side", cut=0)


def functions(algorithm: Algorithm) -> dict[tuple[int, str], Function]:
    """By exchange and name: one that several phases or exchanges share is there once."""
    found = {id(each): (at, each) for at, part in enumerate(algorithm.exchanges) for each in part.functions}
    return {(at, function.name): function for at, function in found.values()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "net", "form"), by_default(ROWS, DEFAULT))
def test_every_function_of_every_algorithm_equals_torch(name: str, net: str, form: str) -> None:
    objective = Objective.of(submodel(name, net))
    algorithm = algorithms.build(name, objective, batch=4, steps=3, **OPTIONS.get(name, {}))

    reports = {place: checked(form, function, seed=2) for place, function in functions(algorithm).items()}

    assert len(reports) >= 4  # start, a step, finish, evaluate
    for place, report in reports.items():
        assert not report.rounding or name == "swat", (place, report.rounding)
