"""Named tensors: flat dictionaries by dotted names, and the static shape of a port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from edgefl.wire.tensors import Arrays

Tensors = dict[str, Tensor]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class TensorSpec:
    """Static ``shape`` and ``dtype`` of a port (named input of a function) or of one sample.

    The shape of a port includes its batch dimension.

    Attributes:
        shape: Size of each dimension.
        dtype: Type of the entries.
        below: Valid values are the integers 0 .. below-1, such as token numbers. None: no known range.
        ignored: One more valid value, of labels that the loss leaves out. None: there is none.
        values: The model's tensor, if the spec describes one, from which examples are drawn. Ignored by
            comparisons.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    below: int | None = None
    # Any integer, such as -100.
    ignored: int | None = None
    # The model's own tensor, shared and not copied. Verification draws random values near it. Two specs that differ in
    # it alone are equal.
    values: Tensor | None = field(default=None, repr=False, compare=False, kw_only=True)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @classmethod
    def holding(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of ``tensor``, with the tensor itself as ``values``.

        For a tensor on the meta device ``values`` is None.
        """
        return cls(tuple(tensor.shape), tensor.dtype, values=None if tensor.is_meta else tensor)

    def zeros(self, floats: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros of this shape. ``floats`` replaces the dtype if the spec's dtype is a float."""
        other = floats is not None and self.dtype.is_floating_point
        return torch.zeros(self.shape, dtype=floats if other else self.dtype)

    def rows(self, count: int) -> TensorSpec:
        """Return the spec of a batch of ``count`` samples, where this spec describes one sample: ``count`` becomes the
        first dimension.
        """
        return TensorSpec((count, *self.shape), self.dtype, self.below, self.ignored)


def role_of(port: str) -> str:
    """Return the role of a port (named input or output of a function): the first part of its dotted name."""
    return port.partition(".")[0]


def select(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose name begins with ``prefix`` and a dot, by the rest of their name.

    For example, ``select(t, "state.weights")`` returns ``state.weights.conv.bias`` as ``conv.bias``.

    Args:
        tensors: Tensors of any shape and dtype, by dotted name.
        prefix: First parts of the names, without the last dot.
    """
    start = prefix + "."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return each tensor as a NumPy array in host memory. Arrays of CPU tensors share their memory."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def prefixed(prefix: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return ``named`` with ``prefix`` and a dot before each name: the inverse of :func:`select`."""
    return {f"{prefix}.{name}": value for name, value in named.items()}
