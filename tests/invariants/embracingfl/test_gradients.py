"""EmbracingFL I3, I4, I6: what the local steps compute, and what they leave alone."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import Tensors
from edgefl.models.layers.recurrent import BiLstm
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide, tiers
from tests.invariants.embracingfl.tiny import local_gradient, record, samples, tiny, walk, weights_of
from tests.rings.rows import mostly_slow
from tests.support.reference import partial_average, run_round


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "steps"),
    mostly_slow(
        [("resnet8", 3), ("resnet8 static", 0), ("resnet20", 0), ("resnet20", 3), ("cnn", 3), ("mlp", 0)],
        [("resnet8", 3), ("resnet8 static", 0), ("cnn", 3), ("mlp", 0)],
    ),
)
def test_i3_suffix_gradient_is_the_suffix_block_of_the_full_gradient(name: str, steps: int) -> None:
    spec = tiny(name)
    x, y = samples(spec, 8)
    for cut in range(1, len(spec.units)):
        submodel = OutputSide(spec, cut, 1)
        kept = record(submodel, x, 8)
        algorithm = sgd(Objective.of(submodel), batch=8, steps=steps, lr=0.05)
        weights = weights_of(spec) | run_round(algorithm, spec.weights, walk(kept, y, 8)).update

        actual = local_gradient(submodel, weights, kept, y)

        expected = _full_gradient(spec, cut, weights, x, y)
        assert set(actual) == {name for name, _ in submodel.suffix.named_parameters()}
        for key, value in actual.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=f"cut {cut}, {key}")


def _full_gradient(spec: ModelSpec, cut: int, weights: Tensors, x: Tensor, y: Tensor) -> Tensors:
    """Autograd through the whole model at (y_t, z_tj): prefix in frozen mode, suffix in training mode."""
    spec.part(0, cut).eval()
    spec.part(cut, len(spec.units)).train()
    leaves = {
        name: weights[name].clone().requires_grad_(parameter.requires_grad)
        for name, parameter in spec.module.named_parameters()
    }
    buffers = {name: weights[name].clone() for name, _ in spec.module.named_buffers() if name in weights}
    loss = F.cross_entropy(torch.func.functional_call(spec.module, leaves | buffers, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def test_i3_lstm_weak_tier_has_the_truncated_gradient_at_the_first_step() -> None:
    spec = tiny("bilstm")
    x, y = samples(spec, 6)
    weak = tiers("bilstm")["weak"].of(spec)
    lstm, head = spec.module.get_submodule("lstm"), spec.module.get_submodule("head")
    assert isinstance(lstm, BiLstm)

    actual = local_gradient(weak, weights_of(spec), record(weak, x, 6), y)

    words = spec.module.get_submodule("embedding")(x).detach()
    logit = head(torch.cat([_stopped(lstm, words, index) for index in range(2)], dim=1)).squeeze(1)
    F.binary_cross_entropy_with_logits(logit, y.float()).backward()
    assert weak.skip == 4
    for key, parameter in weak.suffix.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(actual[key], parameter.grad, rtol=1e-4, atol=1e-6, msg=key)
        parameter.grad = None


def _stopped(lstm: BiLstm, words: Tensor, direction: int) -> Tensor:
    """The direction's last hidden state in the full graph, with a stop-gradient in the middle."""
    cell = lstm.directions[direction]
    order = words.flip(1) if direction else words
    h, c = cell(order[:, :4], cell.zero_state(words))
    return cell(order[:, 4:], (h.detach(), c.detach()))[0]


def test_i3_lstm_moderate_tier_has_the_exact_gradient() -> None:
    spec = tiny("bilstm")
    x, y = samples(spec, 6)
    moderate = tiers("bilstm")["moderate"].of(spec)
    actual = local_gradient(moderate, weights_of(spec), record(moderate, x, 6), y)
    F.binary_cross_entropy_with_logits(spec.module(x).squeeze(1), y.float()).backward()
    for key, parameter in moderate.suffix.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(actual[key], parameter.grad, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["resnet8", "cnn", "mlp"])
def test_i4_a_round_leaves_every_prefix_byte_and_returns_the_suffix_only(name: str) -> None:
    spec = tiny(name)
    x, y = samples(spec, 8)
    for cut in range(1, len(spec.units)):
        submodel = OutputSide(spec, cut, 1)
        before = {key: _digest(tensor) for key, tensor in spec.weights.items()}
        update = run_round(
            sgd(Objective.of(submodel), batch=4, steps=3), spec.weights, walk(record(submodel, x, 4), y, 4)
        ).update
        assert {key: _digest(tensor) for key, tensor in spec.weights.items()} == before
        assert set(update) == set(submodel.holds)
        assert all(key.partition(".")[0] in spec.units[cut:] for key in update)
        assert all(parameter.grad is None for parameter in spec.module.parameters())


@pytest.mark.parametrize("name", mostly_slow(["resnet8", "cnn"], ["cnn"]))
def test_i4_the_training_graph_computes_no_gradient_for_the_boundary(name: str) -> None:
    spec = tiny(name)
    submodel = OutputSide(spec, 1, 1)
    step = sgd(Objective.of(submodel), batch=4).phases[0].function
    graph = make_fx(step.fn)(step.example(0)).graph
    boundary = [node for node in graph.nodes if node.op == "placeholder"][
        list(step.inputs).index("batch.0.x")
    ]
    backward = [node for node in boundary.users if "convolution_backward" in str(node.target)]
    assert backward, "the first convolution's kernel gradient reads the boundary"
    assert all(node.args[-1][0] is False for node in backward)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def test_i6_averaged_local_models_equal_the_summed_gradient_update() -> None:
    spec, eta, tau, cut = tiny("mlp"), 0.1, 3, 1
    cuts = (0, 0, cut, cut, cut)  # s = 2 strong clients of m = 5
    uploads, sums = [], {name: torch.zeros_like(tensor) for name, tensor in spec.weights.items()}
    for client, own in enumerate(cuts):
        submodel = OutputSide(spec, own, 1)
        x, y = samples(spec, 8, seed=10 + client)
        kept = record(submodel, x, 4) if own else x
        algorithm = sgd(Objective.of(submodel), batch=4, steps=tau, lr=eta, momentum=0.0, weight_decay=0.0)
        uploads.append(
            (submodel.place({}, 1).regions, run_round(algorithm, spec.weights, walk(kept, y, 4)).update)
        )
        for name, total in _gradient_sum(spec, own, kept, y, eta, tau).items():
            sums[name] += total

    averaged = partial_average(spec.weights, uploads)

    strong = sum(own == 0 for own in cuts)
    for name, old in spec.weights.items():
        sharers = strong if name.startswith("dense1.") else len(cuts)  # 1/s for y, 1/m for z
        torch.testing.assert_close(averaged[name], old - eta / sharers * sums[name], rtol=1e-5, atol=1e-6)


def _gradient_sum(spec: ModelSpec, cut: int, x: Tensor, y: Tensor, eta: float, tau: int) -> Tensors:
    """sum_j grad f(x_tj) of one client along its own trajectory, by plain autograd."""
    suffix: nn.Sequential = spec.part(cut, len(spec.units))
    values = {name: parameter.detach().clone() for name, parameter in suffix.named_parameters()}
    total = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(tau):
        rows = torch.arange(step * 4, step * 4 + 4).remainder(len(x))
        leaves = {name: value.requires_grad_() for name, value in values.items()}
        loss = F.cross_entropy(torch.func.functional_call(suffix, leaves, (x[rows],)), y[rows])
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
            total[name] += gradient
            values[name] = (value - eta * gradient).detach()
    return total
