"""Kernels of ExecuTorch for nodes: functional aten op in, registered ``out`` variant of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from edgefl_export.executorch.silent_import import portable_lib

_aten = torch.ops.aten

# Functional ops that ExecuTorch has under the name of the form that copies.
_COPIES = {
    "_unsafe_view": "view_copy",
    "_reshape_copy": "view_copy",
    "alias": "alias_copy",
    "as_strided": "as_strided_copy",
    "detach": "detach_copy",
    "diagonal": "diagonal_copy",
    "expand": "expand_copy",
    "narrow": "narrow_copy",
    "permute": "permute_copy",
    "reshape": "view_copy",
    "select": "select_copy",
    "slice": "slice_copy",
    "split": "split_copy",
    "split_with_sizes": "split_with_sizes_copy",
    "squeeze": "squeeze_copy",
    "t": "t_copy",
    "transpose": "transpose_copy",
    "unbind": "unbind_copy",
    "unfold": "unfold_copy",
    "unsqueeze": "unsqueeze_copy",
    "view": "view_copy",
}

_OF_OUTPUT = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "implicit"})


@dataclass(frozen=True)
class Kernel:
    """Registered kernel and its schema: the arguments before the outputs, then ``outputs`` of them."""

    overload: OpOverload

    @property
    def name(self) -> str:
        return str(self.overload._overloadpacket._qualified_op_name)

    @property
    def variant(self) -> str:
        name = self.overload._overloadname
        return "" if name == "default" else name

    @property
    def takes_list(self) -> bool:
        """Return True if the outputs are one list of tensors."""
        return any(item.is_out and "List" in str(item.type) for item in self.overload._schema.arguments)

    @property
    def inputs(self) -> list[Any]:
        return [argument for argument in self.overload._schema.arguments if not argument.is_out]


@functools.cache
def registered() -> frozenset[str]:
    """Return ``namespace::op.variant`` of every kernel in the wheel's runtime; devices have the same."""
    return frozenset(portable_lib()._get_operator_names())


@functools.cache
def kernel_of(target: object) -> Kernel | None:
    """Return the kernel for ``target``; None if ExecuTorch has none."""
    if not isinstance(target, OpOverload):
        return None
    namespace, name = target._overloadpacket._qualified_op_name.split("::")
    packet = getattr(getattr(torch.ops, namespace), _COPIES.get(name, name) if namespace == "aten" else name)
    wanted = _signature(target)
    for variant in packet.overloads():
        overload = getattr(packet, variant)
        made = any(argument.is_out for argument in overload._schema.arguments)
        if (
            made
            and _signature(overload) == wanted
            and f"{namespace}::{packet.__name__}.{variant}" in registered()
        ):
            return Kernel(overload)
    return None


def _signature(overload: OpOverload) -> list[str]:
    """Return the types of the arguments that distinguish kernels, without outputs and arguments that describe them."""
    return [
        str(item.type)
        for item in overload._schema.arguments
        if not item.is_out and item.name not in _OF_OUTPUT
    ]


def arguments_of(node: fx.Node, kernel: Kernel) -> list[tuple[Any, Any]]:
    """Return (value, type) of each argument of the kernel before its outputs, defaults filled in."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    plain = [name for name in names if name not in _OF_OUTPUT]
    counted = [argument.name for argument in kernel.inputs if argument.name not in _OF_OUTPUT]
    other = dict(zip(counted, plain, strict=True))  # names differ between some ops and their forms that copy

    def value(argument: Any) -> Any:
        return arguments.get(other.get(argument.name, argument.name), argument.default_value)

    return [(value(argument), argument.type) for argument in kernel.inputs]


def results_of(node: fx.Node) -> Sequence[torch.Tensor]:
    """Return the fake tensors that a node makes."""
    value = node.meta["val"]
    return [value] if isinstance(value, torch.Tensor) else list(value)
