"""Structure of a dimension's indices, refined as operations are traced.

A dimension is an :data:`Axis`. An :class:`Atom` is one group of similar indices, such as the channels of a layer. A
:class:`ProductAxis` multiplies axes (heads times entries of a head, the first varies slowest). A :class:`Concat` puts axes
one after the other. Dimensions whose indices must be kept together share atoms. If an atom is refined to a product or
concatenation, it is refined in all dimensions. A dimension of unknown structure is *pinned*: all its indices are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias


class Atom:
    """Group of ``size`` indices of one kind in a dimension, such as the channels of a layer.

    Dimensions that share an atom must keep the same indices of it.

    Attributes:
        size: Number of indices.
        reason: Text that says why all of them must be kept. None: they can be cut.
    """

    __slots__ = ("_meaning", "reason", "size")

    def __init__(self, size: int, reason: str | None = None) -> None:
        self.size, self.reason = size, reason
        self._meaning: Axis | None = None

    def become(self, axis: Axis) -> None:
        """Replace this atom (group of indices) by the finer structure ``axis`` of the same size, in all dimensions
        that contain it.

        If this atom must be kept whole, all indices of ``axis`` must be kept, too.
        """
        if self.reason is not None:
            pin(axis, self.reason)
        self._meaning = axis

    def resolved(self) -> Axis:
        """Return the axis (structure of a dimension) that replaces this atom (group of indices that is cut as one).

        It is the atom itself if no finer structure was found for it.
        """
        if self._meaning is None:
            return ONE if self.size == 1 else self
        self._meaning = resolve(self._meaning)
        return self._meaning

    def __repr__(self) -> str:
        return f"Atom({self.size})" if self.reason is None else f"Atom({self.size}, {self.reason!r})"


@dataclass(frozen=True)
class ProductAxis:
    """Dimension whose indices are all combinations of the factors' indices, the first factor varying slowest.

    Without factors it is a dimension of size 1.
    """

    factors: tuple[Axis, ...]


@dataclass(frozen=True)
class Concat:
    """Dimension that consists of ``parts``, one part after the other."""

    parts: tuple[Axis, ...]


Axis: TypeAlias = Atom | ProductAxis | Concat
Axes = tuple[Axis, ...]
ONE = ProductAxis(())


class UnalignedError(Exception):
    """Error: a dimension would have to be grouped in two ways that no common structure describes."""


def resolve(axis: Axis) -> Axis:
    """Return the current structure of ``axis`` (a dimension) in normal form.

    In normal form no product contains a product, and no concatenation a concatenation. None has a single member or a
    factor of size 1. A product whose first factor is a concatenation becomes a concatenation of products. Atoms
    (groups of indices) that were refined are replaced by their structure.
    """
    if isinstance(axis, Atom):
        return axis.resolved()
    if isinstance(axis, Concat):
        parts: list[Axis] = []
        for part in map(resolve, axis.parts):
            parts.extend(part.parts if isinstance(part, Concat) else [part])
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))
    factors: list[Axis] = []
    for factor in map(resolve, axis.factors):
        factors.extend(factor.factors if isinstance(factor, ProductAxis) else [factor])
    if len(factors) == 1:
        return factors[0]
    if factors and isinstance(factors[0], Concat):
        return resolve(Concat(tuple(ProductAxis((part, *factors[1:])) for part in factors[0].parts)))
    return ProductAxis(tuple(factors))


def size(axis: Axis) -> int:
    """Return the number of indices of ``axis``."""
    if isinstance(axis, Atom):
        return axis.size
    if isinstance(axis, ProductAxis):
        return math.prod(map(size, axis.factors))
    return sum(map(size, axis.parts))


def atoms(axis: Axis) -> Iterator[Atom]:
    """Yield the atoms (groups of indices of one kind) of ``axis``, in order. One that occurs twice is yielded twice."""
    axis = resolve(axis)
    if isinstance(axis, Atom):
        yield axis
    else:
        for inner in axis.factors if isinstance(axis, ProductAxis) else axis.parts:
            yield from atoms(inner)


def pin(axis: Axis, reason: str) -> None:
    """Mark all indices of ``axis`` as indices that no cut may drop.

    Args:
        axis: Dimension.
        reason: Text for error messages. A group of indices that has a reason already keeps that one.
    """
    for atom in atoms(axis):
        if atom.reason is None:
            atom.reason = reason


def is_pinned(axis: Axis) -> bool:
    """Return True if all indices of dimension ``axis`` must be kept, so that it cannot be cut."""
    return all(atom.reason is not None for atom in atoms(axis))


def unify(one: Axis, other: Axis) -> None:
    """Record that two dimensions of equal size must keep the same indices.

    Refines their structure to a common one. If there is none, all indices of both must be kept.
    """
    one, other = resolve(one), resolve(other)
    if one == other:
        return
    if isinstance(one, Atom):
        one.become(other)
    elif isinstance(other, Atom):
        other.become(one)
    else:
        try:
            if isinstance(one, Concat) and isinstance(other, Concat):
                _join_parts(one, other)
            else:
                _join_factors(one, other)
        except UnalignedError:
            for axis in (one, other):
                pin(axis, "its indices are grouped in two ways that do not fit into each other")


def _join_factors(one: Axis, other: Axis) -> None:
    rests: tuple[Axis, Axis] = (one, other)
    while size(rests[0]) > 1:
        step = min(size(_last_factor(rest)) for rest in rests)
        (outer, inner), (other_outer, other_inner) = (divide(rest, step) for rest in rests)
        unify(inner, other_inner)
        rests = outer, other_outer


def _last_factor(axis: Axis) -> Axis:
    axis = resolve(axis)
    return axis.factors[-1] if isinstance(axis, ProductAxis) else axis


def _join_parts(one: Concat, other: Concat) -> None:
    ends = sorted({end for axis in (one, other) for end in _ends(axis)})
    for start, stop in pairwise([0, *ends]):
        unify(take(one, start, stop), take(other, start, stop))


def _ends(axis: Concat) -> list[int]:
    return list(accumulate(map(size, axis.parts)))


def take(axis: Axis, start: int, stop: int) -> Axis:
    """Return the indices ``start:stop`` of ``axis`` as an axis (structure of a dimension).

    Groups of indices (atoms) are split at these borders.

    Raises:
        UnalignedError: A border lies inside a group of a product.
    """
    axis = resolve(axis)
    if (start, stop) == (0, size(axis)):
        return axis
    if isinstance(axis, Atom):
        return _take_atom(axis, start, stop)
    if isinstance(axis, Concat):
        parts: list[Axis] = []
        for part, (first, last) in zip(axis.parts, pairwise([0, *_ends(axis)]), strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                parts.append(take(part, low - first, high - first))
        return resolve(Concat(tuple(parts)))
    first_factor, *rest = axis.factors
    inner = ProductAxis(tuple(rest))
    step = size(inner)
    if start % step or stop % step:
        raise UnalignedError
    return resolve(ProductAxis((take(first_factor, start // step, stop // step), inner)))


def _take_atom(atom: Atom, start: int, stop: int) -> Axis:
    if atom.reason is not None:
        return resolve(Atom(stop - start, atom.reason))
    lengths = (start, stop - start, atom.size - stop)
    before, middle, after = (Atom(length) if length else None for length in lengths)
    assert middle is not None
    atom.become(Concat(tuple(part for part in (before, middle, after) if part is not None)))
    return resolve(middle)


def divide(axis: Axis, inner: int) -> tuple[Axis, Axis]:
    """Return axes (outer, inner) whose product is ``axis``. The inner one has ``inner`` indices and varies fastest.

    Groups of indices (atoms) in ``axis`` are refined accordingly.

    Raises:
        UnalignedError: The structure of ``axis`` has no such division.
    """
    axis = resolve(axis)
    if inner == 1:
        return axis, ONE
    if size(axis) % inner:
        raise UnalignedError
    if isinstance(axis, Atom):
        return _divide_atom(axis, inner)
    if isinstance(axis, Concat):
        return _divide_parts(axis, inner)
    factors, tail = list(axis.factors), list[Axis]()
    while inner > 1:
        last = factors.pop()
        if inner % size(last):
            outer, last = divide(last, inner)
            factors.append(outer)
        inner //= size(last)
        tail.insert(0, last)
    return resolve(ProductAxis(tuple(factors))), resolve(ProductAxis(tuple(tail)))


def _divide_atom(atom: Atom, inner: int) -> tuple[Axis, Axis]:
    if atom.size == inner:
        return ONE, atom
    parts = Atom(atom.size // inner, atom.reason), Atom(inner, atom.reason)
    atom.become(ProductAxis(parts))
    return parts


def _divide_parts(axis: Concat, inner: int) -> tuple[Axis, Axis]:
    """Return axes (outer, inner) whose product is the concatenation ``axis``: divide each part by ``inner``.

    If a part ends inside a group of ``inner`` indices, unify all groups; the outer axis (structure of a dimension)
    must then be kept whole.
    """
    if any(size(part) % inner for part in axis.parts):
        groups = [take(axis, start, start + inner) for start in range(0, size(axis), inner)]
        for group in groups[1:]:
            unify(groups[0], group)
        return resolve(Concat((ONE,) * len(groups))), resolve(groups[0])
    pairs = [divide(part, inner) for part in axis.parts]
    for _, other in pairs[1:]:
        unify(pairs[0][1], other)
    return resolve(Concat(tuple(outer for outer, _ in pairs))), resolve(pairs[0][1])


def regroup(axes: Sequence[Axis], shape: Sequence[int]) -> Axes:
    """Return the axes (structures of the dimensions) of a tensor after ``view`` to ``shape``.

    If ``view`` groups indices in another way than an axis does, all indices of that axis must be kept.

    Args:
        axes: Axes before, one per dimension.
        shape: Shape after, with the same number of entries.
    """
    new_axes: list[Axis] = []
    left = [axis for axis in axes if size(axis) != 1]
    wanted: list[int] = []
    for length in shape:
        wanted.append(length)
        # A group is complete once as many elements went in as came out.
        whole, count = math.prod(wanted), 0
        while whole > 1 and math.prod(map(size, left[:count])) < whole and count < len(left):
            count += 1
        if math.prod(map(size, left[:count])) == whole:
            new_axes += _regroup_group(left[:count], wanted)
            left, wanted = left[count:], []
    return tuple(new_axes)


def _regroup_group(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    if len(axes) == 1 and [length for length in shape if length != 1] == [size(axes[0])]:
        return [axes[0] if length != 1 else ONE for length in shape]
    rest: Axis = ProductAxis(tuple(axes))
    new_axes: list[Axis] = []
    try:
        for length in reversed(shape):
            rest, inner = divide(rest, length)
            new_axes.insert(0, inner)
    except UnalignedError:
        reason = "its indices are regrouped in a way that does not follow their structure"
        pin(ProductAxis(tuple(axes)), reason)
        return [resolve(Atom(length, reason)) for length in shape]
    return new_axes
