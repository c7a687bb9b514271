"""State that onnxruntime writes where it reads it: what must not be is not, and export runs it as a device does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl_export.compiler.compiler import target_of

N = 64
W, X, B, LOSS = "state.w", "batch.0.x", "batch.0.b", "metric.loss"
SQUARE = {W: TensorSpec((N, N)), X: TensorSpec((N, N)), B: TensorSpec((N, N))}
ROW = SQUARE | {B: TensorSpec((N,))}
IMAGES = {W: TensorSpec((2, 4, 48, 48)), X: TensorSpec((4, 4, 3, 3)), B: TensorSpec((4,))}
BATCHES = {W: TensorSpec((4, 16, 16)), X: TensorSpec((4, 16, 16)), B: TensorSpec((1,))}

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]

# What onnxruntime makes one kernel of, which reads and writes in another order than entry by entry.
FUSED: dict[str, tuple[Formula, dict[str, TensorSpec]]] = {
    "product and bias": (lambda w, x, b: w @ x + b, ROW),
    "product and matrix": (lambda w, x, b: x @ w + b, SQUARE),
    "product and factor": (lambda w, x, b: (w @ x) * 0.9, SQUARE),
    "layer and tanh": (lambda w, x, b: torch.tanh(F.linear(w, x, b)), ROW),
    "layer and relu": (lambda w, x, b: torch.relu(F.linear(w, x, b)), ROW),
    "sum with its own product": (lambda w, x, b: w + w.T @ x, SQUARE),
    "square": (lambda w, x, b: w @ w + w, SQUARE),
    "batched product": (lambda w, x, b: torch.bmm(w.transpose(1, 2), x) * 0.5, BATCHES),
    "quick gelu": (lambda w, x, b: w * torch.sigmoid(1.702 * w), SQUARE),
    "convolution and relu": (lambda w, x, b: torch.relu(F.conv2d(w, x, b, padding=1)), IMAGES),
    "sum with its convolution": (lambda w, x, b: w + F.conv2d(w, x, b, padding=1), IMAGES),
}

# The gradient of ones that a loss begins with looks as if it needed the loss; in the file it does not.
LOSSES: dict[str, Formula] = {
    "product": lambda w, x, b: (x @ w).sum(),
    "weight decay": lambda w, x, b: ((x @ w - b) ** 2).mean() + 0.01 * (w * w).sum(),
    "lasso": lambda w, x, b: ((x @ w - b) ** 2).mean() + 0.01 * w.abs().sum(),
    "linear": lambda w, x, b: ((x @ w - b) ** 2).mean() + (w * x).sum(),
    "entropy": lambda w, x, b: F.cross_entropy(x @ w, torch.arange(N)) + 0.01 * (w**2).sum(),
}


def checked(function: Function) -> tuple[str, ...]:
    """Exported, run with its state written where it was read, and compared with torch; that state."""
    form = target_of("onnx")
    artifact = form.emit(form.capture(function))
    form.verify(function, artifact.model, 1, artifact.in_place)
    return artifact.in_place


def updated(formula: Formula, ports: dict[str, TensorSpec]) -> Function:
    return Function("f", lambda t: {W: formula(t[W], t[X], t[B])}, ports)


@pytest.mark.parametrize("name", FUSED)
def test_state_that_one_kernel_would_read_and_write_keeps_its_memory(name: str) -> None:
    function = updated(*FUSED[name])

    assert checked(function) == ()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_rewritten_weights_is_right(name: str) -> None:
    def step(tensors: Tensors) -> Tensors:
        weights = tensors[W].detach().requires_grad_()
        loss = LOSSES[name](weights, tensors[X], tensors[B])
        [gradient] = torch.autograd.grad(loss, weights)
        return {W: tensors[W] - 0.1 * gradient, LOSS: loss.detach()}

    checked(Function("f", step, ROW))


def test_what_is_computed_entry_by_entry_is_written_in_place() -> None:
    assert checked(updated(lambda w, x, b: 0.9 * w + x @ x + b, ROW)) == (W,)
    assert checked(updated(lambda w, x, b: (w - 0.1 * x).clamp(-0.5, 0.5), ROW)) == (W,)


def test_state_of_another_form_has_memory_of_its_own() -> None:
    """Of as many bytes, but not what the old state's memory is bound as."""

    def step(t: Tensors) -> Tensors:
        return {"state.m": t["state.m"] * 0.9 + t[X].mean(0, keepdim=True), "state.n": t["state.n"] * 0.5}

    ports = {
        "state.m": TensorSpec((4,)),
        "state.n": TensorSpec((4,), torch.int32),
        X: TensorSpec((3, 4)),
    }
    assert checked(Function("f", step, ports)) == ()


def test_export_refuses_state_that_is_written_too_early() -> None:
    """What a device would compute is what is compared with torch."""
    form, function = target_of("onnx"), updated(*FUSED["product and bias"])
    artifact = form.emit(form.capture(function))

    form.verify(function, artifact.model, 1)
    with pytest.raises(ExportError, match=r"'state\.w'.*differs"):
        form.verify(function, artifact.model, 1, (W,))
