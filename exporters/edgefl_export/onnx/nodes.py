"""Nodes of an ONNX graph under construction: who makes a value, its sizes, and its numbers if it is a constant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes ``value`` if that is an ``op`` of the default domain."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op and not node.domain else None


def static_sizes(value: ir.Value) -> list[int] | None:
    """Return the sizes of a value's axes; None where one of them is not known."""
    if value.shape is None or not value.shape.is_static():
        return None
    return [int(size) for size in value.shape.numpy()]


def integers(value: ir.Value | None) -> list[int] | None:
    """Return the numbers of a constant; None for what is none."""
    constant = value.const_value if value is not None else None
    return None if constant is None else [int(item) for item in constant.numpy().reshape(-1)]


def whole_numbers(numbers: Sequence[int]) -> ir.Node:
    """Return a constant of these numbers."""
    return ir.node("Constant", [], {"value": ir.tensor(np.array(numbers, np.int64))})
