"""Functions that compute the same have one fingerprint, all others another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.zoo.basic import mlp
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.fingerprint import TraceCache
from edgefl_export.capture.trace import capture, decompose
from tests.exporters.examples import pointwise, step_of

ROOT = Path(__file__).resolve().parents[3]


def fingerprint(function: Function) -> str:
    return TraceCache().fingerprint(function)


def step(activation: Callable[[], nn.Module] = nn.ReLU, *, width: int = 4, stride: int = 1) -> Function:
    layers = [nn.Conv2d(1, width, 3, stride=stride), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return step_of(nn.Sequential(*layers, nn.Linear(width, 3)), (1, 8, 8))


def test_the_same_model_with_other_weights_is_the_same() -> None:
    torch.manual_seed(1)
    first = fingerprint(step())
    torch.manual_seed(2)
    assert fingerprint(step()) == first


@pytest.mark.parametrize(
    "other",
    [lambda: step(nn.Tanh), lambda: step(width=5), lambda: step(stride=2)],
    ids=["op", "width", "option"],
)
def test_another_structure_is_another(other: Callable[[], Function]) -> None:
    assert fingerprint(other()) != fingerprint(step())


def test_what_was_traced_for_the_digest_is_compiled_and_not_traced_again() -> None:
    made, runs = step(), list[str]()

    def counted(tensors: Tensors) -> Tensors:
        runs.append("run")
        return made.fn(tensors)

    function = replace(made, fn=counted)
    traces = TraceCache()
    digest = traces.fingerprint(function)
    lowered = decompose(traces.take(function))
    assert digest == fingerprint(made)
    assert len(runs) == 1
    assert lowered.module.code == capture(made).module.code
    traces.take(function)
    assert len(runs) == 2, "a graph is used up"


def test_a_constant_counts_with_its_value_and_a_number_too() -> None:
    def scaled(by: object) -> Function:
        return pointwise(lambda tensors: {"state.w": tensors["state.w"] * by}, state__w=(3,))  # type: ignore[dict-item]

    digests = [
        fingerprint(scaled(by)) for by in (2.0, 3.0, torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 4]))
    ]
    assert len(set(digests)) == 4
    assert fingerprint(scaled(torch.tensor([1.0, 2, 3]))) == digests[2]


def test_what_is_read_and_what_is_returned_count_with_their_places() -> None:
    def of(reads: str, gives: str) -> str:
        return fingerprint(
            pointwise(lambda tensors: {gives: tensors[reads].exp()}, state__a=(3,), state__b=(3,))
        )

    assert len({of("state.a", "state.a"), of("state.b", "state.a"), of("state.a", "state.b")}) == 3


def test_ports_count_whether_they_are_read_or_not() -> None:
    def of(**shapes: tuple[int, ...]) -> str:
        return fingerprint(pointwise(lambda tensors: {"state.a": tensors["state.a"].exp()}, **shapes))

    assert of(state__a=(3,)) != of(state__a=(3,), batch__0__x=(2,))
    labels = {"batch.0.y": TensorSpec((2,), torch.int64)}
    plain = Function("f", lambda tensors: {"metric.loss": tensors["batch.0.y"].float().sum()}, labels)
    ranged = Function(plain.name, plain.fn, {"batch.0.y": TensorSpec((2,), torch.int64, below=2)})
    assert fingerprint(plain) != fingerprint(ranged)


def test_algorithms_differ_by_what_is_compiled_in_and_by_nothing_else() -> None:
    def step_with(**options: float) -> str:
        objective = Objective.of(OutputSide(mlp(size=4, hidden=[3], classes=2), 0))
        return fingerprint(sgd(objective, batch=2, **options).phases[0].function)  # type: ignore[arg-type]

    assert step_with(lr=0.1) == step_with(lr=0.2), "lr is a scalar of the task"
    assert step_with(momentum=0.9) != step_with(momentum=0.0)


@pytest.mark.slow  # the process imports torch
def test_another_process_finds_the_same() -> None:
    script = (
        "from tests.exporters.capture.test_fingerprint import fingerprint, step\nprint(fingerprint(step()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == fingerprint(step())
