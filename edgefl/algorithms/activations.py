"""Half-precision storage of activations between the forward and the backward pass.

Rounding is part of the function: torch, the exported graphs and the simulator compute the same. The forward pass uses
exact values; gradients read the stored values::

    stored(algorithm, "float16").phases[0].function      # the same ports, half the bytes of saved activations

Rounding is not differentiated, and gradients themselves are float32, so the loss needs no scaling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from edgefl.config.tables import Activations
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, role_of
from edgefl.errors import ConfigError
from edgefl.submodels.channels.trace import plain_attention

LEAST_ENTRIES = 1 << 13
"""Number of entries below which values are not rounded: they need little memory, and many small ops take long."""

_aten = torch.ops.aten
_OF_BATCH = frozenset({"batch", "noise"})
# Views whose schema does not say so.
_SAME_MEMORY = frozenset({_aten._unsafe_view.default, _aten.reshape.default})
# Their gradients may search for the maxima again, so the forward pass must read the stored values, too.
_POOLS = frozenset({_aten.max_pool2d_with_indices.default, _aten.max_pool3d_with_indices.default})


def store_activations(algorithm: Algorithm, activations: str) -> Algorithm:
    """Return ``algorithm`` with steps that store large activations as ``activations`` between forward and backward pass.

    Args:
        algorithm: Algorithm.
        activations: ``float32``: return ``algorithm`` itself. ``float16``: numbers beyond 65,504 become infinite,
            and those below 6e-8 zero.

    Raises:
        ConfigError: ``activations`` is neither of the two.
    """
    if activations not in get_args(Activations):
        raise ConfigError(
            f"activations cannot be stored as {activations!r}; choose one of {', '.join(get_args(Activations))}",
            activations=activations,
        )
    if activations == "float32":
        return algorithm
    return replace(
        algorithm,
        phases=tuple(_store_in_phase(phase) for phase in algorithm.phases),
        opening=tuple(store_activations(each, activations) for each in algorithm.opening),
        ahead=tuple(store_activations(each, activations) for each in algorithm.ahead),
    )


def _store_in_phase(phase: Phase) -> Phase:
    shorter = {length: _store_in_function(each) for length, each in phase.shorter.items()}
    return replace(phase, function=_store_in_function(phase.function), shorter=shorter)


def _store_in_function(function: Function) -> Function:
    def fn(tensors: Tensors) -> Tensors:
        batch = [tensor for name, tensor in tensors.items() if role_of(name) in _OF_BATCH]
        with (
            plain_attention(),
            _StoredFormMode(batch),
        ):  # a fused kernel would keep other values than the graph does
            return function(tensors)

    return replace(function, fn=fn, activations="float16")


@dataclass(frozen=True)
class _SavedView:
    """Record of a view that the forward pass created: ``func`` called with the tensor ``whole`` and further arguments."""

    whole: Tensor
    func: Any
    rest: tuple[Any, ...]
    named: dict[str, Any]


class _StoredFormMode(TorchDispatchMode):
    """Dispatch mode below autograd: ops of a backward pass read values that depend on the batch after rounding to
    float16.
    """

    def __init__(self, batch: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # True: an op computed the tensor. Tensors without an entry, such as weights, depend on no batch.
        self._made: Any = WeakTensorKeyDictionary()
        self._parts: Any = WeakTensorKeyDictionary()
        self._left: Any = WeakTensorKeyDictionary()
        for tensor in batch:
            self._made[tensor] = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args, kwargs or {}
        backward = torch._C._current_graph_task_id() != -1
        positional, named = self._read(given) if backward or func in _POOLS else given
        results = func(*positional, **named)
        if not backward:
            self._note(func, given, results)
        return results

    def _read(self, value: Any) -> Any:
        """Return ``value`` (a tensor, or nested lists, tuples and dictionaries) with each tensor replaced by
        :meth:`_of`.
        """
        if isinstance(value, Tensor):
            return self._of(value)
        if isinstance(value, dict):
            return {key: self._read(item) for key, item in value.items()}
        return type(value)(map(self._read, value)) if isinstance(value, list | tuple) else value

    def _of(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` rounded to float16, in its own dtype.

        Return ``tensor`` itself if it is small, not of a float dtype, or not computed from the batch.
        """
        part = self._parts.get(tensor)
        if part is not None:  # one store for a value and all views of it
            whole = self._of(part.whole)
            return tensor if whole is part.whole else part.func(whole, *part.rest, **part.named)
        large = tensor.is_floating_point() and tensor.numel() >= LEAST_ENTRIES
        if not large or not self._made.get(tensor):
            return tensor
        if tensor not in self._left:
            half = _aten._to_copy.default(tensor, dtype=torch.float16)
            self._left[tensor] = _aten._to_copy.default(half, dtype=tensor.dtype)
        left: Tensor = self._left[tensor]
        return left

    def _note(self, func: Any, given: tuple[Any, Any], results: Any) -> None:
        """Record which ``results`` depend on the batch, and which are views of an argument.

        Args:
            func: Called op.
            given: (positional arguments, named arguments) of the call.
            results: Result of the call.
        """
        if not any(each in self._made for each in _tensors(given)):
            return
        viewed = given[0][0] if func.is_view or func in _SAME_MEMORY else None
        if isinstance(results, Tensor) and isinstance(viewed, Tensor):
            self._made[results] = self._made.get(viewed, True)
            if results is not viewed:
                self._parts[results] = _SavedView(viewed, func, given[0][1:], given[1])
            return
        for result in _tensors(results):
            self._made[result] = True


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]
