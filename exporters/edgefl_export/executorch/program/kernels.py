"""Kernels of ExecuTorch for nodes: functional aten op in, registered ``out`` variant of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from edgefl.errors import ExportError
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.locate import locate, locate_type, refusal
from edgefl_export.capture.refusals import instead_of
from edgefl_export.executorch.silent_import import portable_lib

_aten = torch.ops.aten

# Functional ops that ExecuTorch has under the name of the form that copies.
_COPIED = (
    "alias as_strided detach diagonal expand narrow permute select slice split split_with_sizes squeeze t transpose "
    "unbind unfold unsqueeze view"
)
_COPIES = {name: f"{name}_copy" for name in _COPIED.split()}
_COPIES |= dict.fromkeys(("_unsafe_view", "_reshape_copy", "reshape"), "view_copy")

_OF_OUTPUT = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "implicit"})


@dataclass(frozen=True)
class Kernel:
    """Registered ``out`` variant of an op, with access to its schema."""

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
        """True if the kernel receives its outputs as one list of tensors instead of one argument each."""
        return any(item.is_out and "List" in str(item.type) for item in self.overload._schema.arguments)

    @property
    def inputs(self) -> list[Any]:
        return [argument for argument in self.overload._schema.arguments if not argument.is_out]


@dataclass(frozen=True)
class ProgramStep:
    """Nodes that run together: a delegate of XNNPACK if ``delegated``, else a single node on its kernel."""

    nodes: tuple[fx.Node, ...]
    delegated: bool


@functools.cache
def registered_kernels() -> frozenset[str]:
    """Return the names ``namespace::op.variant`` of all kernels in the installed runtime; devices have the same ones."""
    return frozenset(portable_lib()._get_operator_names())


@functools.cache
def kernel_of(target: object) -> Kernel | None:
    """Return the kernel for an op, or None if ExecuTorch has none or ``target`` is no op."""
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
            and f"{namespace}::{packet.__name__}.{variant}" in registered_kernels()
        ):
            return Kernel(overload)
    return None


def _signature(overload: OpOverload) -> list[str]:
    """Return the types of the inputs of an op, without arguments such as dtype that only describe the output."""
    return [
        str(item.type)
        for item in overload._schema.arguments
        if not item.is_out and item.name not in _OF_OUTPUT
    ]


def arguments_of(node: fx.Node, kernel: Kernel) -> list[tuple[Any, Any]]:
    """Return (value, schema type) of each input of ``kernel`` for the call ``node``, with defaults filled in."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    plain = [name for name in names if name not in _OF_OUTPUT]
    counted = [argument.name for argument in kernel.inputs if argument.name not in _OF_OUTPUT]
    other = dict(zip(counted, plain, strict=True))  # names differ between some ops and their forms that copy

    def value(argument: Any) -> Any:
        return arguments.get(other.get(argument.name, argument.name), argument.default_value)

    return [(value(argument), argument.type) for argument in kernel.inputs]


def results_of(node: fx.Node) -> Sequence[torch.Tensor]:
    """Return the results of a node as tensors without values; a list of one for an op with one result."""
    value = node.meta["val"]
    return [value] if isinstance(value, torch.Tensor) else list(value)


# Check for ops and types without a kernel of ExecuTorch: each is named with its module and line before writing.

_NUMBERS = {getattr(torch, name): number for number, name in EXECUTORCH_DTYPES.items()}
_WITHOUT_KERNELS = frozenset({torch.uint16, torch.uint32, torch.uint64})

TYPES = {dtype: number for dtype, number in _NUMBERS.items() if dtype not in _WITHOUT_KERNELS} | {
    torch.bfloat16: 15
}
"""Types of tensors that a program may have, and their numbers in it."""

LEAVING = {torch.uint16: (_NUMBERS[torch.uint16], torch.int16)}
"""Types of outputs that no kernel writes: ExecuTorch's number, and the type of equal size that is written instead."""

MOST_AXES: dict[object, int] = {torch.ops.aten.convolution.default: 4}
"""Largest number of axes of the result by op, for kernels that reject more only when they run."""


def check(lowered: LoweredGraph, module: fx.GraphModule, steps: Iterable[ProgramStep]) -> None:
    """Check that ExecuTorch can run ``steps`` of ``module``, written from ``lowered``.

    Raises:
        ExportError: for a port without entries, for a node of a type that ExecuTorch lacks, or for an op without a kernel.
    """
    for kind, ports in (("input", lowered.inputs), ("output", lowered.outputs)):
        for name, spec in ports.items():
            if 0 in spec.shape and len(spec.shape) > 1:  # shape [0] is taken and returned
                raise _empty(lowered, kind, name, spec.shape)
    for node in module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and value.dtype not in TYPES and not _leaves(node, value):
                raise _no_type(lowered, node, value.dtype)
    for step in steps:
        if not step.delegated and not _has_kernel(step.nodes[0]):
            raise _no_kernel(lowered, step.nodes[0])


def _empty(lowered: LoweredGraph, kind: str, name: str, shape: tuple[int, ...]) -> ExportError:
    return ExportError(
        f"{kind} {name!r} of function {lowered.name!r} has no entries (shape {list(shape)}), and ExecuTorch neither takes "
        "nor returns such tensors of several axes. Leave it out, flatten it, or export for onnx",
        function=lowered.name,
        port=name,
    )


def _has_kernel(node: fx.Node) -> bool:
    if kernel_of(node.target) is None:
        return False
    most = MOST_AXES.get(node.target)
    return most is None or node.meta["val"].dim() <= most


def _leaves(node: fx.Node, value: Tensor) -> bool:
    return value.dtype in LEAVING and all(user.op == "output" for user in node.users)


def _no_kernel(lowered: LoweredGraph, node: fx.Node) -> ExportError:
    remedy = instead_of(
        node.target,
        "Use other ops there, add a rule in exporters/edgefl_export/executorch/rules, or export for onnx",
    )
    place = locate(lowered.function, str(node.target))
    return refusal(lowered.function, node.target, place, "has no kernel in ExecuTorch", f". {remedy}")


def _no_type(lowered: LoweredGraph, node: fx.Node, dtype: torch.dtype) -> ExportError:
    place = locate_type(lowered.function, {dtype})
    what = f"makes a {str(dtype).removeprefix('torch.')} tensor"
    rest = ", which ExecuTorch does not have. Use another type there"
    return refusal(lowered.function, node.target, place, what, rest)
