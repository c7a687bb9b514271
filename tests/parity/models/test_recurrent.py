"""Exported recurrent layers: the training step equals torch's own layers, and its graph has one size for all lengths."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.torch_functions.random_inputs import RandomInputMode
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import tiers
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.compiler import target_of
from edgefl_export.executorch.rules.recurrent import STEPS
from edgefl_export.onnx.model import to_onnx
from tests.pairs import by_default, in_turn
from tests.parity.forms import written
from tests.support.errors import ExportError, refuses

E, H, B, T = 5, 4, 3, 2
SEEDS = (1, 2, 3)
KINDS = (nn.LSTM, nn.GRU)


class Outputs(nn.Module):
    """A torch-like recurrent layer, batch first, of which a loss reads the sequence and the last states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x)
        last = torch.cat([each.flatten() for each in (state if isinstance(state, tuple) else (state,))])
        return torch.cat([out.flatten(), last.flatten()])


def training_step(
    module: nn.Module, length: int = T, dtype: torch.dtype = torch.float32, *, functional: bool = False
) -> Function:
    """One SGD step on a curved loss; the output and the gradient of the input are compared too.

    It computes in ``dtype`` whatever its ports are. ``functional`` differentiates by ``torch.func.grad``.
    """
    names = [name for name, _ in module.named_parameters()]
    ports = {f"state.{name}": TensorSpec.of(value) for name, value in module.named_parameters()}
    ports["batch.0.x"] = TensorSpec((B, length, E))
    parts = module.named_modules()
    noise = tuple(f"{name}.uniform" for name, part in parts if isinstance(part, nn.RNNBase) and part.dropout)
    ports |= {f"noise.{name}": TensorSpec((length, B, 2 * H)) for name in noise}

    def fn(tensors: Tensors) -> Tensors:
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
        state, uniform = select(tensors, "state"), select(tensors, "noise")

        def loss(leaves: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
            with RandomInputMode.from_numbers(noise, uniform):
                y = torch.func.functional_call(module, leaves, (x,))
            return (y * torch.cos(3 * y)).sum(), y

        if functional:
            (grads, grad_x), (value, y) = torch.func.grad_and_value(loss, argnums=(0, 1), has_aux=True)(
                state, tensors["batch.0.x"]
            )
        else:
            leaves = {name: state[name].clone().requires_grad_() for name in names}
            x = tensors["batch.0.x"].clone().requires_grad_()
            value, y = loss(leaves, x)
            *flat, grad_x = torch.autograd.grad(value, [*leaves.values(), x])
            grads = dict(zip(leaves, flat, strict=True))
        outputs = {"record.y": y, "record.grad": grad_x, "metric.loss": value}
        outputs |= prefixed("record.grad", grads)
        outputs |= prefixed("state", {name: state[name] - 0.1 * grads[name] for name in names})
        return {name: result.detach().to(torch.float32) for name, result in outputs.items()}

    return Function(type(module).__name__, fn, ports)


@pytest.mark.parametrize(
    ("kind", "layers", "bidirectional", "form"),
    in_turn(
        [(nn.LSTM, 1, False), (nn.GRU, 1, True)],
        rare=[(nn.LSTM, 2, True), (nn.GRU, 3, False), (nn.GRU, 2, True), (nn.LSTM, 3, False)],
    ),
)
def test_the_exported_step_equals_torchs(kind: Any, layers: int, bidirectional: bool, form: str) -> None:
    torch.manual_seed(0)
    theirs = Outputs(kind(E, H, layers, bidirectional=bidirectional, batch_first=True))
    step = training_step(theirs)

    model = written(form, step)

    for seed in SEEDS:
        for reference in (step, training_step(theirs, dtype=torch.float64)):
            assert target_of(form).verify(reference, model, seed).set_aside == ()


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_projections_are_exported(form: str) -> None:
    torch.manual_seed(0)
    theirs = Outputs(nn.LSTM(E, H, 2, bidirectional=True, batch_first=True, proj_size=3))
    model = written(form, training_step(theirs, functional=True))

    assert target_of(form).verify(training_step(theirs, dtype=torch.float64), model, 1).set_aside == ()


@pytest.mark.parametrize(("kind", "form"), in_turn([], rare=KINDS))
def test_gradients_by_torch_func_are_exported_too(kind: Any, form: str) -> None:
    torch.manual_seed(0)
    theirs = Outputs(kind(E, H, 2, bidirectional=True, batch_first=True))

    model = written(form, training_step(theirs, functional=True))

    for seed in SEEDS:
        assert target_of(form).verify(training_step(theirs, dtype=torch.float64), model, seed).set_aside == ()


@pytest.mark.parametrize(("kind", "form"), in_turn([], rare=KINDS[::-1]))
def test_dropout_noise_and_missing_biases_are_exported(kind: Any, form: str) -> None:
    layer = kind(E, H, 2, bidirectional=True, batch_first=True, dropout=0.4, bias=False)
    step = training_step(Outputs(layer).train())

    captured = target_of(form).capture(step)
    assert "noise.layer.uniform" in captured.inputs
    model = target_of(form).emit(captured).model
    for seed in SEEDS:
        target_of(form).verify(step, model, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_default(KINDS, KINDS[:1]))
def test_the_graph_of_a_long_sequence_is_the_graph_of_a_short_one(kind: Any) -> None:
    ours = Outputs(kind(E, H, 2, bidirectional=True, batch_first=True))

    short, long = (
        onnx.load_from_string(to_onnx(capture(training_step(ours, length)))).graph for length in (50, 100)
    )

    assert _operators(long) == _operators(short)
    assert _operators(short).count("Scan") == 8  # 2 layers, 2 directions, forward and backward


def _operators(graph: onnx.GraphProto) -> list[str]:
    found: list[str] = []
    for node in graph.node:
        found.append(node.op_type)
        for attribute in node.attribute:
            found += _operators(attribute.g)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_equal_steps_give_equal_bytes(form: str) -> None:
    ours = Outputs(nn.LSTM(E, H, 2, batch_first=True))

    first, second = (written(form, training_step(ours)) for _ in range(2))

    assert first == second


def test_a_too_long_sequence_is_refused_for_executorch() -> None:
    ours = Outputs(nn.LSTM(E, H, batch_first=True))

    with refuses(ExportError, steps=513, limit=512):
        target_of("executorch").capture(training_step(ours, STEPS + 1))


@pytest.mark.parametrize(("tier", "form"), in_turn([], rare=["strong", "moderate", "weak"]))
def test_each_tier_of_the_bidirectional_lstm_is_exported(tier: str, form: str) -> None:
    spec = build_model("bilstm", length=8, vocabulary=20, features=6, hidden=5)
    step = algorithms.build("sgd", Objective.of(tiers("bilstm")[tier].of(spec)), batch=4).phases[0].function

    model = written(form, step)

    if form == "onnx":
        assert _operators(onnx.load_from_string(model).graph).count("Scan") == 4
    for seed in SEEDS:
        target_of(form).verify(step, model, seed)
