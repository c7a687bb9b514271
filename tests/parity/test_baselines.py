"""Every function of every baseline: the exported graph beside torch, on dense layers and on convolutions with batch norm.

The inputs are those of real rounds where an algorithm keeps squares or counts, which random ones do not resemble.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from edgefl import algorithms
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, role_of
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog as kinds
from edgefl.submodels.submodel import Submodel
from tests.pairs import in_both, in_turn
from tests.parity.forms import checked
from tests.support.reference import Client, federated

ADAPTIVE = ["local_amsgrad", "mimeadam", "mimelite", "adamw"]
TRAINING = {"batch": 4, "steps": 2, "lr": 0.05}
OWN = ("start", "train", "finish")
"""Functions of FedProx and SCAFFOLD that random inputs try well. All others are those of FedAvg."""


@dataclass(frozen=True)
class Seen(Function):
    """A function whose example is what it was given in a round."""

    given: Tensors = field(default_factory=dict)

    def example(self, seed: int) -> Tensors:
        return self.given


def _spec(model: str) -> ModelSpec:
    if model == "mlp":
        return build_model("mlp", size=4, hidden=[6], classes=3)
    return build_model("fedbat_cnn", size=4, widths=(2, 4), classes=3)


def _check(form: str, function: Function) -> None:
    worst = checked(form, function, 3).worst
    assert worst <= 1e-4, (function.name, worst)


def _named(algorithm: Algorithm, names: tuple[str, ...]) -> Iterator[Function]:
    yield from (function for function in algorithm.functions if function.name in names)


def _recorded(algorithm: Algorithm, spec: ModelSpec) -> list[Seen]:
    """Every function of every exchange but ``evaluate``, as the second turn calls it last."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((6, *spec.sample.shape), generator=generator)
    seen: dict[tuple[int, str], Seen] = {}

    def watched(exchange: Algorithm, number: int) -> Algorithm:
        def watch(function: Function) -> Function:
            def fn(tensors: Tensors) -> Tensors:
                given = {name: tensor.clone() for name, tensor in tensors.items()}
                seen[number, function.name] = Seen(function.name, function.fn, function.inputs, given=given)
                return function.fn(tensors)

            return replace(function, fn=fn)

        phases = tuple(replace(phase, function=watch(phase.function)) for phase in exchange.phases)
        return replace(exchange, start=watch(exchange.start), phases=phases, finish=watch(exchange.finish))

    ahead = tuple(watched(each, number) for number, each in enumerate(algorithm.ahead, 1))
    whole = replace(watched(algorithm, 0), ahead=ahead)
    client = Client(0, x, torch.arange(6) % spec.classes)
    trained = [name for name, _ in spec.module.named_parameters()]
    for _ in federated(whole, spec.weights, [client], rounds=2 * len(algorithm.exchanges), trained=trained):
        pass
    return list(seen.values())


@pytest.mark.parametrize(
    ("name", "model", "form"),
    [
        *in_turn(
            [
                ("local_amsgrad", "mlp"),
                ("mimeadam", "mlp"),
                ("adamw", "mlp"),
                ("fedrep", "mlp"),
                ("fedbn", "cnn with batch norm"),
            ],
            rare=[(name, "cnn with batch norm") for name in (*ADAPTIVE, "fedper", "fedrep")],
        ),
        *in_both("mimelite", "mlp"),
    ],
)
def test_every_function_equals_torch_on_what_a_round_gives_it(name: str, model: str, form: str) -> None:
    spec = _spec(model)
    options = {"keep": True} if name == "adamw" else {}
    algorithm = algorithms.build(name, Objective.of(kinds.build(spec, "output_side")), **TRAINING, **options)

    seen = _recorded(algorithm, spec)

    assert len(seen) == {"mimeadam": 6, "mimelite": 4, "fedrep": 4}.get(name, 3)
    for function in seen:
        assert any(bool(tensor.any()) for port, tensor in function.given.items() if role_of(port) != "batch")
        _check(form, function)


def _submodel(kind: str) -> Submodel:
    options: Mapping[str, Mapping[str, object]] = {
        "output_side": {"cut": 1},
        "width": {"gamma": 0.5, "scaler": True},
    }
    return kinds.build(_spec("cnn with batch norm"), kind, **options[kind])


@pytest.mark.parametrize(
    ("name", "kind", "form"),
    in_turn(
        [("fedprox", "width"), ("scaffold", "output_side")],
        rare=[("fedprox", "output_side"), ("scaffold", "width")],
    ),
)
def test_the_functions_of_a_submodel_equal_torch(name: str, kind: str, form: str) -> None:
    algorithm = algorithms.build(name, Objective.of(_submodel(kind)), **TRAINING)

    for function in _named(algorithm, OWN):
        _check(form, function)


@pytest.mark.parametrize(("kind", "form"), [*in_turn(["importance_structured"]), *in_both("importance")])
def test_fedprox_trains_what_an_importance_tier_holds(kind: str, form: str) -> None:
    submodel = kinds.build(_spec("mlp"), kind, gamma=0.5)

    for function in _named(algorithms.build("fedprox", Objective.of(submodel), **TRAINING), OWN):
        _check(form, function)
