"""Search for the Python state that a module's code can read or change.

The search starts at the parts of a module and follows the names in the code of their methods: attributes, class attributes,
globals, closures, default arguments, and the functions and objects found there. Code of torch, numpy, Python's library and
edgefl is not followed.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from edgefl.models.spaces import (
    CellSpace,
    ClassSpace,
    DefaultsSpace,
    DictSpace,
    SequenceSpace,
    SetSpace,
    SlotSpace,
    Space,
    slots_of,
)

_FOREIGN = frozenset({"torch", "numpy", "edgefl", "builtins", *sys.stdlib_module_names}) - {"__main__"}
# Torch manages these attributes of a module itself. The mode is not one of them.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.startswith(("_forward_", "_backward_")))
# A longer container holds data, such as the words of a vocabulary.
_ENTRIES = 4096
_DEPTH = 8
_LEAVES = (str, bytes, int, float, complex, type(None), Tensor, range, slice)
_HEAP_TYPE = 1 << 9
LruCache = functools._lru_cache_wrapper


class References:
    """Spaces of names and functions with a cache that the code of ``module`` can reach."""

    def __init__(self, module: nn.Module) -> None:
        self.spaces: list[Space] = []
        self.caches: list[LruCache[Any]] = []
        # The objects themselves, because the id of a collected object can be reused.
        self._seen: dict[int, object] = {}
        self._globals: dict[int, set[str]] = {}
        self._mentioned: set[str] = set()
        self._waiting: defaultdict[str, list[object]] = defaultdict(list)
        self._queue: deque[tuple[object, int]] = deque((part, 0) for part in module.modules())
        while self._queue:
            self._visit(*self._queue.popleft())

    def _visit(self, value: Any, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, _LEAVES) or depth > _DEPTH or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if issubclass(kind, FunctionType):
            self._visit_function(value, depth)
        elif issubclass(kind, type):
            self._visit_class(value, depth)
        elif issubclass(kind, LruCache):
            if not _is_foreign(value.__module__):
                self.caches.append(value)
            self._add([value.__wrapped__], depth)
        elif issubclass(kind, MethodType):
            self._add([value.__func__, value.__self__], depth)
        elif issubclass(kind, staticmethod | classmethod):
            self._add([value.__func__], depth)
        elif issubclass(kind, property):
            self._add([value.fget], depth)
        elif issubclass(kind, functools.partial):
            self._add([value.func, *value.args, *value.keywords.values()], depth)
        elif issubclass(kind, dict | list | tuple | set | deque):
            self._visit_container(value, depth)
        elif not issubclass(kind, ModuleType):
            self._visit_object(value, depth)

    def _visit_container(self, value: Any, depth: int) -> None:
        if len(value) > _ENTRIES:
            return
        if isinstance(value, dict):
            self._hold(DictSpace(value), depth)
        elif isinstance(value, list | deque):
            self._hold(SequenceSpace(value), depth)
        elif isinstance(value, set):
            self.spaces.append(SetSpace(value))
        else:
            self._add(value, depth)

    def _visit_object(self, value: Any, depth: int) -> None:
        kind = type(value)
        if (isinstance(value, nn.Module) or _is_followed(kind)) and slots_of(kind):
            self._hold(SlotSpace(value), depth)
        if isinstance(value, nn.Module):
            self._hold(DictSpace(value.__dict__, hidden=_OWN), depth)
            self.spaces += [DictSpace(value._buffers), SetSpace(value._non_persistent_buffers_set)]
            for name in _HOOKS:  # code may add hooks in its first forward pass
                if isinstance(hooks := value.__dict__.get(name), dict):
                    self._hold(DictSpace(hooks), depth)
            self._add([kind], 0)
        elif _is_followed(kind):
            names = getattr(value, "__dict__", None)
            if type(names) is dict:
                self._hold(DictSpace(names), depth)
            self._add([kind], depth)

    def _visit_class(self, kind: type, depth: int) -> None:
        for each in kind.__mro__:
            if not _is_followed(each) or (each is not kind and id(each) in self._seen):
                continue
            self._seen[id(each)] = each
            space = ClassSpace(each)
            self.spaces.append(space)
            for name, value in vars(each).items():
                if not _is_code(value) or name in self._mentioned or _is_implicit(name, each):
                    self._add([value], depth)
                else:
                    self._waiting[name].append(value)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        names = function.__globals__
        if _is_foreign(names.get("__name__")) and names.get("__name__") != "builtins":
            return
        for each in function.__closure__ or ():
            self._visit_cell(each, depth)
        if function.__defaults__:
            self._hold(DefaultsSpace(function), depth)
        if function.__kwdefaults__:
            self._hold(DictSpace(function.__kwdefaults__), depth)
        self._hold(DictSpace(function.__dict__), depth)
        mentioned = _names(function.__code__)
        # Also names that are not there yet: the code may make them.
        self._globals_of(names).update(mentioned)
        for name in mentioned & names.keys():
            self._visit_global(names[name], mentioned, depth)
        for name in mentioned - self._mentioned:
            self._mentioned.add(name)
            self._add(self._waiting.pop(name, ()), depth)

    def _visit_global(self, value: object, mentioned: frozenset[str], depth: int) -> None:
        if not isinstance(value, ModuleType):
            self._add([value], depth)
        elif not _is_foreign(value.__name__):
            names = vars(value)
            self._globals_of(names).update(mentioned & names.keys())
            self._add([names[name] for name in mentioned & names.keys()], depth)

    def _globals_of(self, names: dict[str, Any]) -> set[str]:
        """Return the names that belong to the space of the globals ``names``, to add more."""
        if id(names) not in self._globals:
            self._globals[id(names)] = set()
            self.spaces.append(DictSpace(names, names=self._globals[id(names)]))
        return self._globals[id(names)]

    def _visit_cell(self, cell: CellType, depth: int) -> None:
        if id(cell) not in self._seen:
            self._seen[id(cell)] = cell
            self._hold(CellSpace(cell), depth)

    def _hold(self, space: Space, depth: int) -> None:
        self.spaces.append(space)
        self._add(space.read().values(), depth)

    def _add(self, values: Iterable[object], depth: int) -> None:
        self._queue.extend((value, depth + 1) for value in values if not isinstance(value, _LEAVES))


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in ``code`` and in the functions defined inside of it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _is_foreign(name: str | None) -> bool:
    """Return True for modules whose code is not followed. Code without a module is the user's."""
    return name is not None and name.partition(".")[0] in _FOREIGN


def _is_followed(kind: type) -> bool:
    # A class made by exec() in a namespace without a name is said to be of builtins.
    made = bool(kind.__flags__ & _HEAP_TYPE)
    return made and (kind.__module__ == "builtins" or not _is_foreign(kind.__module__))


def _is_code(value: object) -> bool:
    return isinstance(value, FunctionType | staticmethod | classmethod | property | LruCache)


def _is_implicit(name: str, kind: type) -> bool:
    """Return True for methods that run without being named in code."""
    if issubclass(kind, nn.Module):
        return name in ("forward", "__call__", "__getattr__")
    return name.startswith("__")
