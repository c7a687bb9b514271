"""Inputs of a model beside the one that flows from unit to unit: attention masks, token types, a second image.

A unit maps one tensor to one tensor. The device holds the whole sample, so that every unit may read its other inputs again.
They enter through an :class:`InputLayer`, as a tensor that an algorithm sets by name, like the noise of dropout. A cut
therefore carries one tensor, however many inputs a model has.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.torch_functions.recurrent import recurring
from edgefl.wire.bundle.manifest import PARTS, SAMPLE


class InputLayer(nn.Module):
    """Layer that returns the rows of input ``name`` for the rows of ``x``: (B, *sample.shape).

    ``value`` is a non-persistent buffer that an algorithm replaces through ``functional_call`` by its port
    ``batch.<k>.<name>``. Without a replacement it is ones for integers (a mask that hides nothing) and zeros for floats.
    """

    value: Tensor

    def __init__(self, name: str, sample: TensorSpec) -> None:
        super().__init__()
        self.name, self.sample = name, sample
        self.register_buffer("value", torch.empty(0, dtype=sample.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.value.numel():
            return self.value
        fill = 0 if self.sample.dtype.is_floating_point else 1
        return torch.full((x.shape[0], *self.sample.shape), fill, dtype=self.sample.dtype, device=x.device)

    def extra_repr(self) -> str:
        return f"{self.name!r}, {list(self.sample.shape)}"


def with_one_input(module: nn.Module, inputs: Mapping[str, TensorSpec]) -> nn.Module:
    """Let ``module``, whose forward takes ``inputs`` by name, take only the first of them; change it in place.

    The others come from :class:`InputLayer` layers. The module's state keeps its names.

    Raises:
        ModelError: forward does not take a name, or a batch uses it for something else.
    """
    kind = type(module)
    first, *others = first_input(kind, inputs)
    layers = [f"given_{name}" for name in others]

    own = module.__dict__.pop("forward", None)  # of an instance that was patched

    def forward(self: Any, x: Tensor) -> Any:
        read = {name: getattr(self, layer)(x) for name, layer in zip(others, layers, strict=True)}
        named = {first: x, **read}
        return kind.forward(self, **named) if own is None else own(**named)

    for name, layer in zip(others, layers, strict=True):
        module.add_module(layer, InputLayer(name, inputs[name]))
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return module


def first_input(kind: type[nn.Module], inputs: Mapping[str, TensorSpec]) -> list[str]:
    """Return the names of ``inputs`` in forward. If the first is called x, it is forward's first that has no other input."""
    accepted = inspect.signature(kind.forward).parameters
    named = [
        name
        for name, each in accepted.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ][1:]
    first, *others = inputs
    if first == "x" and first not in named:
        first = next((name for name in named if name not in others), first)
    anything = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    for name in (first, *others):
        if name not in named and not anything:
            raise ModelError(
                f"{kind.__name__}.forward takes no input {name!r}; it takes {', '.join(named)}: call the inputs so",
                input=name,
            )
    for name in others:
        if name in PARTS or not name.isidentifier():
            raise ModelError(
                f"an input beside the first cannot be called {name!r}: {', '.join(PARTS)} are other parts of a batch, and "
                "a name is one of Python's",
                input=name,
            )
    return [first, *others]


def extra_inputs(module: nn.Module) -> Mapping[str, TensorSpec]:
    """Return one sample of each input beside the first that ``module`` reads, by name."""
    return {part.name: part.sample for _, part in _layers(module)}


def input_tensors(module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensors:
    """Return ``inputs`` by the names of the buffers of ``module`` that hold them, for ``functional_call``."""
    return {f"{path}.value": inputs[part.name] for path, part in _layers(module) if part.name in inputs}


def call_with_inputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the output of ``module`` for the rows ``x`` of ``inputs`` and those of its other inputs, all by name."""
    tensors = input_tensors(module, {SAMPLE: inputs["x"], **inputs})
    # functional_call would replace tied names twice, and restore only one of them.
    with recurring():
        result = torch.func.functional_call(module, tensors, (inputs["x"],), tie_weights=False)
    return cast(Tensor, result)


def _layers(module: nn.Module) -> Iterable[tuple[str, InputLayer]]:
    return ((path, part) for path, part in module.named_modules() if isinstance(part, InputLayer))
