"""A small function with values of the test's own, run by both engines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.capture.trace import capture
from edgefl_export.executorch.check import programs
from edgefl_export.executorch.target import ExecuTorchTarget
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify import graphs
from edgefl_export.verify.rounding import run_in_double

ENGINES = ("onnx", "executorch")


def function_of(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradients: bool = False) -> Function:
    """Return ``fn`` as a function with one port per input, and with the gradients of a weighted sum of its result."""
    ports = {f"batch.0.x{place}": TensorSpec.of(value) for place, value in enumerate(inputs)}

    def run(tensors: Tensors) -> Tensors:
        values = [tensors[name] for name in ports]
        if not gradients:
            return {"metric.y": fn(*values)}
        leaves = [value.detach().requires_grad_() for value in values]
        result = fn(*leaves)
        weights = torch.arange(1, result.numel() + 1, dtype=result.dtype).reshape(result.shape) % 3 + 0.5
        slopes = torch.autograd.grad((result * weights).sum(), leaves)
        return {f"metric.{place}": value.detach() for place, value in enumerate((result, *slopes))}

    return Function("example", run, ports)


def on_engine(engine: str, function: Function, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the results of one engine for these inputs."""
    if engine == "onnx":
        run = graphs.load(function, to_onnx(capture(function)), ())
    else:
        target = ExecuTorchTarget()
        run = programs.load(function, target.emit(target.capture(function)).model)
    made = run({name: value.numpy() for name, value in zip(function.inputs, inputs, strict=True)})
    return [torch.from_numpy(value) for value in (made.values() if isinstance(made, dict) else made)]


def agree(engine: str, fn: Callable[..., Tensor], *inputs: Tensor, gradients: bool = False) -> None:
    """Fail unless the engine agrees with torch's float64, entry by entry."""
    function = function_of(fn, inputs, gradients)
    exact = run_in_double(function, dict(zip(function.inputs, inputs, strict=True))).values()
    for expected, found in zip(exact, on_engine(engine, function, inputs), strict=True):
        if not found.is_floating_point():
            assert found.tolist() == expected.tolist()
            continue
        torch.testing.assert_close(
            found.double(), expected.detach().double(), rtol=2e-4, atol=1e-5, equal_nan=True
        )
