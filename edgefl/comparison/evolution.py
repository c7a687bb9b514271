"""Check that Python state that changes from call to call does not influence results. Many further calls must compute the
same operations as the third one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.comparison.conduct import SideEffects
from edgefl.comparison.random_draws import RandomDrawMode, RandomStream
from edgefl.comparison.torch_side import loss_of_batch, restored
from edgefl.contract.tensors import Tensors
from edgefl.errors import EdgeflError, ModelError
from edgefl.models.losses.loss import Loss
from edgefl.models.modes import enter_training
from edgefl.models.python_state.items import (
    IteratorPosition,
    NumpyArrayEntries,
    SequenceItems,
    SetItems,
    bytes_of,
)
from edgefl.models.python_state.snapshots import Snapshot, StateChange, restoring, snapshot_of
from edgefl.models.source import ModelSource
from edgefl.models.torch_functions.python_random import patched_generators
from edgefl.models.torch_functions.storage import memory_of

COMPARED = 3
"""Calls that were compared with torch by their numbers: the last of them is what later calls have to equal."""
CALLS, OF_TENSORS = 100, 6
"""Further calls in a row; fewer if only tensors change, because Python cannot branch on these."""
LONGER = 1000
_UNSET = re.compile("empty|resize")
_MOVES: Sequence[tuple[int, Callable[[Any], Any]]] = (
    # These calls pass a round number, as ``step % 1000 == 0`` asks for.
    (8, lambda number: 1_000 - 4),
    (8, lambda number: 1_000_000 - 4),
    (2, lambda number: number + 150),
    (2, lambda number: number + 10_000),
    (2, lambda number: number - 1_000_000),
    (2, lambda number: number / 1_000_000),
)
"""Numbers late in a long training, by those of its third step, and how many calls begin with them."""


def check_state(source: ModelSource, loss: Loss, batch: Tensors, seed: int, conduct: SideEffects) -> None:
    """Check that no state that changes from call to call influences the results of the module or its loss.

    The module runs again as often as in a short training, and then with counters set to late values of a long one.
    Calls are compared by the operations that lead to the loss and by their arguments, so a counter that is only
    logged is accepted. If the code calls functions that use state outside of Python, such as a file, this runs even
    if no changing state is known. The module's state is restored.

    Args:
        source: the module.
        loss: loss to minimise, unless the module returns its loss itself.
        batch: inputs and labels by name.
        seed: seed of the numbers that the module draws.
        conduct: side effects of the module in training by torch.

    Raises:
        ModelError: if such state influences a result.
    """
    if not conduct.changed and not conduct.outside:
        return
    module = source.module
    with (
        restoring(snapshot_of(module, loss)),
        restored(module),
        warnings.catch_warnings(),
        patched_generators(module),
    ):
        warnings.simplefilter("ignore")
        enter_training(module)
        evolution = _RepeatedCalls(source, loss, batch, seed, conduct)
        found = evolution.find_in_a_row() or evolution.find_late()
    if found is not None:
        raise state_error(module, conduct, *found)


def state_error(module: nn.Module, conduct: SideEffects, path: str, when: str) -> ModelError:
    """Return a ModelError for state that influences results.

    Args:
        module: the user's module.
        conduct: its side effects.
        path: path of the state, or the name of a function that uses state outside of Python.
        when: description of the calls that differ.
    """
    what = f"something outside, read or written by {path!r}," if path in conduct.outside else repr(path)
    return ModelError(
        f"{type(module).__name__} keeps Python state: {what} changes from call to call and decides what is computed "
        f"({when}), and a graph would have its first value in every step; expected the same computation in each call. "
        "Keep numbers in float buffers (register_buffer) and compute with tensors, or pass them as inputs",
        attribute=path,
        refused=True,
    )


class _RepeatedCalls:
    """Repeated calls of a module and its loss from the present state, to find state that changes the computed
    operations.
    """

    def __init__(
        self, source: ModelSource, loss: Loss, batch: Tensors, seed: int, conduct: SideEffects
    ) -> None:
        self._source, self._loss, self._batch, self._seed = source, loss, batch, seed
        self._numbers: dict[object, int] = {}
        self._backward = conduct.hooked
        for part in source.module.modules():
            self._backward |= bool(part._backward_hooks)
        for parameter in source.module.parameters():
            self._backward |= bool(parameter._backward_hooks)
        self._changes: list[StateChange] = []
        self._outside = conduct.outside
        self._begin = self._state()
        self._compare(conduct)
        if not all(each.steers for each in self._changes):  # now it is known which tensors change
            self._begin.restore()
            self._compare(conduct)
        self._begin = self._state()

    def _compare(self, conduct: SideEffects) -> None:
        """Call the module as many times as training by torch did.

        Record the operations of the last call, and the state that the calls changed.
        """
        self._wanted = self._call()
        first, changes = self._state(), dict[str, StateChange]()
        for _ in range(COMPARED - 1):
            self._wanted = self._call()
            changes |= {each.path: each for each in first.changes()}
        self._changes = list(changes.values()) or list(conduct.changed.values())

    def find_in_a_row(self) -> tuple[str, str] | None:
        """Make many calls in a row, and search state that changes their operations.

        Returns:
            (path of the state, text that says when the operations change), or None if they never change.
        """
        for each in self._changes:
            if isinstance(each.container, IteratorPosition) and not each.container.is_replaceable():
                return each.path, "an iterator that cannot be put back"
        steers = self._outside or any(each.steers for each in self._changes)
        other = self._first_other(CALLS if steers else OF_TENSORS)
        if not other:
            return None
        self._begin.restore()
        for _ in range(other - 1):
            self._call()
        late = {
            each.path: partial(_put, each, each.container.read()) for each in self._changes if each.container
        }
        guilty = self._guilty(late, 1) or (self._outside or [self._changes[0].path])[0]
        return guilty, f"call {COMPARED + other} is the first that computes something else"

    def find_late(self) -> tuple[str, str] | None:
        """Set changing state to values late in a long training and call again.

        Returns:
            (path of the state that changes the operations, text that says when), or None if no state does.
        """
        for calls, move in _MOVES if self._changes else ():
            moves = {each.path: partial(_move, each, move) for each in self._changes}
            self._begin.restore()
            for each in moves.values():
                each()
            # Numbers that never occur together may make the code fail, so that each is tried alone.
            if self._first_other(calls) and (guilty := self._guilty(moves, calls)):
                return guilty, "late in a long training"
        return None

    def _guilty(self, changes: Mapping[str, Callable[[], None]], calls: int) -> str | None:
        """Return the first path in ``changes`` whose function changes what the next ``calls`` calls compute; None if
        none does.

        ``changes``: by path of the state, a function that sets it to another value.
        """
        for path, change in changes.items():
            self._begin.restore()
            change()
            if self._first_other(calls, failing=False):
                return path
        return None

    def _first_other(self, calls: int, *, failing: bool = True) -> int:
        """Return the number, from 1, of the first of ``calls`` calls that computes something else, or 0 if none does.

        ``failing``: True if a call that raises an error counts as well.
        """
        for number in range(1, calls + 1):
            try:
                found = self._call()
            except EdgeflError:
                raise
            except Exception:  # such as an index that runs out
                return number if failing else 0
            if found != self._wanted:
                return number
        return 0

    def _state(self) -> Snapshot:
        return snapshot_of(self._source.module, self._loss)

    def _call(self) -> tuple[int, ...]:
        """Run the module, its loss and its hooks once.

        Return a number for the loss, each parameter and each buffer. Equal numbers mean that the same operations
        computed it.
        """
        module, labels = self._source.module, _LabelMode(self._numbers)
        for name, each in (*module.named_parameters(), *module.named_buffers(), *self._batch.items()):
            labels.name(each, name)
        for change in self._changes:
            if isinstance(value := change.value(), Tensor):
                labels.name(value, "")
        with torch.enable_grad(), labels:
            with RandomDrawMode(RandomStream(self._seed)):
                value = loss_of_batch(self._source, self._loss, self._batch)
            if self._backward or _has_functions(value):
                value.backward()
        found = [labels.of(value)]
        for each in (*module.parameters(), *module.buffers()):
            found.append(labels.of(each))
            if each.is_leaf and each.grad is not None:
                found.append(labels.of(each.grad))
                each.grad = None
        return tuple(found)


def _has_functions(value: Tensor) -> bool:
    """Return True if gradients of ``value`` involve a user's autograd function or a backward hook."""
    waiting, seen = [value.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return False


class _LabelMode(TorchDispatchMode):
    """Mode in which each tensor gets a label (a number) for the operations that compute it. Equal labels mean equal
    computations.

    The result of operations on constants is a constant, labelled by its values: a refilled cache equals the old one.

    Args:
        numbers: label by operation with its arguments; new ones are added.
    """

    def __init__(self, numbers: dict[object, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = numbers
        self._storages: dict[int, int] = {}
        self._constants: set[int] = set()
        # A storage that is gone would leave its address to another one.
        self._alive: list[Tensor] = []

    def name(self, tensor: Tensor, name: str) -> None:
        """Label the memory of ``tensor`` by ``name``, so that results are labelled by their operations on this tensor.

        A label is a number that identifies the operations that computed a tensor. If ``name`` is empty and the memory
        has no label, it is labelled by its values.
        """
        self._alive.append(tensor)
        if name:
            self._storages[memory_of(tensor)] = self._number(("name", name))
        elif memory_of(tensor) not in self._storages:
            self._hold_values(tensor)
            self._constants.discard(memory_of(tensor))

    def of(self, tensor: Tensor) -> int:
        """Return the label of ``tensor``: a number that is equal for tensors with equal values, computed by equal
        operations.

        It is made from the label of the tensor's storage, its position there, and its shape and dtype.
        """
        storage = memory_of(tensor)
        if storage not in self._storages:
            self._alive.append(tensor)
            self._hold_values(tensor)
        place = (tensor.storage_offset(), tensor.stride()) if tensor.layout == torch.strided else ()
        return self._number(
            (
                self._storages[storage],
                place,
                tensor.shape,
                tensor.dtype,
                tensor.requires_grad,
                tensor.is_conj(),
            )
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Drawing, which is on, would take part in each look at a tensor.
        with torch._C.DisableTorchFunction():
            given: list[Tensor] = []
            called = func, self._freeze(args, given), self._freeze(kwargs, given)
            written, is_set = _effects(func)
            free = is_set and all(memory_of(each) in self._constants for each in given)
            result = func(*args, **kwargs)
            changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
            for place, each in enumerate((*_tensors(changed), *_tensors(result))):
                storage = memory_of(each)
                if written or storage not in self._storages:
                    self._alive.append(each)
                    if free:
                        self._hold_values(each)
                    else:
                        self._constants.discard(storage)
                        self._storages[storage] = self._number((called, place))
        return result

    def _hold_values(self, tensor: Tensor) -> None:
        """Record that the storage of ``tensor`` is a constant. Two constants are equal if their bytes are."""
        storage = memory_of(tensor)
        whole = tensor
        if tensor.layout == torch.strided and not tensor.is_meta:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._constants.add(storage)
        self._storages[storage] = self._number(("values", hash(bytes_of(whole))))

    def _number(self, label: object) -> int:
        return self._numbers.setdefault(label, len(self._numbers))

    def _freeze(self, value: Any, tensors: list[Tensor]) -> object:
        """Return a hashable form of ``value``, an argument of an operation: each tensor in it is replaced by a number
        (its label).

        The tensors are appended to ``tensors``.
        """
        if isinstance(value, Tensor):
            tensors.append(value)
            return self.of(value)
        if isinstance(value, list | tuple):
            return tuple([self._freeze(each, tensors) for each in value])
        if isinstance(value, dict):
            return tuple([(key, self._freeze(each, tensors)) for key, each in value.items()])
        if isinstance(value, float | torch.Generator):
            value = repr(value) if isinstance(value, float) else None  # NaN differs from itself
        return type(value), value  # 1 and True are equal


@cache
def _effects(func: Any) -> tuple[list[tuple[int, str]], bool]:
    """Return the effects of an operation: ((index, name) of each argument that it writes, True if it is deterministic)."""
    written = [
        (place, each.name)
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return written, torch.Tag.nondeterministic_seeded not in func.tags and not _UNSET.search(func.__name__)


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors among the results of an operation."""
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


def _put(change: StateChange, late: Mapping[Any, Any]) -> None:
    """Set the state of ``change`` to its values in ``late``, by key of the state's container."""
    container = change.container
    if isinstance(container, NumpyArrayEntries | IteratorPosition | SequenceItems | SetItems):
        container.restore(late)
    elif container is not None and change.key in late:
        container.write(change.key, late[change.key])


def _move(change: StateChange, move: Callable[[Any], Any]) -> None:
    """Change the state of ``change`` by ``move``: a number, each number of an array or tuple, or the length of a list."""
    container = change.container
    values = {} if container is None else container.read()
    if isinstance(container, SequenceItems) and not change.path.endswith("]"):
        container.restore(dict(enumerate(islice(cycle(values.values()), LONGER))))
    elif isinstance(container, NumpyArrayEntries) and np.issubdtype(container.holder.dtype, np.number):
        with suppress(ArithmeticError):
            container.holder[...] = move(container.holder)
    elif container is not None and change.key in values:
        container.write(change.key, _moved_value(values[change.key], move))


def _moved_value(value: Any, move: Callable[[Any], Any]) -> Any:
    if type(value) is tuple:
        return tuple(_moved_value(each, move) for each in value)
    if type(value) in (int, float, Fraction, Decimal) or isinstance(value, np.number):
        with suppress(ArithmeticError, ValueError):
            return type(value)(move(value))
    return value
