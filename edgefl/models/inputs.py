"""Additional inputs of a model besides the one that passes from unit to unit: attention masks, token types, a second
image.

A unit maps one tensor to one tensor. Additional inputs enter through an :class:`InputLayer`, as a tensor that the
algorithm sets by name, like the noise of dropout. So one tensor crosses a cut, however many inputs a model has; the
device has the whole sample and can provide an input to any unit.
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
    """Layer that ignores its input ``x`` except for the batch size, and returns the model's additional input ``name``.

    The output is (B, *sample.shape). The value is a non-persistent buffer, which an algorithm replaces by
    ``functional_call`` with the port ``batch.<k>.<name>``. If it is not replaced, the layer returns ones for integers (a
    mask that hides nothing) and zeros for floats.
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
    """Change a module with several inputs in place, so that its forward takes only the first. Return the module.

    The additional inputs are read from :class:`InputLayer` layers. Names in the state do not change.

    Args:
        module: Module.
        inputs: One sample of each input by name; the first entry is the input that forward still takes.

    Raises:
        ModelError: Forward does not accept a name, or the name is reserved for another part of a batch.
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
    """Return the names of ``inputs`` as forward calls them, in their order.

    They are unchanged, except that a first input ``x`` that forward does not have becomes forward's first parameter.

    Args:
        kind: Class of the module.
        inputs: One sample of each input by name.

    Raises:
        ModelError: Forward does not accept a name, or the name is reserved for another part of a batch.
    """
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
    """Return the spec of one sample of each additional input that ``module`` reads, by name; {} if it reads none."""
    return {part.name: part.sample for _, part in _layers(module)}


def input_tensors(module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensors:
    """Return the buffers of ``module`` that hold additional inputs, for ``functional_call``.

    They are the tensors of ``inputs`` (by name of the input), by the path of their buffer. Inputs that the module does not
    read are ignored.
    """
    return {f"{path}.value": inputs[part.name] for path, part in _layers(module) if part.name in inputs}


def call_with_inputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Call ``module`` and return its output (B, *out).

    Args:
        module: Module, possibly with input layers.
        inputs: Batch of each input by name. The batch of the main input is ``x``.
    """
    tensors = input_tensors(module, {SAMPLE: inputs["x"], **inputs})
    # functional_call would replace tied names twice, and restore only one of them.
    with recurring():
        result = torch.func.functional_call(module, tensors, (inputs["x"],), tie_weights=False)
    return cast(Tensor, result)


def _layers(module: nn.Module) -> Iterable[tuple[str, InputLayer]]:
    """Return (path, layer) of each input layer of ``module``."""
    return ((path, part) for path, part in module.named_modules() if isinstance(part, InputLayer))
