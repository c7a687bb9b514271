"""The sgd algorithm against torch.optim.SGD, and the contract: pure, traceable, vectorisable."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.submodels.frozen_forward import chunk_forward
from edgefl.contract.algorithm import INPUT_ROLES, OUTPUT_ROLES, Algorithm, Function
from edgefl.contract.tensors import role_of
from edgefl.errors import ConfigError, ModelError
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from tests.invariants.embracingfl.tiny import samples, tiny, walk
from tests.rings.rows import mostly_slow
from tests.support.reference import run_round

MODELS = ("resnet8", "resnet8 static", "cnn", "mlp", "bilstm")


def _algorithm(spec: ModelSpec, **options: object) -> Algorithm:
    return algorithms.build("sgd", Objective(spec.module, spec.sample, spec.loss), batch=4, **options)


def _functions(name: str) -> list[Function]:
    spec = tiny(name)
    chunk = OutputSide(spec, 1).prefix[0]
    return [*_algorithm(spec).functions, chunk_forward(chunk.module, chunk.sample, batch=4)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("name", ["resnet8", "resnet8 static", "cnn", "mlp"])
def test_five_steps_equal_torch_optim_sgd(name: str, decay_all: bool) -> None:
    spec = tiny(name)
    x, y = samples(spec, 12)
    update = run_round(
        _algorithm(spec, steps=5, lr=0.05, weight_decay=0.1, decay_all=decay_all), spec.weights, walk(x, y, 4)
    ).update

    module = spec.module.train()
    kernels = [p for p in module.parameters() if p.ndim >= 2 or decay_all]
    others = [p for p in module.parameters() if p.ndim < 2 and not decay_all]
    groups = [{"params": kernels, "weight_decay": 0.1}, *([{"params": others}] if others else [])]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    for step in range(5):
        rows = torch.arange(step * 4, step * 4 + 4) % 12
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()

    assert set(update) == set(spec.weights)
    for key, value in spec.weights.items():
        torch.testing.assert_close(update[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_functions_are_pure_and_speak_in_known_roles(name: str) -> None:
    for function in _functions(name):
        inputs = function.example(0)
        before = {key: tensor.clone() for key, tensor in inputs.items()}
        first, again = function(inputs), function(inputs)
        assert all(torch.equal(before[key], inputs[key]) for key in inputs), function.name
        assert all(torch.equal(first[key], again[key]) for key in first), function.name
        assert {role_of(key) for key in inputs} <= INPUT_ROLES
        assert {role_of(key) for key in first} <= OUTPUT_ROLES
        assert not any(tensor.requires_grad for tensor in first.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(MODELS, ["cnn", "mlp", "bilstm"]))
def test_functions_trace_into_graphs_without_weights_inside(name: str) -> None:
    for function in _functions(name):
        inputs = function.example(1)
        graph = make_fx(function.fn)(inputs)
        assert not [
            n.target for n in graph.graph.nodes if n.op == "get_attr" and "tensor" not in str(n.target)
        ]
        other = function.example(2)
        for key, value in function(other).items():
            torch.testing.assert_close(graph(other)[key], value)


@pytest.mark.parametrize("name", ["resnet8", "mlp"])
def test_a_step_runs_for_many_clients_at_once(name: str) -> None:
    step = _algorithm(tiny(name)).phases[0].function
    clients = [step.example(seed) for seed in range(3)]
    together = torch.vmap(step.fn)({key: torch.stack([c[key] for c in clients]) for key in clients[0]})
    for index, client in enumerate(clients):
        for key, value in step(client).items():
            torch.testing.assert_close(together[key][index], value, rtol=1e-4, atol=1e-5)


def test_state_starts_with_the_weights_and_no_momentum_for_statistics() -> None:
    spec = tiny("resnet8")
    algorithm = _algorithm(spec)
    state = algorithm.start({f"weights.{key}": value for key, value in spec.weights.items()})
    assert all(torch.equal(state[f"state.weights.{key}"], value) for key, value in spec.weights.items())
    momentum = [key for key in state if key.startswith("state.momentum.")]
    assert len(momentum) == len(list(spec.module.parameters()))
    assert not any(state[key].any() for key in momentum)
    step = algorithm.phases[0].function
    assert set(step(step.example(0))) == set(state) | {"metric.loss", "metric.correct"}


def test_learning_rate_is_an_input() -> None:
    spec = tiny("mlp")
    x, y = samples(spec, 8)
    still = run_round(_algorithm(spec, steps=2), spec.weights, walk(x, y, 4), hyper={"lr": 0.0}).update
    assert all(torch.equal(still[key], value) for key, value in spec.weights.items())


@pytest.mark.parametrize("name", ["resnet8", "bilstm"])
def test_evaluation_counts_only_unmasked_rows(name: str) -> None:
    spec = tiny(name)
    objective = Objective(spec.module, spec.sample, spec.loss)
    x, y = samples(spec, 4)
    inputs = {f"weights.{key}": value for key, value in spec.weights.items()}
    inputs |= {"batch.0.x": x, "batch.0.y": y, "batch.0.mask": torch.tensor([1.0, 1.0, 1.0, 0.0])}
    metrics = _algorithm(spec).evaluate(inputs)
    out = objective.predict(spec.weights, x)[:3]
    assert metrics["metric.count"] == 3
    torch.testing.assert_close(metrics["metric.loss_sum"], spec.loss.each(out, y[:3]).sum())
    assert metrics["metric.correct"] == spec.loss.correct(out, y[:3]).sum()
    assert all(metric.dtype == torch.float32 for metric in metrics.values())


def test_dropout_noise_is_a_port_shaped_like_the_layer_s_input() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    from edgefl.contract.tensors import TensorSpec
    from edgefl.models.split import split

    spec = split(module, sample=TensorSpec((4,)), classes=3)
    step = _algorithm(spec).phases[0].function
    assert step.inputs["noise.2.uniform"] == TensorSpec((4, 6))
    inputs = step.example(0)
    dropped = step(inputs | {"noise.2.uniform": torch.zeros(4, 6)})
    assert torch.equal(
        dropped["state.momentum.1.weight"],
        1e-4 * inputs["state.weights.1.weight"] + (0.9 * inputs["state.momentum.1.weight"]),
    ), "everything dropped: only decay is left of the first layer's gradient"


def test_wrong_names_and_options_name_what_exists() -> None:
    objective = Objective(tiny("mlp").module, tiny("mlp").sample)
    with pytest.raises(ConfigError, match="there are: "):
        algorithms.build("adam", objective)
    with pytest.raises(ConfigError, match=r"no option 'step'.*steps"):
        algorithms.build("sgd", objective, step=3)
    with pytest.raises(ModelError, match="needs 'dense1"):
        objective.predict({}, torch.zeros(1, 1, 6, 6))


def test_kernels_are_what_decay_acts_on() -> None:
    spec = tiny("bilstm")
    kernels = Objective(spec.module, spec.sample).kernels
    assert "embedding.weight" not in kernels
    assert {"lstm.forward_cell.kernel", "lstm.reverse_cell.recurrent", "head.weight"} <= kernels
    assert not any(key.endswith("bias") for key in kernels)
    algorithm = sgd(Objective(spec.module, spec.sample), batch=2)
    assert algorithm.hyper == {"lr": 0.05}
