"""The sgd algorithm against torch.optim.SGD, and the contract: pure, traceable, vectorisable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.submodels.frozen_forward import chunk_forward
from edgefl.contract.algorithm import INPUT_ROLES, OUTPUT_ROLES, Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, role_of
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.algorithms.users import Users, Vector, flat
from tests.invariants.embracingfl.tiny import samples, tiny, walk
from tests.pairs import by_default
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, ModelError, refuses
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


@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("sgd", "resnet8", {}),
        ("sgd", "mlp", {}),
        ("binary", "cnn", {"clip": True}),
        ("swat", "cnn", {"sparsity": 0.9}),
    ],
)
def test_a_step_runs_for_many_clients_at_once(name: str, model: str, options: dict[str, object]) -> None:
    spec = tiny(model)
    objective = Objective(spec.module, spec.sample, spec.loss)
    step = algorithms.build(name, objective, batch=4, **options).phases[0].function
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
    with refuses(ConfigError, unknown=["step"], accepted=...):
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


# -- local AdamW on a transformer, beside torch's own ------------------------------------------------------


STEPS, LR, DECAY = 4, 3e-3, 0.3


def _transformer() -> ModelSpec:
    """In float64: biases of keys have gradient 0, of whose rounding Adam would make full steps."""
    spec = build_model("vit", size=8, width=12, in_channels=1, classes=3)
    spec.module.double()
    return replace(spec, sample=TensorSpec(spec.sample.shape, torch.float64))


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64), torch.arange(8) % 3


def _ours(spec: ModelSpec, batch: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
    objective = Objective.of(OutputSide(spec, 0))
    assert not objective.noise(8)
    algorithm = algorithms.build("adamw", objective, batch=8, steps=STEPS, lr=LR, weight_decay=DECAY)

    def feed(_function: Function, _step: int) -> Tensors:
        return {"batch.0.x": batch[0], "batch.0.y": batch[1]}

    return run_round(algorithm, {n: t.clone() for n, t in spec.weights.items()}, feed).update


def _theirs(spec: ModelSpec, batch: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
    kernels: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for path, module in spec.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            kernel = parameter.dim() >= 2 and not isinstance(module, nn.Embedding)
            (kernels if kernel else others).append((f"{path}.{name}", parameter))
    groups = [
        {"params": [parameter for _, parameter in group], "weight_decay": decay}
        for group, decay in ((kernels, DECAY), (others, 0.0))
        if group
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    spec.module.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(spec.module(batch[0]), batch[1]).backward()
        optimizer.step()
    return dict(spec.weights)


def test_steps_on_a_transformer_equal_torchs_adamw(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    ours, theirs = _ours(_transformer(), batch), _theirs(_transformer(), batch)

    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-9, msg=name)


# -- the norm that a gradient is scaled down to, in every baseline (fafed.md 4.4) ------------------------------


BATCH, CLIP_STEPS, CLIP_LR, ROUNDS, CLIP = 4, 3, 0.02, 3, 3.0
TRAINING = {"batch": BATCH, "steps": CLIP_STEPS, "lr": CLIP_LR, "clip": CLIP}
Correction = Callable[[Vector, Vector], Vector]


def _down(g: Vector) -> Vector:
    return g * min(1.0, CLIP / float(np.linalg.norm(g)))


def _local(users: Users, user: int, x: Vector, number: int, added: Correction, seen: list[float]) -> Vector:
    """Local steps along the clipped gradient and what is added to it at (y, x); norms go to ``seen``."""
    y = x
    for step in range(CLIP_STEPS):
        g = users.gradient(user, y, users.batch(user, number, step, BATCH))
        seen.append(float(np.linalg.norm(g)))
        y = y - CLIP_LR * (_down(g) + added(y, x))
    return y


def _close(found: Vector, wanted: Vector) -> bool:
    return bool(np.allclose(found, wanted, rtol=1e-10, atol=1e-12))


@pytest.mark.parametrize(
    ("name", "options", "added"),
    [
        ("fedavg", {}, lambda y, x: 0.0 * y),
        ("fedavg_update", {}, lambda y, x: 0.0 * y),
        ("fedprox", {"mu": 0.7}, lambda y, x: 0.7 * (y - x)),
        ("sgd", {"momentum": 0.0, "weight_decay": 0.5, "decay_all": True}, lambda y, x: 0.5 * y),
    ],
)
def test_only_the_gradient_is_scaled_down(name: str, options: dict[str, float], added: Correction) -> None:
    users, seen = Users(), list[float]()

    found = users.run(algorithms.build(name, users.objective, **TRAINING, **options), ROUNDS)

    x = users.theta
    for number in range(1, ROUNDS + 1):
        x = np.mean([_local(users, user, x, number, added, seen) for user in range(3)], axis=0)
        assert _close(flat(found[number - 1].weights), x)
    assert min(seen) < CLIP < max(seen), "both sides of the minimum are tried"


def test_scaffold_corrects_the_clipped_gradient() -> None:
    users, seen = Users(), list[float]()

    found = users.run(algorithms.build("scaffold", users.objective, **TRAINING), ROUNDS)

    x, c, own = users.theta, np.zeros(4), np.zeros((3, 4))
    for number in range(1, ROUNDS + 1):
        left = [
            _local(users, user, x, number, lambda y, x, v=c - own[user]: v, seen)  # type: ignore[misc]
            for user in range(3)
        ]
        new = np.stack([own[user] - c + (x - left[user]) / (CLIP_STEPS * CLIP_LR) for user in range(3)])
        x, c, own = np.mean(left, axis=0), c + (new - own).mean(0), new
        assert _close(flat(found[number - 1].weights), x)
    assert min(seen) < CLIP < max(seen)


def test_fedavg_at_the_gradients_of_meta_learning_clips_as_fedavg_does() -> None:
    users = Users()
    options = {**TRAINING, "steps": CLIP_STEPS // 3, "factor": 3}
    found = users.run(algorithms.build("fedavg_matched", users.objective, **options), 1)
    plain = users.run(algorithms.build("fedavg", users.objective, **TRAINING), 1)

    for user in range(3):
        assert _close(flat(found[0].updates[user]), flat(plain[0].updates[user]))
    unclipped = users.run(algorithms.build("fedavg", users.objective, **{**TRAINING, "clip": None}), 1)
    assert not _close(flat(unclipped[0].weights), flat(plain[0].weights))


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf")])
@pytest.mark.parametrize("name", ["sgd", "fedavg", "fedprox", "scaffold"])
def test_a_norm_that_cannot_be_is_named(name: str, clip: float) -> None:
    with refuses(ConfigError, option="clip", value=...):
        algorithms.build(name, Users().objective, clip=clip)


@pytest.mark.parametrize(
    ("name", "clip"),
    by_default(product(["fedavg", "scaffold"], [0.1, 1e3]), [("fedavg", 0.1), ("scaffold", 1e3)]),
)
def test_the_exported_step_clips_as_torch_does(name: str, clip: float) -> None:
    spec = build_model("mlp", size=4, hidden=[6], classes=3)
    made = algorithms.build(name, Objective.of(OutputSide(spec, 0)), batch=4, steps=2, lr=0.05, clip=clip)
    step = made.phases[0].function
    assert verify(step, to_onnx(capture(step)), seed=3).worst <= 1e-4
