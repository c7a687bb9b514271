"""Records of one traced run: the axes of every tensor, and an operation with its arguments by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from edgefl.models.user_code import is_user_code
from edgefl.submodels.channels.axes import Atom, Axes, Axis, pin, resolve, size, unify

UNITS = "run_units"
"""Name of the function that runs the units."""


def pinned_axes(shape: Iterable[int], reason: str) -> Axes:
    """Return the axes (structures of dimensions) of a tensor of this ``shape`` of which all indices must be kept.

    ``reason`` is the text for errors.
    """
    return tuple(resolve(Atom(length, reason)) for length in shape)


def unknown_axes(shape: Iterable[int]) -> Axes:
    """Return one axis (structure of a dimension) per dimension of ``shape``, without a known structure. All can be cut."""
    return tuple(resolve(Atom(length)) for length in shape)


@dataclass
class AxisRegistry:
    """Axes (structures of dimensions) of all tensors of a run, by tensor.

    It also holds the tensors, so that no new tensor gets the id of a freed one.
    """

    _known: dict[int, tuple[Tensor, Axes]] = field(default_factory=dict)
    # Tensors that an operation has read.
    _read: set[int] = field(default_factory=set)
    # Paths of the submodules that are running, outermost first.
    path: list[str] = field(default_factory=list)
    # True: sizes that the code gives to tensors of one value are constants that no cut changes.
    fixed: bool = False
    # Dimensions of such tensors otherwise.
    loose: list[Axis] = field(default_factory=list)

    def axes(self, tensor: Tensor) -> Axes:
        """Return the axes (structures of dimensions) of ``tensor`` and mark it as read by an operation."""
        self._read.add(id(tensor))
        return self.peek(tensor)

    def peek(self, tensor: Tensor) -> Axes:
        """Return the axes (structures of dimensions) of ``tensor`` without marking it as read by an operation.

        A tensor that the registry does not hold yet is added as a constant, all of whose indices must be kept.
        """
        if id(tensor) not in self._known:
            self.note(tensor, pinned_axes(tensor.shape, "a constant of the model"))
        return self._known[id(tensor)][1]

    def note(self, tensor: Tensor, axes: Axes) -> Axes:
        """Return the axes (structures of dimensions) of ``tensor`` after recording that ``axes`` describe the same
        dimensions.

        If the tensor has axes already, they are unified with ``axes``: both keep the same indices. Else it gets
        ``axes``.
        """
        known = self._known.setdefault(id(tensor), (tensor, axes))[1]
        for one, other in zip(known, axes, strict=True):
            unify(one, other)
        return known

    def renote(self, tensor: Tensor, axes: Axes) -> None:
        """Replace the axes (structures of dimensions) of ``tensor``."""
        self._known[id(tensor)] = tensor, axes

    def is_read(self, tensor: Tensor) -> bool:
        """Return True if an operation has read ``tensor``."""
        return id(tensor) in self._read


@dataclass(frozen=True, eq=False)
class OpCall:
    """Call of one torch operation in a traced run.

    Attributes:
        book: Axes of all tensors of the run.
        func: The operation.
        given: Arguments by the names of torch's schema, defaults included.
        results: Tensors that it returned.
    """

    book: AxisRegistry
    func: Any
    given: Mapping[str, Any]
    results: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, book: AxisRegistry, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
    ) -> OpCall:
        declared = func._schema.arguments
        arguments = {
            argument.name: argument.default_value for argument in declared if argument.has_default_value()
        }
        arguments |= {argument.name: value for argument, value in zip(declared, args, strict=False)} | dict(
            kwargs
        )
        return cls(
            book,
            func,
            arguments,
            tuple(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)),
        )

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    def axes(self, name: str) -> Axes:
        """Return the axes (structures of dimensions) of the tensor argument ``name``, and mark it as read."""
        return self.book.axes(self.given[name])

    def dim(self, name: str, rank: int) -> int:
        """Return the dimension in the argument ``name`` as a number from 0 to ``rank`` - 1."""
        return int(self.given[name]) % rank

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Tensors among the arguments."""
        return (leaf for leaf in pytree.tree_leaves(dict(self.given)) if isinstance(leaf, Tensor))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return tuple(self.results[0].shape)

    def pin(self, axes: Iterable[Axis], what: str) -> None:
        """Record that those of ``axes`` with several indices must be kept whole.

        The reason is the text ``what``, with the operation and its place in the code.
        """
        wide_axes = [axis for axis in axes if size(axis) > 1]
        if wide_axes:
            reason = f"{what} ({self.description})"
            for axis in wide_axes:
                pin(axis, reason)

    def whole(self, shape: Iterable[int], what: str) -> Axes:
        """Return axes (structures of dimensions) of this ``shape`` that must be kept whole.

        The reason is the text ``what``, with the operation and its place in the code.
        """
        return pinned_axes(shape, f"{what} ({self.description})")

    def given_size(self, length: int) -> Axis:
        """Return the axis of a dimension of ``length`` indices whose size comes from the code, not from a tensor.

        If the registry is ``fixed``, all its indices must be kept. Otherwise the axis is added to the registry's ``loose``
        axes, because the model may not run after a cut there.
        """
        if self.book.fixed:
            return self.whole((length,), "a size that the code gives")[0]
        (axis,) = unknown_axes((length,))
        self.book.loose.append(axis)
        return axis

    @property
    def description(self) -> str:
        """Text of the operation for messages: its name, the submodule and the calling line."""
        inside = f" in {self.book.path[-1]}" if self.book.path and self.book.path[-1] else ""
        source = _source(sys._getframe(1))
        return f"{self.func}{inside}" + (f" at {source}" if source else "")

    def fits(self, axes: Sequence[Axes]) -> bool:
        """Return True if ``axes``, one tuple of axes (structures of dimensions) per result tensor, have the shapes of
        the results.
        """
        shapes = [tuple(map(size, each)) for each in axes]
        return shapes == [tuple(result.shape) for result in self.results]


def _source(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost running line of user code, or "" if none is running."""
    # Operations outside a unit belong to the caller of this run.
    while frame is not None and frame.f_code.co_name != UNITS:
        if _is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def _is_user_file(name: str) -> bool:
    path = Path(name)
    return is_user_code(path) and "site-packages" not in path.parts
