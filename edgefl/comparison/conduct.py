"""What the code of a module does beside computing: it writes weights, switches gradients, keeps Python state."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgefl.comparison.torch_side import Trained, restored, train
from edgefl.contract.tensors import Tensors
from edgefl.models.draws.known import writes
from edgefl.models.losses.loss import Loss
from edgefl.models.references import References
from edgefl.models.source import Source
from edgefl.models.spaces import DictSpace, SequenceSpace, Space
from edgefl.models.user_code import place
from edgefl.wire.errors import ModelError
from exporters.capture.instead import instead_of

LATER = (10, 100, 1000, 1_000_000)
"""Values of a counter in a long training."""
_TOGGLED = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_REPLACED = Tensor.data.__set__  # type: ignore[attr-defined]


class Conduct(TorchFunctionMode):
    """Observer of the forward pass of ``module``.

    Attributes:
        changed: Python values that changed in the first pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._names = {_memory(each): name for name, each in module.named_parameters()}
        self._parameters = {name: id(each) for name, each in module.named_parameters(remove_duplicate=False)}
        self._problems: list[str] = []
        self._seen = False
        self.changed: list[StateChange] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the backward hooks of the module inside."""
        watched: list[tuple[dict[int, Any], int, Any]] = []
        for path, part in self._module.named_modules():
            for hooks in (part._backward_hooks, part._backward_pre_hooks):
                for key, hook in list(hooks.items()):
                    watched.append((hooks, key, hook))
                    hooks[key] = _ObservedHook(hook, path or type(part).__name__, self._note)
        try:
            yield
        finally:
            for hooks, key, hook in watched:
                hooks[key] = hook

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the forward pass inside."""
        spaces = [] if self._seen else References(self._module).spaces
        before = [_comparable(space.read()) for space in spaces]
        with self:
            yield
        self._seen = True
        after = dict(self._module.named_parameters(remove_duplicate=False))
        for name, known in self._parameters.items():
            if name not in after or id(after[name]) != known:
                self._note(f"it replaces the parameter {name!r} in forward", _WRITE)
        for space, known_values in zip(spaces, before, strict=True):
            values = space.read()
            now = _comparable(values)
            self.changed += [
                StateChange(
                    _label(self._module, space, key),
                    space,
                    key,
                    values,
                    isinstance(space, SequenceSpace) and key not in known_values,
                )
                for key in now
                if key not in known_values or known_values[key] != now[key]
            ]

    def check(self) -> None:
        """Raise ModelError for what no training graph can do."""
        if self._problems:
            raise ModelError(
                f"{type(self._module).__name__} cannot be trained as torch would train it: {self._problems[0]}",
                problems=tuple(self._problems),
                refused=True,
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _TOGGLED and isinstance(args[0], nn.Parameter):
            wanted = bool(args[1]) if len(args) > 1 else bool(kwargs.get("requires_grad", True))
            if wanted != args[0].requires_grad:
                known = self._names.get(_memory(args[0]), "a parameter")
                self._note(f"it switches requires_grad of {known!r} in forward{place()}", _TOGGLE)
        elif func == _REPLACED or (name != "__set__" and writes(name, kwargs)):
            for each in _written(args, kwargs):
                if _memory(each) in self._names:
                    known = self._names[_memory(each)]
                    remedy = instead_of(f"aten.{name}", _WRITE) if name.endswith("_") else _WRITE
                    self._note(f"it writes the parameter {known!r} in forward{place()}", remedy)
        return func(*args, **kwargs)

    def _note(self, what: str, remedy: str) -> None:
        problem = f"{what}; {remedy}"
        if problem not in self._problems:
            self._problems.append(problem)


_WRITE = (
    "expected weights that only the optimizer moves; keep what is written in a buffer, or compute what is used from the "
    "weight (such as weight.clamp(-1, 1)) and leave the weight as it is"
)
_TOGGLE = "expected a fixed choice; call requires_grad_ before the model is compiled, or detach() the result in forward"
_HOOK = "expected hooks that only observe; change the gradient of a parameter by register_hook, or of a tensor in forward"


class _ObservedHook:
    """Backward hook that reports whether it returned a gradient."""

    def __init__(self, hook: Callable[..., Any], path: str, note: Callable[[str, str], None]) -> None:
        self._hook, self._path, self._note = hook, path, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._hook(*args, **kwargs)
        if result is not None:
            self._note(f"a backward hook of {self._path!r} returns a gradient", _HOOK)
        return result


@dataclass(frozen=True)
class StateChange:
    """A Python value that a forward pass changed.

    Attributes:
        name: what people know it by.
        space: where it is kept.
        key: its key there.
        values: all values of the space after the pass.
        grew: True for a new item of a list.
    """

    name: str
    space: Space
    key: object
    values: Mapping[Any, Any]
    grew: bool = False


class _Other:
    """Stands for a value that is compared by nothing, such as a tensor."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other)

    __hash__ = object.__hash__


def _comparable(values: Mapping[Any, Any]) -> dict[Any, object]:
    """Return the Python values of a space as they can be compared later."""
    return {
        key: _frozen(value)
        for key, value in values.items()
        if key != "training" and not (isinstance(key, str) and key.startswith(("edgefl_", "_flat_weight")))
    }


def _frozen(value: object, depth: int = 3) -> object:
    if isinstance(value, float) and math.isnan(value):
        return "nan"  # which differs from itself
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, list | tuple | deque | set) and depth:
        return (type(value).__name__, *(_frozen(each, depth - 1) for each in value))
    if isinstance(value, dict) and depth:
        return ("dict", *((str(key), _frozen(each, depth - 1)) for key, each in value.items()))
    return _Other()


def _label(module: nn.Module, space: Space, key: object) -> str:
    for path, part in module.named_modules():
        if isinstance(space, DictSpace) and space.is_of(part.__dict__):
            return f"{path}.{key}" if path else str(key)
    return str(key) or "a variable of a closure"


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            # Nothing is written into an empty one.
            return int(tensor.untyped_storage().data_ptr()) or id(tensor)
        except (NotImplementedError, RuntimeError):
            return id(tensor)


def _written(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Return the arguments that a function of torch may write into: the first, a list of them, and ``out``."""
    for each in (*args[:1], kwargs.get("out")):
        yield from (
            part for part in (each if isinstance(each, list | tuple) else (each,)) if isinstance(part, Tensor)
        )


def check_state(source: Source, loss: Loss, batch: Tensors, seed: int, conduct: Conduct) -> None:
    """Raise ModelError if a Python value that changes from call to call decides what the module computes.

    Torch trains it again for a step with all values as they are after one call, with each number at several larger values,
    and with each list that grew at several lengths. A counter that is only logged changes nothing.

    Args:
        source: the module.
        loss: what to minimise, unless the module returns its loss itself.
        batch: inputs and labels by name.
        seed: of the numbers that the module draws.
        conduct: what the module did in a training pass.
    """
    wanted = _trained_with((), source, loss, batch, seed) if conduct.changed else None
    for changes in _later(conduct.changed):
        if wanted is None or not _is_same(wanted, _trained_with(changes, source, loss, batch, seed)):
            name = changes[0].name
            raise ModelError(
                f"{type(source.module).__name__} keeps Python state: {name!r} changes from call to call and decides what is "
                "computed, and a graph would have its first value in every step; expected the same computation in each "
                "call. Keep the number in a float buffer (register_buffer) and compute with tensors, or pass it as an input",
                attribute=name,
                refused=True,
            )


def _later(changes: Sequence[StateChange]) -> Iterator[Sequence[StateChange]]:
    """Return what to change together: all values after one call, then one number or one list after many calls."""
    if changes:
        yield changes
    for each in changes:
        value = each.values[each.key]
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield from (
                [replace(each, values={**each.values, each.key: type(value)(late)})] for late in LATER
            )
        if each.grew and each.key == max(each.values):
            items = list(each.values.values())
            yield from (
                [replace(each, values=dict(enumerate(islice(cycle(items), late))))] for late in LATER[:-1]
            )


def _trained_with(
    changes: Sequence[StateChange], source: Source, loss: Loss, batch: Tensors, seed: int
) -> Trained | None:
    """Train for one step by torch with changed values; None if the module fails."""
    with restored(source.module):
        for each in changes:
            each.space.restore(each.values)
        try:
            return train(source, loss, [batch], seed, rate=0.1)
        except Exception:  # an index that runs out, or a tensor of a step that is over
            return None


def _is_same(one: Trained, other: Trained | None) -> bool:
    """Return True if two runs of the same code on the same numbers give the same, up to rounding."""
    if other is None or one.gradients.keys() != other.gradients.keys():
        return False
    pairs = [(torch.tensor(one.losses), torch.tensor(other.losses))]
    pairs += [(each, other.gradients[name]) for name, each in one.gradients.items()]
    if one.output is not None and other.output is not None:
        pairs.append((one.output, other.output))
    return all(
        a.shape == b.shape
        and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max()), equal_nan=True)
        for a, b in pairs
        if a.numel()
    )
