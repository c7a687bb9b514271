"""Check for ops and types without a kernel of ExecuTorch: each is named with its module and line before writing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from edgefl.errors import ExportError
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES
from edgefl_export.capture.instead import instead_of
from edgefl_export.capture.locate import locate, locate_type, refusal
from edgefl_export.capture.trace import LoweredGraph
from edgefl_export.executorch.program.kernels import kernel_of
from edgefl_export.executorch.program.partition import ProgramStep

_NUMBERS = {getattr(torch, name): number for number, name in EXECUTORCH_DTYPES.items()}
_WITHOUT_KERNELS = frozenset({torch.uint16, torch.uint32, torch.uint64})

TYPES = {dtype: number for dtype, number in _NUMBERS.items() if dtype not in _WITHOUT_KERNELS} | {
    torch.bfloat16: 15
}
"""Types of tensors that a program may have, and their numbers in it."""

LEAVING = {torch.uint16: (_NUMBERS[torch.uint16], torch.int16)}
"""Types that an output may have though no kernel writes them: their numbers, and the type of equal bytes that is written."""

MOST_AXES: dict[object, int] = {torch.ops.aten.convolution.default: 4}
"""Kernels that take results of so many axes only, and say so no earlier than when they run."""


def check(lowered: LoweredGraph, module: fx.GraphModule, steps: Iterable[ProgramStep]) -> None:
    """Raise ExportError for the first node whose type or op ExecuTorch does not have, or for an empty port."""
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
    place = locate(lowered.function, str(node.target))
    return refusal(
        lowered.function,
        place.op or str(node.target),
        place,
        f"has no kernel in ExecuTorch ({place}). "
        + instead_of(
            node.target,
            "Use other ops there, add a rule in exporters/edgefl_export/executorch/rules, or export for onnx",
        ),
    )


def _no_type(lowered: LoweredGraph, node: fx.Node, dtype: torch.dtype) -> ExportError:
    place = locate_type(lowered.function, lambda found: found is dtype)
    name = str(dtype).removeprefix("torch.")
    op = place.op or str(node.target)
    return refusal(
        lowered.function,
        op,
        place,
        f"makes a {name} tensor ({place}), which ExecuTorch does not have. Use another type there",
    )
