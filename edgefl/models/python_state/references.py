"""Search for the Python state that a module's code can read or change.

The search starts at the parts of a module, or at a function, and follows the names in the code of their methods:
attributes, class attributes, globals, closures, default arguments, hooks, and the functions and objects found there.
Objects of any class can hold state. Code and class attributes of torch, numpy, Python's library and edgefl are skipped.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.models.python_state.items import (
    ClassAttributes,
    ClosureValue,
    Container,
    ContextVariableValue,
    DefaultArguments,
    DictItems,
    IteratorPosition,
    NumpyArrayEntries,
    SequenceItems,
    SetItems,
    SlotAttributes,
    is_iterator,
    iterated_values,
    slots_of,
)

_FOREIGN = frozenset({"torch", "numpy", "edgefl", "builtins", *sys.stdlib_module_names}) - {"__main__"}
# Objects of these libraries belong to threads, files and traces.
_MACHINERY = frozenset(
    {"_io", "_thread", "abc", "asyncio", "concurrent", "edgefl", "edgefl_export", "io", "logging"}
)
_MACHINERY |= {"multiprocessing", "queue", "socket", "subprocess", "threading"}
_READABLE = (threading.local, threading.Semaphore)
_TORCH_MACHINERY = ("torch._", "torch.fx", "torch.jit")
# Torch manages these attributes of a module itself. The mode is not one of them.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.startswith(("_forward_", "_backward_")))
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# A longer container holds data, such as the words of a vocabulary, and a larger array the samples.
_ENTRIES = 4096
_BYTES = 1 << 26
_DEPTH = 8
_BUFFERS = frozenset({"_ctypes", "mmap"})
_LEAVES = (str, bytes, int, float, complex, type(None), range, slice, np.generic)
_HEAP_TYPE = 1 << 9
LruCache = functools._lru_cache_wrapper


class StateSearch:
    """Search for the containers, tensors and cached functions that code can reach. The constructor runs it.

    Args:
        root: Module, or a function.
        others: Further objects to search, as pairs (path in error texts, object).

    Attributes:
        containers: Containers of values.
        tensors: Pairs (path, tensor), parameters and buffers included.
        caches: Functions with an ``lru_cache``.
    """

    def __init__(self, root: object, others: Iterable[tuple[str, object]] = ()) -> None:
        self.containers: list[Container] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.caches: list[LruCache[Any]] = []
        # The objects themselves, because the id of a collected object can be reused.
        self._seen: dict[int, object] = {}
        self._movable: dict[int, object] = {}
        self._affixes: dict[int, tuple[str, str]] = {}
        self._globals: dict[int, set[str]] = {}
        self._mentioned: set[str] = set()
        self._waiting: defaultdict[str, list[tuple[str, object]]] = defaultdict(list)
        parts = root.named_modules() if isinstance(root, nn.Module) else [("", root)]
        self._queue: deque[tuple[str, object, int]] = deque(
            (path, part, 0) for path, part in (*parts, *others)
        )
        while self._queue:
            self._visit(*self._queue.popleft())

    def path(self, container: Container, key: object) -> str:
        """Return the path of the value ``key`` in ``container`` for error texts, such as ``args.step`` or ``seen[0]``."""
        prefix, suffix = self._affixes[id(container)]
        return f"{prefix}{key!r}{suffix}" if suffix else f"{prefix}{key}".removesuffix(".")

    def _visit(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, _LEAVES) or depth > _DEPTH or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if issubclass(kind, Tensor):
            self._visit_tensor(path, value, depth)
        elif issubclass(kind, FunctionType):
            self._visit_function(value, depth)
        elif issubclass(kind, type):
            self._visit_class(value, depth)
        elif issubclass(
            kind,
            LruCache
            | MethodType
            | BuiltinMethodType
            | MethodWrapperType
            | staticmethod
            | classmethod
            | property
            | functools.partial,
        ):
            self._visit_wrapper(path, value, depth)
        elif issubclass(kind, dict | list | tuple | set | deque | bytearray | array | np.ndarray):
            self._visit_container(path, value, depth)
        elif is_iterator(value):
            if id(value) not in self._movable:
                self._note(IteratorPosition(None, value), path)
            self._add(((path, each) for each in iterated_values(value)), depth)
        elif not issubclass(kind, ModuleType | random.Random):
            self._visit_object(path, value, depth)

    def _visit_wrapper(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, LruCache):
            if not _is_foreign(value.__module__):
                self.caches.append(value)
            self._add([(path, value.__wrapped__)], depth)
        elif isinstance(value, MethodType):
            self._add([(path, value.__func__), (_join_path(path, "self"), value.__self__)], depth)
        elif isinstance(value, BuiltinMethodType | MethodWrapperType):
            if not isinstance(value.__self__, ModuleType):
                self._add([(_join_path(path, "self"), value.__self__)], depth)
        elif isinstance(value, functools.partial):
            self._add([(path, value.func), (f"{path}.args", value.args)], depth)
            self._hold(DictItems(value.keywords), depth, f"{path}.keywords[", "]")
        else:
            self._add([(path, value.fget if isinstance(value, property) else value.__func__)], depth)

    def _visit_container(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, np.ndarray):
            if value.nbytes <= _BYTES and value.flags.writeable:
                affixes = (f"{path}[", "]") if value.dtype.hasobject else (path,)
                self._hold(NumpyArrayEntries(value), depth, *affixes)
        elif len(value) > _ENTRIES:
            return
        elif isinstance(value, dict):
            self._hold(DictItems(value), depth, f"{path}[", "]")
        elif isinstance(value, set):
            self._hold(SetItems(value), depth, f"{path}[", "]")
        elif isinstance(value, tuple):
            self._add(((f"{path}[{place}]", each) for place, each in enumerate(value)), depth)
        else:
            self._hold(SequenceItems(value), depth, f"{path}[", "]")

    def _visit_tensor(self, path: str, value: Tensor, depth: int) -> None:
        self.tensors.append((path, value))
        if type(value) in (Tensor, nn.Parameter):
            for name in _TENSOR_HOOKS:
                if hooks := getattr(value, name, None):
                    self._hold(DictItems(hooks), depth, f"{path}.{name}[", "]")
            self._hold(DictItems(value.__dict__), depth, f"{path}.")

    def _visit_object(self, path: str, value: Any, depth: int) -> None:
        kind, prefix = type(value), _join_path(path, "")
        is_module = isinstance(value, nn.Module)
        if not is_module:
            array = _array_on(value)
            if array is not None:
                self._visit_container(path, array, depth)
            elif isinstance(value, ContextVar):
                self._hold(ContextVariableValue(value), depth, path)
            if _is_machinery(kind.__module__) and not isinstance(value, _READABLE):
                return
        if slots_of(kind):
            self._hold(SlotAttributes(value), depth, prefix)
        names = getattr(value, "__dict__", None)
        if type(names) is dict:
            self._hold(DictItems(names, hidden=_OWN if is_module else frozenset()), depth, prefix)
        if is_module:
            self._hold(DictItems(value._buffers), depth, prefix)
            self._hold(
                SetItems(value._non_persistent_buffers_set),
                depth,
                f"{prefix}_non_persistent_buffers_set[",
                "]",
            )
            for held in (value._parameters, value._modules):
                self._add(((_join_path(path, name), each) for name, each in held.items()), depth)
            for name in _HOOKS:  # code may add hooks in its first forward pass
                if isinstance(hooks := value.__dict__.get(name), dict):
                    self._hold(DictItems(hooks), depth, f"{prefix}{name}[", "]")
        if is_module or _is_followed(kind):
            self._add([(kind.__name__, kind)], 0 if is_module else depth)

    def _visit_class(self, kind: type, depth: int) -> None:
        for each in kind.__mro__:
            if not _is_followed(each) or (each is not kind and id(each) in self._seen):
                continue
            self._seen[id(each)] = each
            self._note(ClassAttributes(each), f"{each.__name__}.")
            for name, value in vars(each).items():
                named = f"{each.__name__}.{name}", value
                if not _is_code(value) or name in self._mentioned or _is_implicit(name, each):
                    self._add([named], depth)
                else:
                    self._waiting[name].append(named)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        names = function.__globals__
        if _is_foreign(names.get("__name__")) and names.get("__name__") != "builtins":
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._hold(ClosureValue(cell), depth, "" if name == "self" else name)
        if function.__defaults__:
            self._hold(DefaultArguments(function), depth, f"{function.__name__}.__defaults__[", "]")
        if function.__kwdefaults__:
            self._hold(DictItems(function.__kwdefaults__), depth, f"{function.__name__}.__kwdefaults__[", "]")
        self._hold(DictItems(function.__dict__), depth, f"{function.__name__}.")
        mentioned = _names(function.__code__)
        # Also names that are not there yet: the code may make them.
        self._globals_of(names).update(mentioned)
        for name in mentioned & names.keys():
            self._visit_global(name, names[name], mentioned, depth)
        for name in mentioned - self._mentioned:
            self._mentioned.add(name)
            self._add(self._waiting.pop(name, ()), depth)

    def _visit_global(self, name: str, value: object, mentioned: frozenset[str], depth: int) -> None:
        if not isinstance(value, ModuleType):
            self._add([(name, value)], depth)
        elif not _is_foreign(value.__name__):
            names = vars(value)
            self._globals_of(names).update(mentioned & names.keys())
            self._add([(f"{name}.{each}", names[each]) for each in mentioned & names.keys()], depth)

    def _globals_of(self, names: dict[str, Any]) -> set[str]:
        """Return the set in which names are collected that code reads in the globals ``names``. The caller adds to it."""
        if id(names) not in self._globals:
            self._globals[id(names)] = set()
            self._note(DictItems(names, names=self._globals[id(names)]), "")
        return self._globals[id(names)]

    def _note(self, container: Container, prefix: str, suffix: str = "") -> Mapping[Any, Any]:
        """Add ``container`` to the result, and another container for the position of each iterator in it.

        Return the values of ``container`` by key. In the path of a value, its key is enclosed by ``prefix`` and
        ``suffix``.
        """
        self.containers.append(container)
        self._affixes[id(container)] = prefix, suffix
        values = container.read()
        for key, value in values.items():
            if is_iterator(value):
                self._movable[id(value)] = value
                self.containers.append(iterator := IteratorPosition(container, key))
                self._affixes[id(iterator)] = self.path(container, key), ""
        return values

    def _hold(self, container: Container, depth: int, prefix: str, suffix: str = "") -> None:
        """Add ``container`` like :meth:`_note`, and queue its values for the search.

        ``depth`` is the level at which it was found.
        """
        values = self._note(container, prefix, suffix)
        self._add(((self.path(container, key), value) for key, value in values.items()), depth)

    def _add(self, values: Iterable[tuple[str, object]], depth: int) -> None:
        """Queue pairs (path, value) for the search, one level below ``depth``."""
        self._queue.extend(
            (path, value, depth + 1) for path, value in values if not isinstance(value, _LEAVES)
        )


def _array_on(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array that shares the memory of ``value``: a C variable, a memory map or a memoryview.

    Return None for any other object.
    """
    if type(value) is memoryview or any(each.__module__ in _BUFFERS for each in type(value).__mro__):
        with suppress(TypeError, ValueError, BufferError):
            return np.asarray(memoryview(value))
    return None


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in ``code``, and in the functions defined inside it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _is_foreign(name: str | None) -> bool:
    """Return True if the code of the module ``name`` is not searched: torch, numpy, edgefl and Python's library.

    Code without a module (None) belongs to the user.
    """
    return name is not None and name.partition(".")[0] in _FOREIGN


def _is_followed(kind: type) -> bool:
    """Return True if the attributes of the class ``kind`` are searched: a class in Python code of the user.

    Classes of torch, numpy, edgefl and Python's library are not searched.
    """
    # A class made by exec() in a namespace without a name is said to be of builtins.
    made = bool(kind.__flags__ & _HEAP_TYPE)
    return made and (kind.__module__ == "builtins" or not _is_foreign(kind.__module__))


@functools.cache
def _is_machinery(name: str) -> bool:
    """Return True if objects of classes of the module ``name`` are not searched: threads, files, processes, tracers."""
    # The values that processes share are variables of C.
    return name != "multiprocessing.sharedctypes" and (
        name.partition(".")[0] in _MACHINERY or name.startswith(_TORCH_MACHINERY)
    )


def _is_code(value: object) -> bool:
    return isinstance(value, FunctionType | staticmethod | classmethod | property | LruCache)


def _is_implicit(name: str, kind: type) -> bool:
    """Return True if Python or torch calls the method ``name`` of the class ``kind`` without a name in the user's code."""
    if issubclass(kind, nn.Module):
        return name in ("forward", "__call__", "__getattr__")
    if issubclass(kind, torch.autograd.Function):
        return True  # torch calls all of them
    return name.startswith("__")
