"""Places where Python keeps values by name: dictionaries, lists, classes, closures and default arguments.

Each can be read, written to, and restored to what was read before.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict, deque
from collections.abc import Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any, ClassVar, Protocol

_MISSING = object()


class Space(Protocol):
    """A place with values by key."""

    def read(self) -> dict[Any, Any]:
        """Return the values of now."""

    def write(self, key: Any, value: object) -> None:
        """Replace one value that is there."""

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Make the values those of ``before``. Does not touch what is the same."""


class DictSpace:
    """A dictionary, without the ``hidden`` names; or the ``names`` in it."""

    def __init__(
        self, holder: dict[Any, Any], *, names: set[str] | None = None, hidden: frozenset[str] = frozenset()
    ) -> None:
        self._holder, self._names, self._hidden = holder, names, hidden
        # The methods of a class derived from these may compute, count or refuse.
        self._base: Any = OrderedDict if isinstance(holder, OrderedDict) else dict

    def is_of(self, holder: dict[Any, Any]) -> bool:
        """Return True if these are the values of ``holder``."""
        return self._holder is holder

    def read(self) -> dict[Any, Any]:
        """Return the values of now."""
        if self._names is not None:
            return {name: self._holder[name] for name in self._names if name in self._holder}
        if self._hidden:
            return {name: value for name, value in self._holder.items() if name not in self._hidden}
        return dict(self._base.items(self._holder))

    def write(self, key: Any, value: object) -> None:
        """Replace one value that is there."""
        self._base.__setitem__(self._holder, key, value)

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Make the values those of ``before``."""
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


class _Attributes:
    """Attributes of ``holder``, which the methods of ``_kind`` set and delete, since its own may compute or refuse."""

    _kind: ClassVar[Any]

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def read(self) -> dict[str, Any]:
        """Return the values of now."""
        raise NotImplementedError

    def write(self, key: str, value: object) -> None:
        """Replace one value."""
        self._kind.__setattr__(self._holder, key, value)

    def restore(self, before: Mapping[str, Any]) -> None:
        """Make the values those of ``before``."""
        now = self.read()
        for name in now.keys() - before.keys():
            self._kind.__delattr__(self._holder, name)
        for name, value in before.items():
            if now.get(name, _MISSING) is not value:
                self.write(name, value)


class SlotSpace(_Attributes):
    """The attributes that a class keeps in ``__slots__``."""

    _kind = object

    def read(self) -> dict[str, Any]:
        """Return the values of now."""
        names = slots_of(type(self._holder))
        return {name: value for name in names if (value := self._value(name)) is not _MISSING}

    def _value(self, name: str) -> Any:
        # Not getattr: a module has a method for names that are absent.
        try:
            return object.__getattribute__(self._holder, name)
        except AttributeError:
            return _MISSING


def slots_of(kind: type) -> list[str]:
    """Return the names that ``kind`` and its bases keep in ``__slots__``."""
    return list(copyreg._slotnames(kind))  # type: ignore[attr-defined]


class SequenceSpace:
    """A list or deque."""

    def __init__(self, holder: list[Any] | deque[Any]) -> None:
        self._holder = holder

    def read(self) -> dict[int, Any]:
        """Return the items of now by index."""
        return dict(enumerate(self._holder))

    def write(self, key: int, value: object) -> None:
        """Replace one item."""
        self._holder[key] = value

    def restore(self, before: Mapping[int, Any]) -> None:
        """Make the items those of ``before``."""
        if not _is_same(self.read(), before):
            self._holder.clear()
            self._holder.extend(before.values())


class SetSpace:
    """A set; its items have no other key than themselves."""

    def __init__(self, holder: set[Any]) -> None:
        self._holder = holder

    def read(self) -> dict[Any, Any]:
        """Return the items of now."""
        return {each: None for each in self._holder}

    def write(self, key: Any, value: object) -> None:
        """Do nothing, because an item cannot be replaced under its own key."""

    def restore(self, before: Mapping[Any, Any]) -> None:
        """Make the items those of ``before``."""
        if self._holder != before.keys():
            self._holder.clear()
            self._holder.update(before)


class ClassSpace(_Attributes):
    """Attributes of a class, without those that Python itself sets."""

    _kind = type

    def read(self) -> dict[str, Any]:
        """Return the attributes of now as they are stored, not bound."""
        return {name: value for name, value in vars(self._holder).items() if not name.startswith("__")}


class CellSpace:
    """The variable of a closure."""

    def __init__(self, holder: CellType) -> None:
        self._holder = holder

    def read(self) -> dict[str, Any]:
        """Return the value of now; empty if the variable has none."""
        try:
            return {"": self._holder.cell_contents}
        except ValueError:
            return {}

    def write(self, key: str, value: object) -> None:
        """Replace the value."""
        self._holder.cell_contents = value

    def restore(self, before: Mapping[str, Any]) -> None:
        """Make the value that of ``before``."""
        if _is_same(self.read(), before):
            return
        if before:
            self._holder.cell_contents = before[""]
        else:
            del self._holder.cell_contents


class DefaultsSpace:
    """Default values of a function's arguments."""

    def __init__(self, holder: FunctionType) -> None:
        self._holder = holder

    def read(self) -> dict[int, Any]:
        """Return the defaults of now by index."""
        return dict(enumerate(self._holder.__defaults__ or ()))

    def write(self, key: int, value: object) -> None:
        """Replace one default."""
        defaults = list(self._holder.__defaults__ or ())
        defaults[key] = value
        self._holder.__defaults__ = tuple(defaults)

    def restore(self, before: Mapping[int, Any]) -> None:
        """Make the defaults those of ``before``."""
        if not _is_same(self.read(), before):
            self._holder.__defaults__ = tuple(before.values())


def _is_same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return len(now) == len(before) and all(
        a is b and now[a] is before[b] for a, b in zip(now, before, strict=True)
    )
