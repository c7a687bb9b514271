"""Axes of every tensor in one run, and one operation with its arguments by name."""

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


def whole(shape: Iterable[int], reason: str) -> Axes:
    """Return dimensions that must be kept whole."""
    return tuple(resolve(Atom(length, reason)) for length in shape)


def free(shape: Iterable[int]) -> Axes:
    """Return dimensions of unknown structure."""
    return tuple(resolve(Atom(length)) for length in shape)


@dataclass
class Book:
    """Axes of tensors. It holds the tensors too, so that none can get the id of a freed one."""

    _known: dict[int, tuple[Tensor, Axes]] = field(default_factory=dict)
    # Tensors that an operation has read.
    _read: set[int] = field(default_factory=set)
    # Paths of the submodules that are running, outermost first.
    path: list[str] = field(default_factory=list)
    # Whether sizes that code gives to tensors of one value are taken for numbers that it holds.
    fixed: bool = False
    # Dimensions of such tensors, if they are not.
    loose: list[Axis] = field(default_factory=list)

    def axes(self, tensor: Tensor) -> Axes:
        self._read.add(id(tensor))
        return self.peek(tensor)

    def peek(self, tensor: Tensor) -> Axes:
        """Return the axes of ``tensor`` without marking it as read."""
        if id(tensor) not in self._known:
            self.note(tensor, whole(tensor.shape, "a constant of the model"))
        return self._known[id(tensor)][1]

    def note(self, tensor: Tensor, axes: Axes) -> Axes:
        """Unify the axes of ``tensor`` with ``axes``, and return them."""
        known = self._known.setdefault(id(tensor), (tensor, axes))[1]
        for one, other in zip(known, axes, strict=True):
            unify(one, other)
        return known

    def renote(self, tensor: Tensor, axes: Axes) -> None:
        """Replace the axes of ``tensor``."""
        self._known[id(tensor)] = tensor, axes

    def is_read(self, tensor: Tensor) -> bool:
        return id(tensor) in self._read


@dataclass(frozen=True, eq=False)
class OpCall:
    """One operation: its arguments by the names of torch's schema, and its result tensors."""

    book: Book
    func: Any
    given: Mapping[str, Any]
    results: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, book: Book, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
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
        return self.book.axes(self.given[name])

    def dim(self, name: str, rank: int) -> int:
        """Return the dimension in the argument ``name``, counted from 0."""
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
        """Keep all of ``axes``, because of ``what`` this operation does."""
        wide_axes = [axis for axis in axes if size(axis) > 1]
        if wide_axes:
            reason = f"{what} ({self.description})"
            for axis in wide_axes:
                pin(axis, reason)

    def whole(self, shape: Iterable[int], what: str) -> Axes:
        return whole(shape, f"{what} ({self.description})")

    def given_size(self, length: int) -> Axis:
        """Return a dimension whose size comes from the code, not from a tensor."""
        if self.book.fixed:
            return self.whole((length,), "a size that the code gives")[0]
        (axis,) = free((length,))
        self.book.loose.append(axis)
        return axis

    @property
    def description(self) -> str:
        """The operation for people: its name, the submodule and the calling line."""
        inside = f" in {self.book.path[-1]}" if self.book.path and self.book.path[-1] else ""
        source = _source(sys._getframe(1))
        return f"{self.func}{inside}" + (f" at {source}" if source else "")

    def fits(self, axes: Sequence[Axes]) -> bool:
        """Return True if ``axes`` have the shapes of the results."""
        shapes = [tuple(map(size, each)) for each in axes]
        return shapes == [tuple(result.shape) for result in self.results]


def _source(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost running line of user code, or ""."""
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
