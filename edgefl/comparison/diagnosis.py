"""Diagnosis of a difference from torch: the place where training begins to differ, and the likely reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from edgefl.comparison import torch_side
from edgefl.comparison.conduct import SideEffects
from edgefl.comparison.graph_side import GradientStep
from edgefl.comparison.torch_side import TrainingResult
from edgefl.contract.tensors import Tensors
from edgefl.errors import ModelError
from edgefl.models.hooks import has_forward_hooks
from edgefl.models.source import ModelSource
from edgefl.models.spec import ModelSpec

AGREES = 1e-3
"""Largest difference of an output, relative to its largest entry."""

Calls = list[tuple[str, Tensor]]

_REMEDIES = {
    "draw": "draw random numbers by functions of torch (F.dropout, torch.rand_like), in training only",
    "mode": "put the part into eval() before the model is compiled, and let its code ask self.training",
    "hook": "write what the hook does into forward",
    "state": "keep numbers that change in float buffers (register_buffer) and compute with tensors",
    "loss": "return one loss per sample, (B,), made of torch's functions",
    "": "write the part with torch's own layers, or report the model with this message",
}


def difference_error(
    spec: ModelSpec,
    source: ModelSource,
    step: GradientStep,
    difference: tuple[str, float, float],
    batch: Tensors,
    by_torch: TrainingResult,
    conduct: SideEffects,
    seed: int,
) -> ModelError:
    """Return a ModelError for a difference. It names the submodule where the difference begins, and a likely reason.

    One step is trained again by torch to find that submodule.

    Args:
        spec: the model.
        source: the user's module.
        step: gradient step of the model.
        difference: (name of the tensor, its relative difference, the allowed one).
        batch: batch of the first step.
        by_torch: training by torch.
        conduct: side effects of the module's code.
        seed: seed of the numbers that the module draws.
    """
    tensor, size, allowed = difference
    path, where = _beginning(spec, source, step, batch, by_torch, seed, tensor)
    reason = _reason(source.module, path, step, by_torch, conduct, where)
    part = source.module.get_submodule(path) if path else source.module
    begins = f"submodule {path!r} ({type(part).__name__})" if path else type(part).__name__
    likely = f"; likely reason: {_NAMES[reason]}" if reason else ""
    return ModelError(
        f"{type(source.module).__name__} would not be trained as torch trains it: after three steps "
        f"{_amount(tensor, size, allowed)}. The difference begins in {where} of {begins}{likely}. "
        f"Instead, {_REMEDIES[reason]}",
        tensor=tensor,
        size=size,
        allowed=allowed,
        module=path,
        where=where,
        reason=reason,
    )


def _amount(tensor: str, size: float, allowed: float) -> str:
    name, unit = ("the loss", "its value") if tensor == "loss" else (f"{tensor!r}", "its largest update")
    if math.isnan(size):
        return f"{name} is finite in torch, and infinite or NaN on devices"
    if math.isinf(size):
        return f"{name} {'is 0' if tensor == 'loss' else 'stays as it is'} in torch alone, not on devices"
    return f"{name} differs by {size:.1%} of {unit} (allowed {allowed:.1%})"


_NAMES = {
    "draw": "the model draws other random numbers than torch does",
    "mode": "a part is in inference mode",
    "hook": "a hook",
    "state": "a Python value that is kept from call to call",
    "loss": "the loss of a batch",
}


def _reason(
    module: nn.Module,
    path: str,
    step: GradientStep,
    by_torch: TrainingResult,
    conduct: SideEffects,
    where: str,
) -> str:
    part = module.get_submodule(path) if path else module
    drawn = [tuple(each.shape) for each in by_torch.streams[0].drawn]
    if drawn != [spec.shape for spec in step.noise.values()]:
        return "draw"
    if any(not each.training for each in part.modules()):
        return "mode"
    if any(has_forward_hooks(each) or each._backward_hooks for each in part.modules()):
        return "hook"
    if conduct.changed:
        return "state"
    return "loss" if where == "the loss" else ""


def _beginning(
    spec: ModelSpec,
    source: ModelSource,
    step: GradientStep,
    batch: Tensors,
    by_torch: TrainingResult,
    seed: int,
    tensor: str,
) -> tuple[str, str]:
    """Train one step by torch to find the place where the difference begins.

    Returns:
        (path of the submodule, text such as "the output"). The path is "" for the loss.
    """
    theirs: Calls = []
    torch_side.train(
        source, spec.loss, [batch], seed, rate=by_torch.rate, around=lambda: _recording(source.module, theirs)
    )
    ours = _of_units(spec, step, batch, by_torch)
    numbers: dict[str, int] = {}
    for path, output in theirs:
        known = [each for name, each in ours if _is_same(path, name)]
        at = numbers[path] = numbers.get(path, -1) + 1
        if at < len(known) and not _agree(output, known[at]):
            return path, "the output"
    if tensor == "loss":
        return "", "the loss"
    owner = tensor.rpartition(".")[0]
    return owner, "the gradient" if tensor in by_torch.gradients else "a buffer"


def _of_units(spec: ModelSpec, step: GradientStep, batch: Tensors, by_torch: TrainingResult) -> Calls:
    objective, calls = step.objective, Calls()
    numbers = by_torch.streams[0].ports(step.noise)
    weights = spec.weights
    others = {name: value for name, value in batch.items() if name not in ("x", "y")}
    try:
        with torch.no_grad(), _recording(objective.training_module, calls):
            objective(
                {name: weights[name] for name in objective.trainable},
                {name: weights[name] for name in objective.fixed},
                batch["x"],
                batch["y"],
                numbers,
                others=others,
            )
    except Exception:  # the message does without a place
        calls.clear()
    return calls


@contextmanager
def _recording(root: nn.Module, calls: Calls) -> Iterator[None]:
    """Open a context that appends (path, output) to ``calls`` for each call of a submodule of ``root``."""
    paths = {part: path for path, part in root.named_modules() if path}

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        found = _first(output)
        if module in paths and found is not None:
            calls.append((paths[module], found.detach().clone()))

    handle = register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _first(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    return next((found for each in parts if (found := _first(each)) is not None), None)


def _is_same(path: str, unit: str) -> bool:
    mine, other = path.replace(".", "_"), unit.replace(".", "_")
    return other == mine or other.endswith(f"_{mine}")


def _agree(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(one.abs().max()) if one.numel() and one.dtype.is_floating_point else 0.0
    return bool(torch.allclose(one.double(), other.double(), rtol=0.0, atol=AGREES * scale + 1e-9))
