"""Snapshots of Python state, to restore what a module's code changes while it is traced or trained by torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor, nn

from edgefl.models.python_state.items import Container, DictItems, SequenceItems, SetItems, bytes_of, is_equal
from edgefl.models.python_state.references import LruCache, StateSearch

# Depth to which the result of a cached function is searched for tensors.
_LEVELS = 4
_PLAIN = (dict, list, tuple, set, frozenset)
_NOT_BRANCHED_ON = (Tensor, type(None))
Held = tuple[Container, dict[Any, Any]]


@contextmanager
def restored_state(module: nn.Module) -> Iterator[list[Held]]:
    """Restore after the ``with`` block the Python state that the code of ``module`` can change.

    This covers the attributes and buffers of all parts. It also covers globals, class attributes, closures, default
    arguments and plain objects that their code names, with the lists, dictionaries and sets in them. Torch generators
    return to their states. A tensor or counter of a run without values, or with other weights, must not reach the next
    run.

    ``functools.lru_cache`` caches with tensors are cleared before and after the block, because tensors with and without
    values must not mix.

    Yields:
        Pairs (container, values that it had before by key).
    """
    found = StateSearch(module)
    before = [(container, container.read()) for container in found.containers]
    held = (each for _, values in before for each in values.values())
    states = [(each, each.get_state()) for each in held if isinstance(each, Generator)]
    _clear(found.caches)
    try:
        yield before
    finally:
        for generator, state in states:
            generator.set_state(state)
        for container, values in before:
            container.restore(values)
        _clear(found.caches)


@dataclass(frozen=True)
class StateChange:
    """Difference between the current value and a snapshot.

    Attributes:
        path: Path of the value for error texts.
        container: Container of the value. None if the entries of a tensor changed.
        key: Key of the value in the container.
        tensor: Tensor whose entries changed, or None.
        steers: True if the value can decide a branch in Python. False for tensors.
    """

    path: str
    container: Container | None = None
    key: object = None
    tensor: Tensor | None = None
    steers: bool = True

    def value(self) -> object:
        """Return the current value, or the tensor whose entries changed; None if the value was removed."""
        return self.tensor if self.container is None else self.container.read().get(self.key)


class Snapshot:
    """Copy of the Python state that a search found, to compare it with the state later or to restore it.

    Args:
        references: Result of the search.
        module: Module whose own parameters and buffers are excluded. None: exclude nothing.

    Attributes:
        tensors: All tensors that the search found, as pairs (path, tensor).
    """

    def __init__(self, references: StateSearch, module: nn.Module | None = None) -> None:
        self._path = references.path
        self.tensors = references.tensors
        parts = [] if module is None else list(module.modules())
        own = {id(each) for part in parts for each in (*part._parameters.values(), *part._buffers.values())}
        buffers = {id(part._buffers): part._buffers for part in parts}
        self._held = [
            (container, container.read())
            for container in references.containers
            if not (isinstance(container, DictItems) and container.is_in(buffers))
        ]
        self._tensors = [
            (path, each, each.data, each.detach().clone(), each.grad, each.requires_grad)
            for path, each in references.tensors
            if id(each) not in own and each.is_leaf and bytes_of(each) is not None
        ]

    def changes(self) -> list[StateChange]:
        """Return the differences between the snapshot and the current state; [] if there is none."""
        found = [
            StateChange(path, tensor=each, steers=False)
            for path, each, _, values, *_ in self._tensors
            if not is_equal(each.detach(), values)
        ]
        for container, before in self._held:
            now = container.read()
            for key in {**before, **now}:
                known = key in before and key in now
                if not _is_managed(key) and not (known and is_equal(before[key], now[key])):
                    path = self._path(container, key)
                    # The list changed, not an item.
                    if not known and isinstance(container, SequenceItems | SetItems):
                        path = path.rpartition("[")[0]
                    plain = isinstance(before.get(key), _NOT_BRANCHED_ON) and isinstance(
                        now.get(key), _NOT_BRANCHED_ON
                    )
                    found.append(StateChange(path, container, key, steers=not (known and plain)))
        return found

    def restore(self) -> None:
        """Restore all values of the snapshot in place, also values and gradients of tensors."""
        for container, before in self._held:
            container.restore(before)
        for _, each, data, values, gradient, learns in self._tensors:
            each.grad = gradient
            if each.requires_grad != learns:
                each.requires_grad_(learns)
            if each.data_ptr() != data.data_ptr() or each.shape != data.shape:
                each.data = data
            if not is_equal(each.detach(), values):
                each.data.copy_(values)


def snapshot_of(module: nn.Module, loss: object) -> Snapshot:
    """Return a snapshot of the Python state that the code of a module and of a loss can change.

    The module's own parameters and buffers are left out.
    """
    # The losses of edgefl hold those of the user.
    roots = [("loss", each) for each in (loss, *getattr(loss, "__dict__", {}).values())]
    return Snapshot(StateSearch(module, roots), module)


@contextmanager
def restoring(snapshot: Snapshot) -> Iterator[None]:
    """Restore the state of ``snapshot`` after the ``with`` block."""
    try:
        yield
    finally:
        snapshot.restore()


def _is_managed(key: object) -> bool:
    """Return True if ``key`` is the name of an attribute that torch or edgefl sets, such as ``training``."""
    return isinstance(key, str) and (key == "training" or key.startswith(("edgefl_", "_flat_weight")))


def move_to_meta(held: list[Held]) -> list[tuple[Tensor, Tensor]]:
    """Replace the tensors in containers by tensors on the meta device, because operations reject mixed devices.

    Scalars stay. The caller restores the originals by :func:`restored_state`.

    Args:
        held: Pairs (container, its values by key).

    Returns:
        Pairs (new tensor, tensor that it replaces).
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def on_meta(value: object) -> object:
        if type(value) is tuple:
            parts = tuple(map(on_meta, value))
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        if not isinstance(value, Tensor) or value.is_meta or not value.dim():
            return value
        if id(value) not in moved:
            moved[id(value)] = value.detach().to("meta"), value
        return moved[id(value)][0]

    for container, values in held:
        for key, value in values.items():
            if (replaced := on_meta(value)) is not value:
                container.write(key, replaced)
    return list(moved.values())


def _clear(caches: list[LruCache[Any]]) -> None:
    """Clear the caches that contain tensors. Other caches may contain objects whose identity matters."""
    for cache in caches:
        if cache.cache_info().currsize and _has_tensor(cache):
            cache.cache_clear()


def _has_tensor(cache: LruCache[Any]) -> bool:
    """Return True if a cached result is or contains a tensor."""
    # The results are referents of a bounded cache, and values of the dictionary that is one of an unbounded cache.
    found = [each for each in gc.get_referents(cache) if each is not vars(cache)]
    for _ in range(_LEVELS):
        if any(isinstance(each, Tensor) for each in found):
            return True
        found = gc.get_referents(*(each for each in found if isinstance(each, _PLAIN)))
    return False
