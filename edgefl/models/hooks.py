"""Hooks of a user's module that deep copies and training graphs would lose.

``p.register_hook(...)`` changes the gradient of a parameter. A deep copy drops the hook. So the module that holds the
parameter stores its hooks in an attribute, and the objective applies them where it reads the parameter
(:func:`apply_gradient_hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError

GradientHook = Callable[[Tensor], Tensor | None]

_NOTE = "edgefl_gradient_hooks"


def has_forward_hooks(module: nn.Module) -> bool:
    """Return True if a call of ``module`` runs forward hooks, or a forward that was replaced on the instance."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def has_hooks(module: nn.Module) -> bool:
    """Return True if ``module`` itself has hooks of its forward or backward pass."""
    return any(
        (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    )


def hook_ids(part: nn.Module) -> tuple[int, ...]:
    """Return the ``id`` of each hook of ``part`` and its own parameters, and of a forward replaced on the instance.

    Two calls return equal tuples if the hooks did not change in between.
    """
    groups: list[Mapping[int, Any]] = [part._forward_hooks, part._forward_pre_hooks]
    groups += [part._backward_hooks, part._backward_pre_hooks]
    groups += [
        hooks for each in part._parameters.values() if each is not None and (hooks := each._backward_hooks)
    ]
    return (id(part.__dict__.get("forward")), *(id(hook) for group in groups for hook in group.values()))


@contextmanager
def noting_gradient_hooks(module: nn.Module) -> Iterator[None]:
    """Store the gradient hooks of all parameters as attributes of their modules, for copies that are made in the
    ``with`` block.

    A copy inherits the attributes (:func:`gradient_hooks` reads them). They are removed from ``module`` after the block.

    Raises:
        ModelError: A parameter has a hook that runs after its gradient was accumulated.
    """
    holders: list[nn.Module] = []
    try:
        for path, part in module.named_modules():
            found: dict[str, tuple[GradientHook, ...]] = {}
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                full = f"{path}.{name}" if path else name
                if getattr(parameter, "_post_accumulate_grad_hooks", None):
                    raise ModelError(
                        f"parameter {full!r} has a hook that runs after its gradient was accumulated, which no training "
                        "graph can run; found register_post_accumulate_grad_hook; change the gradient by register_hook, "
                        "or leave the hook out",
                        name=full,
                    )
                hooks = cast(Mapping[int, GradientHook] | None, parameter._backward_hooks)
                if hooks:
                    found[name] = tuple(hooks.values())
            if found:
                part.__dict__[_NOTE] = found
                holders.append(part)
        yield
    finally:
        for part in holders:
            part.__dict__.pop(_NOTE, None)


def gradient_hooks(module: nn.Module) -> dict[str, tuple[GradientHook, ...]]:
    """Return the gradient hooks that ``module`` stores as attributes, by the path of their parameter in ``module``."""
    return {
        f"{path}.{name}" if path else name: hooks
        for path, part in module.named_modules()
        for name, hooks in part.__dict__.get(_NOTE, {}).items()
    }


def hooks_by_parameter(module: nn.Module) -> dict[int, tuple[GradientHook, ...]]:
    """Return the gradient hooks that ``module`` stores as attributes, by the ``id`` of their parameter."""
    return {id(module.get_parameter(name)): hooks for name, hooks in gradient_hooks(module).items()}


def note_gradient_hooks(module: nn.Module, hooks: Mapping[int, tuple[GradientHook, ...]]) -> None:
    """Store gradient hooks as attributes of the parts of ``module`` that hold their parameters.

    Args:
        module: Module, which is changed in place.
        hooks: Hooks by the ``id`` of their parameter. Those of other parameters are ignored.
    """
    for part in module.modules() if hooks else ():
        found = {name: hooks[id(each)] for name, each in part._parameters.items() if id(each) in hooks}
        if found:
            part.__dict__[_NOTE] = found


def drop_backward_hooks(module: nn.Module) -> None:
    """Remove the backward hooks of all parts of ``module``, in place.

    Nothing is lost: the comparison with torch rejects hooks that change a gradient, and all others only observe.
    """
    for part in module.modules():
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()


def apply_gradient_hooks(tensor: Tensor, hooks: Sequence[GradientHook]) -> Tensor:
    """Return a view of ``tensor`` whose gradient passes through ``hooks``, in order.

    A hook that returns None only observes.
    """
    hooked: Tensor = _Hooked.apply(tuple(hooks), tensor)  # type: ignore[no-untyped-call]
    return hooked


class _Hooked(torch.autograd.Function):
    """Autograd function that returns its input, and in the backward pass passes the gradient to ``hooks``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: tuple[GradientHook, ...], tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for hook in ctx.hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return None, gradient

    @staticmethod
    def jvp(ctx: Any, _hooks: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)
