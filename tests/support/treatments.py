"""What users do to a finished module: modes, freezing, hooks, parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.support import blocks

Change = Callable[[nn.Module], None]


def chosen_changes(random: Random, module: nn.Module) -> list[Change]:
    """Return what the user does to the finished module: at most three of modes, freezing, hooks and parametrizations."""
    parts = [name for name, part in module.named_modules() if name and not isinstance(part, nn.ModuleList)]
    # The head stays as it is, so that something trains.
    last = list(module.modules())[-1]
    parts = [name for name in parts if module.get_submodule(name) is not last]
    weights = [name for name, each in module.named_parameters() if each.requires_grad]
    changes: list[Change] = []
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        what, name = random.choice(_TREATMENTS), random.choice(parts)
        if what is _parameter_hook or what is _mask_hook:
            name = random.choice(weights)
        changes.append(partial(what, name=name))
    if random.random() < 0.1:
        changes.append(_root_eval)
    return changes


def _root_eval(module: nn.Module) -> None:
    module.eval()


def _eval(module: nn.Module, name: str) -> None:
    module.get_submodule(name).eval()


def _frozen(module: nn.Module, name: str) -> None:
    module.get_submodule(name).requires_grad_(False)


def _frozen_eval(module: nn.Module, name: str) -> None:
    module.get_submodule(name).eval().requires_grad_(False)


def _kept_by_train(module: nn.Module, name: str) -> None:
    """Let the root's train() keep a part in inference mode, if it has such an override."""
    if isinstance(module, blocks.Looped):
        module.kept = (*module.kept, name)
        module.train()


def _forward_hook(module: nn.Module, name: str) -> None:
    def scale(_part: nn.Module, _args: Any, out: Any) -> Any:
        return out * 0.8 + 0.1 if isinstance(out, Tensor) else None

    module.get_submodule(name).register_forward_hook(scale)


def _pre_hook(module: nn.Module, name: str) -> None:
    def bent(_part: nn.Module, args: tuple[Any, ...]) -> Any:
        first, *rest = args
        return (first * 1.2 - 0.05, *rest) if first.is_floating_point() else None

    module.get_submodule(name).register_forward_pre_hook(bent)


def _looking_hook(module: nn.Module, name: str) -> None:
    seen: list[Any] = []
    module.get_submodule(name).register_forward_hook(lambda _part, _args, _out: seen.append(1))


def _trained(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter that still has this name and trains: others may have been frozen or parametrized meanwhile."""
    return next((each for key, each in module.named_parameters() if key == name and each.requires_grad), None)


def _parameter_hook(module: nn.Module, name: str) -> None:
    weight = _trained(module, name)
    if weight is not None:
        weight.register_hook(lambda g: g.clamp(-1e-2, 1e-2))


def _mask_hook(module: nn.Module, name: str) -> None:
    weight = _trained(module, name)
    if weight is not None:
        mask = (torch.arange(weight.numel()) % 3 > 0).to(weight.dtype).reshape(weight.shape)
        weight.register_hook(lambda g: g * mask)


def _kernel(module: nn.Module, name: str) -> nn.Module | None:
    """Return the first layer at or below ``name`` with a matrix as weight. Attention reads its own without a call."""
    for part in module.get_submodule(name).modules():
        weight = part._parameters.get("weight")
        if type(part) in (nn.Linear, nn.Conv2d, nn.Conv1d) and weight is not None and weight.requires_grad:
            return part
    return None


def _weight_norm(module: nn.Module, name: str) -> None:
    part = _kernel(module, name)
    if part is not None:
        parametrizations.weight_norm(part)


def _spectral_norm(module: nn.Module, name: str) -> None:
    part = _kernel(module, name)
    if part is not None:
        parametrizations.spectral_norm(part)


def _pruned(module: nn.Module, name: str) -> None:
    """Prune a layer whose pre-hook runs: not one whose weight its parent reads without a call."""
    part = _kernel(module, name)
    parents = [each for each in module.modules() if isinstance(each, blocks.LowRank | blocks.Called)]
    if part is not None and not any(part in parent.modules() for parent in parents):
        prune.l1_unstructured(part, "weight", 0.4)


_TREATMENTS: tuple[Callable[..., None], ...] = (
    _eval,
    _frozen,
    _frozen_eval,
    _frozen_eval,
    _kept_by_train,
    _forward_hook,
    _pre_hook,
    _looking_hook,
    _parameter_hook,
    _mask_hook,
    _weight_norm,
    _spectral_norm,
    _pruned,
)
