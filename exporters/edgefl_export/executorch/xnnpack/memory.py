"""Memory of a delegate: a model of the workspace and the packed constants that XNNPACK allocates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as xnn

from edgefl_export.executorch.arena import Lifetime, plan_arena

# Model of XNNPACK's planner: the memory that a delegate takes beside its arguments.
#
# Values between nodes lie in one workspace, the largest first, each in the smallest gap; element-wise nodes, copies,
# softmax and reshapes write over an argument without other readers. A product packs the operand at its right, in the
# workspace if it is computed or given, once and for good if it is a constant.

NONE = 0xFFFFFFFF
FLOAT = 4
COLUMNS = 16
"""Columns that a product packs together; at most so on the processors of phones and of servers with AVX."""

_NOT_IN_PLACE = (
    xnn.XNNFullyConnected,
    xnn.XNNBatchMatrixMultiply,
    xnn.XNNGlobalAvgPooling2d,
    xnn.XNNStaticTranspose,
    xnn.XNNStaticSlice,
    xnn.XNNStaticConstantPad,
    xnn.XNNCat,
)


def workspace_bytes(nodes: Sequence[xnn.XNode], values: Sequence[xnn.XNNTensorValue]) -> int:
    """Return the bytes of a delegate's workspace and packed constants, as XNNPACK allocates them."""
    return _WorkspacePlan(nodes, values).total()


class _WorkspacePlan:
    def __init__(self, nodes: Sequence[xnn.XNode], values: Sequence[xnn.XNNTensorValue]) -> None:
        self.nodes = [node.xnode_union for node in nodes]
        self.values = values
        self.readers = [0] * len(values)
        for node in self.nodes:
            for value in set(reads(node)):
                self.readers[value] += 1

    def total(self) -> int:
        spans: dict[object, Lifetime] = {}
        owner: dict[int, int] = {}
        packed = 0
        for turn, node in enumerate(self.nodes):
            for value in reads(node):
                if self._is_inner(value) and value not in owner:
                    spans[value], owner[value] = Lifetime(self._size(value), turn, turn), value
                elif self._is_inner(value):
                    at = owner[value]
                    spans[at] = Lifetime(spans[at].size, spans[at].first, turn)
            out = writes(node)
            if self._is_inner(out):
                reused = self._reused(node, out)
                owner[out] = out if reused is None else owner[reused]
                if reused is None:
                    spans[out] = Lifetime(self._size(out), turn, turn)
            count, constant = self._packing(node)
            if count and not constant:
                spans["packed", turn] = Lifetime(count, turn, turn)
            packed += count if constant else 0
        return plan_arena(spans)[1] + packed

    def _is_inner(self, value: int) -> bool:
        tensor = self.values[value]
        return tensor.external_id == NONE and not tensor.constant_buffer_idx

    def _size(self, value: int) -> int:
        tensor = self.values[value]
        half = tensor.datatype is xnn.XNNDatatype.xnn_datatype_fp16
        return int(math.prod(tensor.dims)) * (FLOAT // 2 if half else FLOAT)

    def _reused(self, node: Any, out: int) -> int | None:
        if isinstance(node, _NOT_IN_PLACE):
            return None
        for value in reads(node):
            if self._is_inner(value) and self.readers[value] == 1 and self._size(value) == self._size(out):
                return value
        return None

    def _packing(self, node: Any) -> tuple[int, bool]:
        """Return (bytes of the packed right operand, True if it is a constant) of a product; (0, False) for other nodes."""
        if isinstance(node, xnn.XNNFullyConnected):
            right = node.filter_id
        elif isinstance(node, xnn.XNNBatchMatrixMultiply):
            right = node.input2_id
        else:
            return 0, False
        *batch, rows, columns = self.values[right].dims
        if not node.flags & 1:
            if isinstance(node, xnn.XNNFullyConnected):
                rows, columns = columns, rows
        elif isinstance(node, xnn.XNNBatchMatrixMultiply):
            rows, columns = columns, rows
        wide = -(-columns // COLUMNS) * COLUMNS
        return math.prod(batch) * wide * (rows + 1) * FLOAT, bool(self.values[right].constant_buffer_idx)


def reads(node: Any) -> Iterator[int]:
    """Yield the numbers of the values that a node of XNNPACK's graph reads, in order."""
    for item in fields(node):
        value = getattr(node, item.name)
        if item.name.endswith("_id") and not item.name.startswith("output") and value != NONE:
            yield value


def writes(node: Any) -> int:
    """Return the number of the value that a node of XNNPACK's graph writes."""
    return int(node.output_id)
