"""The documented example: FedDyn's formulas against a plain loop, its graphs, and the page that shows it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ConfigError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from examples.feddyn import feddyn
from tests.rings.rows import mostly_slow
from tests.support.reference import Client, Completed, federated

DOCS = Path(__file__).resolve().parents[2] / "docs"
SAMPLES, FEATURES, CLASSES = 12, 3, 2
ALPHA, LR = 0.4, 0.3


def objective() -> Objective:
    """Softmax regression."""
    module = nn.Sequential(OrderedDict(dense=nn.Linear(FEATURES, CLASSES).double()))
    return Objective(module, TensorSpec((FEATURES,), torch.float64))


def clients(count: int) -> list[Client]:
    """Each has its own idea of the classes; no hyperplane separates them."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64) + 0.5 * number
        lean = torch.rand(SAMPLES, generator=generator) < (number + 1) / (count + 1)
        found.append(Client(number, x, lean.long()))
    return found


def initial() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        for name, spec in objective().weights.items()
    }


def gradient(weights: Mapping[str, Tensor], client: Client) -> Tensors:
    """Of a client's loss, by plain autograd."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    F.cross_entropy(F.linear(client.x, leaves["dense.weight"], leaves["dense.bias"]), client.y).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def rounds_of(
    algorithm: Algorithm, users: list[Client], rounds: int, fraction: float = 1.0
) -> list[Completed]:
    """Every batch is all of a client's samples, in their order."""

    def feed(client: Client) -> Tensors:
        return {"batch.0.x": client.x, "batch.0.y": client.y}

    return list(
        federated(
            algorithm,
            initial(),
            users,
            rounds=rounds,
            fraction=fraction,
            feed=lambda _exchange, client, _number: lambda _function, _step: feed(client),
        )
    )


def test_three_rounds_with_half_of_the_devices_are_a_plain_loop() -> None:
    users, steps = clients(4), 3
    algorithm = feddyn(objective(), batch=SAMPLES, steps=steps, lr=LR, alpha=ALPHA)
    done = rounds_of(algorithm, users, 3, fraction=0.5)

    x = initial()
    h = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    duals = {user.number: h for user in users}
    for completed in done:
        trained = []
        for number in completed.selected:
            w = dict(x)
            for _ in range(steps):
                g, dual = gradient(w, users[number]), duals[number]
                w = {n: w[n] - LR * (g[n] - dual[n] + ALPHA * (w[n] - x[n])) for n in w}
            duals[number] = {n: duals[number][n] - ALPHA * (w[n] - x[n]) for n in w}
            trained.append(w)
        moved = {n: sum((w[n] - x[n] for w in trained), torch.zeros_like(x[n])) for n in x}
        h = {n: h[n] - ALPHA * moved[n] / len(users) for n in x}  # over all devices, as the paper has it
        x = {n: sum((w[n] for w in trained), torch.zeros_like(x[n])) / len(trained) - h[n] / ALPHA for n in x}
        for name in x:
            torch.testing.assert_close(completed.weights[name], x[name], rtol=0, atol=1e-12)
            torch.testing.assert_close(completed.server_state[f"h/{name}"], h[name], rtol=0, atol=1e-12)
            for number in completed.selected:
                kept = completed.carries[number][f"dual.{name}"]
                torch.testing.assert_close(kept, duals[number][name], rtol=0, atol=1e-12)
    assert len({completed.selected for completed in done}) > 1, "the rounds should take different devices"


@pytest.mark.slow
def test_it_ends_where_the_mean_gradient_is_zero() -> None:
    users = clients(3)

    def left(algorithm: Algorithm) -> float:
        end = rounds_of(algorithm, users, 30)[-1].weights
        mean = [sum(gradient(end, user)[name] for user in users) / len(users) for name in end]
        return max(float(torch.as_tensor(each).abs().max()) for each in mean)

    ours = left(feddyn(objective(), batch=SAMPLES, steps=5, lr=1.0, alpha=ALPHA))
    averaged = left(sgd(objective(), batch=SAMPLES, steps=5, lr=1.0, momentum=0.0, weight_decay=0.0))

    assert ours < 1e-5
    assert averaged > 1e-2


@pytest.mark.parametrize(
    ("model", "kind"), mostly_slow([("mlp", "output_side"), ("cnn", "width")], [("mlp", "output_side")])
)
def test_every_function_is_the_same_in_onnx_runtime(model: str, kind: str) -> None:
    spec = build_model(model, size=8, **({"hidden": [4]} if model == "mlp" else {}))
    submodel = catalog.build(spec, kind, **({"cut": 0} if kind == "output_side" else {"gamma": 0.5}))
    algorithm = algorithms.build("examples.feddyn:feddyn", Objective.of(submodel), batch=4, steps=2)

    for function in algorithm.functions:
        verify(function, to_onnx(capture(function)), seed=0)


def test_a_wrong_alpha_is_refused_with_what_to_take() -> None:
    with pytest.raises(ConfigError, match=r"alpha is above 0, found -1.*take 0\.1"):
        feddyn(objective(), alpha=-1)


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (DOCS / "tutorials" / "new-method.md").read_text()

    assert (DOCS.parent / "examples" / "feddyn.py").read_text() in re.findall(
        r"```python\n(.*?)```", page, re.DOTALL
    )


def test_the_example_is_short() -> None:
    lines = (DOCS.parent / "examples" / "feddyn.py").read_text().splitlines()

    assert len([line for line in lines if line.strip()]) <= 65
