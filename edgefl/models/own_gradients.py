"""Functions that bring gradients of their own: ``torch.autograd.Function``, as people write it.

``torch.func`` differentiates those alone that keep ``forward`` and ``setup_context`` apart. One of the older form,
``forward(ctx, ...)``, gets a twin that does: its ``forward`` runs once for the values, and once more for what it saves.
Checkpointing is a plain call: what is kept for the backward pass is the compiler's to choose.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.utils import checkpoint

from edgefl.models.swapped import Swap, heeding

Kind = type[Function]
Observer = Callable[[Kind, tuple[Any, ...]], Any]
"""What stands in place of a call of such a function: given its class and its arguments."""

_original: Any = Function.__dict__["apply"]
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def differentiable(observer: Observer | None = None) -> Iterator[None]:
    """Inside, ``torch.func`` differentiates functions of the older form too. ``observer``: called in place of each function
    of this thread that is not torch's own, unless it calls one itself."""
    token = _observer.set(observer)
    try:
        with _ours():
            yield
    finally:
        _observer.reset(token)


class Applied(nn.Module):
    """A call of such a function, as a layer."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *args: Any) -> Any:
        return self.kind.apply(*args)


def _apply(kind: Kind, *args: Any, **kwargs: Any) -> Any:
    if kind is checkpoint.CheckpointFunction:
        run, _keeps_random_state, *given = args
        return run(*given)
    if kwargs:  # which those of the newer form may be given
        args = inspect.signature(kind.forward).bind(*args, **kwargs).args
    observer = _observer.get()
    if observer is not None and not kind.__module__.startswith("torch."):
        token = _observer.set(None)
        try:
            return observer(kind, args)
        finally:
            _observer.reset(token)
    if torch._C._are_functorch_transforms_active() and kind.setup_context is Function.setup_context:
        kind = _twin(kind)
    return _original.__get__(None, kind)(*args)


def _uncheckpointed(
    fn: Callable[..., Any],
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = checkpoint.noop_context_fn,
    *others: Any,
    **named: Any,
) -> Iterator[None]:
    """Checkpointing without recomputation: the caller runs ``fn`` between the steps of the iterator."""
    with context_fn()[0]:
        yield


_CHECKPOINTING = "_checkpoint_without_reentrant_generator"
_checkpointing: Any = getattr(checkpoint, _CHECKPOINTING)
_ours: Swap = Swap(
    (Function, "apply", classmethod(_apply)),
    (checkpoint, _CHECKPOINTING, heeding(lambda: _ours, _checkpointing, _uncheckpointed)),
)


class _Unheard:
    """A context that keeps nothing."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *tensors: Any) -> None: ...
    def save_for_forward(self, *tensors: Any) -> None: ...
    def mark_dirty(self, *tensors: Any) -> None: ...
    def mark_non_differentiable(self, *tensors: Any) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


@functools.cache
def _twin(kind: Kind) -> Kind:
    """``kind`` in the newer form."""

    def forward(*args: Any) -> Any:
        return kind.forward(_Unheard(len(args)), *args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        with torch.no_grad():
            kind.forward(ctx, *inputs)

    parts = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "generate_vmap_rule": True,
    }
    return type(kind.__name__, (kind,), parts)
