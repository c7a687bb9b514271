"""Containers in which Python stores values by name: dictionaries, lists, arrays, classes, closures and default arguments.

Each can be read, written to, and restored to the values of an earlier read.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import AsyncGeneratorType, GeneratorType, ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

_MISSING = object()


class Container(Protocol):
    """Interface of a container in which Python stores values by key, such as a dictionary, a class or a closure."""

    def read(self) -> dict[Any, Any]:
        """Return the current values by key."""

    def write(self, key: Any, value: object) -> None:
        """Replace the existing value of ``key``."""

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Restore the values ``before``, which an earlier :meth:`read` returned. Unchanged values are not written.

        Keys that were added since then are removed, as far as the container allows it.
        """


class DictItems:
    """Values of the dictionary ``holder``: all, all except the keys ``hidden``, or only the keys ``names``."""

    def __init__(
        self, holder: dict[Any, Any], *, names: set[str] | None = None, hidden: frozenset[str] = frozenset()
    ) -> None:
        self._holder, self._names, self._hidden = holder, names, hidden
        # The methods of a class derived from these may compute, count or refuse.
        self._base: Any = OrderedDict if isinstance(holder, OrderedDict) else dict

    def is_in(self, holders: Mapping[int, dict[Any, Any]]) -> bool:
        """Return True if this container wraps one of the dictionaries in ``holders``, which are keyed by their ``id``."""
        return id(self._holder) in holders

    def read(self) -> dict[Any, Any]:
        """Return the present values by key."""
        if self._names is not None:
            return {name: self._holder[name] for name in self._names if name in self._holder}
        if self._hidden:
            return {name: value for name, value in self._holder.items() if name not in self._hidden}
        return dict(self._base.items(self._holder))

    def write(self, key: Any, value: object) -> None:
        """Set the existing key ``key`` to ``value``."""
        self._base.__setitem__(self._holder, key, value)

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Set the values ``before`` (:meth:`read`) again, and remove names that were added since. Imported modules stay."""
        now = self.read()
        if _is_same(now, before):
            return
        if self._names is None and not self._hidden:
            self._base.clear(self._holder)
            for key, value in before.items():
                self.write(key, value)
            return
        for key in now.keys() - before.keys():
            # An import inside of a function sets an attribute of the package, and happens once in a process.
            if not isinstance(now[key], ModuleType):
                del self._holder[key]
        for key, value in before.items():
            if now.get(key, _MISSING) is not value:
                self._holder[key] = value


class _ObjectContainer:
    """Base of containers that wrap one object."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder


class _AttributeContainer(_ObjectContainer):
    """Base of containers of attributes of an object.

    Attributes are set and deleted by the methods of ``_kind``, a class of Python. The object's own methods may compute
    values, or raise errors.
    """

    _kind: ClassVar[Any]

    def read(self) -> dict[str, Any]:
        """Return the present values by attribute name."""
        raise NotImplementedError

    def write(self, key: str, value: object) -> None:
        """Set the attribute ``key`` to ``value``."""
        self._kind.__setattr__(self.holder, key, value)

    def restore(self, before: Mapping[str, Any]) -> None:
        """Set the attributes ``before`` (:meth:`read`) again, and delete those that were added since."""
        now = self.read()
        for name in now.keys() - before.keys():
            self._kind.__delattr__(self.holder, name)
        for name, value in before.items():
            if now.get(name, _MISSING) is not value:
                self.write(name, value)


class SlotAttributes(_AttributeContainer):
    """Attributes that an object has in ``__slots__``."""

    _kind = object

    def read(self) -> dict[str, Any]:
        """Return the present values by name; names without a value are left out."""
        names = slots_of(type(self.holder))
        return {name: value for name in names if (value := self._value(name)) is not _MISSING}

    def _value(self, name: str) -> Any:
        # Not getattr: a module has a method for names that are absent.
        try:
            return object.__getattribute__(self.holder, name)
        except AttributeError:
            return _MISSING


def slots_of(kind: type) -> list[str]:
    """Return the names in ``__slots__`` of ``kind`` and its bases."""
    return list(copyreg._slotnames(kind))  # type: ignore[attr-defined]


class SequenceItems(_ObjectContainer):
    """Items of a list, deque, bytearray or array, by index."""

    def read(self) -> dict[int, Any]:
        """Return the present items by index."""
        return dict(enumerate(self.holder))

    def write(self, key: int, value: object) -> None:
        """Set the item with the index ``key`` to ``value``."""
        self.holder[key] = value

    def restore(self, before: Mapping[int, Any]) -> None:
        """Set the items ``before`` (:meth:`read`) again."""
        if _is_same(self.read(), before):
            return
        if isinstance(self.holder, deque):
            self.holder.clear()
        else:
            del self.holder[:]
        self.holder.extend(before.values())


class NumpyArrayEntries(_ObjectContainer):
    """Entries of a numpy array: one value per entry if the entries are objects, else one value with the bytes of all
    entries.
    """

    def read(self) -> dict[Any, Any]:
        """Return the present entries by flat index if they are objects, else all bytes under the key ""."""
        return (
            dict(enumerate(self.holder.flat)) if self.holder.dtype.hasobject else {"": self.holder.tobytes()}
        )

    def write(self, key: Any, value: Any) -> None:
        """Set the entry with the flat index ``key`` to ``value`` if entries are objects.

        Otherwise set all entries from the bytes ``value``.
        """
        if self.holder.dtype.hasobject:
            self.holder.flat[key] = value
        else:
            self.holder[...] = np.frombuffer(value, self.holder.dtype).reshape(self.holder.shape)

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Set the entries ``before`` (:meth:`read`) again."""
        now = self.read()
        for key, value in before.items():
            if now[key] is not value and (self.holder.dtype.hasobject or now[key] != value):
                self.write(key, value)


class IteratorPosition:
    """Container of one value: the position of an iterator.

    A position cannot be set, so :meth:`restore` replaces the iterator by a new one at the earlier position. A
    generator, or an iterator in a tuple, cannot be replaced.

    Args:
        owner: Container of the iterator. None: ``place`` is the iterator itself, and it cannot be replaced.
        place: Key of the iterator in ``owner``.
    """

    def __init__(self, owner: Container | None, place: object) -> None:
        self._owner, self._place = owner, place

    def is_replaceable(self) -> bool:
        """Return True if :meth:`restore` can replace the iterator."""
        return self._owner is not None and _is_restorable(tuple(self.read().values()))

    def read(self) -> dict[str, Any]:
        """Return the present position under the key "", as :func:`_position` returns it; {} if the iterator is gone."""
        value = self._place if self._owner is None else self._owner.read().get(self._place)
        return {"": _position(value)} if is_iterator(value) else {}

    def write(self, key: str, value: object) -> None:
        """Do nothing, because no other value can be a position."""

    def restore(self, before: Mapping[str, Any]) -> None:
        """Replace the iterator by a new one at the position ``before``. Does nothing if it cannot be replaced."""
        if self._owner is None or not _is_restorable(tuple(before.values())):
            return
        if before and not is_equal(self.read(), before):
            self._owner.write(self._place, _iterator_at((_NESTED, *before[""])))


def is_iterator(value: object) -> bool:
    """Return True for an iterator that Python itself implements, such as that of a list.

    A search of Python state treats iterators of other classes as objects with attributes.
    """
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def iterated_values(iterator: Any) -> Iterator[Any]:
    """Yield the objects that an iterator reads from, such as a list or a function."""
    waiting = [*_position(iterator)]
    while waiting:
        value = waiting.pop()
        if type(value) is tuple:
            waiting += value
        elif value is not _MISSING and value is not _NESTED:
            yield value


def _is_restorable(position: tuple[Any, ...]) -> bool:
    """Return True if an iterator can be created at ``position``, a result of :func:`_position`."""
    return all(
        each is not _MISSING and (type(each) is not tuple or _is_restorable(each)) for each in position
    )


_NESTED = object()
"""Marks the position of an iterator that another iterator reads from."""


def _position(iterator: Any) -> tuple[Any, ...]:
    """Return the position of an iterator as (constructor, its arguments, state to set afterwards).

    The state is missing if there is none to set. If the iterator cannot be created anew, such as a generator, the
    constructor is ``_MISSING``.
    """
    if isinstance(iterator, GeneratorType | AsyncGeneratorType):
        frame = getattr(iterator, "gi_frame", None)
        return _MISSING, (), frame and (frame.f_lasti, tuple(map(id, frame.f_locals.values())))
    try:
        made, *rest = iterator.__reduce__()
    except TypeError:
        return _MISSING, (), None
    return made, *map(_positions, rest)


def _positions(value: Any) -> Any:
    """Return ``value`` with each iterator in it replaced by a tuple of ``_NESTED`` and the position of that iterator."""
    if type(value) is tuple:
        return tuple(map(_positions, value))
    return (_NESTED, *_position(value)) if is_iterator(value) else value


def _iterator_at(position: Any) -> Any:
    """Return the object that ``position``, a value of :func:`_positions`, describes.

    An item ``(_NESTED, *position)`` becomes a new iterator at that position, also inside of tuples. Other values are
    returned unchanged.
    """
    if type(position) is not tuple:
        return position
    if position[:1] == (_NESTED,):
        made, arguments, *state = position[1:]
        iterator = made(*_iterator_at(arguments))
        if state and state[0] is not None:
            iterator.__setstate__(_iterator_at(state[0]))
        return iterator
    return tuple(map(_iterator_at, position))


class SetItems(_ObjectContainer):
    """Items of a set. Each item is its own key."""

    def read(self) -> dict[Any, Any]:
        """Return the present items as keys; all values are None."""
        return {each: None for each in self.holder}

    def write(self, key: Any, value: object) -> None:
        """Do nothing, because an item cannot be replaced under its own key."""

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Make the set hold the items ``before`` (:meth:`read`) again, and no others."""
        if self.holder != before.keys():
            self.holder.clear()
            self.holder.update(before)


class ClassAttributes(_AttributeContainer):
    """Attributes of a class, without those that Python itself sets."""

    _kind = type

    def read(self) -> dict[str, Any]:
        """Return the present attributes by name, as the class stores them: functions, not bound methods."""
        return {name: value for name, value in vars(self.holder).items() if not name.startswith("__")}


class ClosureValue(_ObjectContainer):
    """Container of one value: that of a variable in a function's closure."""

    def read(self) -> dict[str, Any]:
        """Return the present value under the key ""; {} if the variable has none."""
        try:
            return {"": self.holder.cell_contents}
        except ValueError:
            return {}

    def write(self, key: str, value: object) -> None:
        """Set the variable to ``value``."""
        self.holder.cell_contents = value

    def restore(self, before: Mapping[str, Any]) -> None:
        """Set the value ``before`` (:meth:`read`) again, or empty the variable if it had none."""
        if _is_same(self.read(), before):
            return
        if before:
            self.holder.cell_contents = before[""]
        else:
            del self.holder.cell_contents


class ContextVariableValue(_ObjectContainer):
    """Container of one value: that of a context variable in this thread."""

    def read(self) -> dict[str, Any]:
        """Return the present value under the key ""; {} if the variable has none."""
        return {} if (value := self.holder.get(_MISSING)) is _MISSING else {"": value}

    def write(self, key: str, value: object) -> None:
        """Set the variable to ``value``."""
        self.holder.set(value)

    def restore(self, before: Mapping[str, Any]) -> None:
        """Set the value ``before`` (:meth:`read`) again.

        A variable that had none keeps its new value, because it cannot be emptied.
        """
        if before and not _is_same(self.read(), before):
            self.write("", before[""])


class DefaultArguments(_ObjectContainer):
    """Default values of a function's positional arguments, by index."""

    def read(self) -> dict[int, Any]:
        """Return the present defaults by index."""
        return dict(enumerate(self.holder.__defaults__ or ()))

    def write(self, key: int, value: object) -> None:
        """Set the default with the index ``key`` to ``value``."""
        defaults = list(self.holder.__defaults__ or ())
        defaults[key] = value
        self.holder.__defaults__ = tuple(defaults)

    def restore(self, before: Mapping[int, Any]) -> None:
        """Set the defaults ``before`` (:meth:`read`) again."""
        if not _is_same(self.read(), before):
            self.holder.__defaults__ = tuple(before.values())


def _is_same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Return True if keys and values of both mappings are the same objects in the same order."""
    return len(now) == len(before) and all(
        a is b and now[a] is before[b] for a, b in zip(now, before, strict=True)
    )


def is_equal(one: Any, other: Any, depth: int = 4) -> bool:
    """Return True if two values are certainly equal: the same object, equal numbers or texts, or containers of these.

    Args:
        one: First value.
        other: Second value.
        depth: Levels of containers to compare. Deeper ones must be the same object.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bytes_of(one) == bytes_of(other)
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and is_equal(
            NumpyArrayEntries(one).read(), NumpyArrayEntries(other).read(), depth
        )
    if depth and isinstance(one, list | tuple | deque):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if depth and isinstance(one, dict):
        return one.keys() == other.keys() and all(
            is_equal(each, other[key], depth - 1) for key, each in one.items()
        )
    with suppress(Exception):  # objects of the user's may compare as they like
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 NaN differs from itself
    return False


def bytes_of(tensor: Tensor) -> bytes | None:
    """Return the bytes of a tensor's values, or None if they cannot be read."""
    with torch._C.DisableTorchFunction():
        try:
            return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
        except (NotImplementedError, RuntimeError, TypeError):
            return None
