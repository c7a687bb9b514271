"""Support for ``torch.autograd.Function``, which defines its own gradient.

``torch.func`` only differentiates functions that separate ``forward`` and ``setup_context``. A function of the older
form, ``forward(ctx, ...)``, gets a subclass of the newer form: its ``forward`` runs once for the values, and once more
for the tensors that it saves. Checkpointing becomes a plain call, because the compiler chooses the tensors to keep for
the backward pass.
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

from edgefl.models.torch_functions.patches import ThreadPatch

Kind = type[Function]
Observer = Callable[[Kind, tuple[Any, ...]], Any]
"""Function (class, arguments) that replaces the call of an autograd function and returns its result."""

_original: Any = Function.__dict__["apply"]
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def differentiable(observer: Observer | None = None) -> Iterator[None]:
    """Make autograd functions of the older form differentiable by ``torch.func`` for the ``with`` block.

    Functions with checkpointing are run as plain calls.

    Args:
        observer: Replaces calls of autograd functions in this thread, except torch's own and calls by the observer
            itself.
    """
    token = _observer.set(observer)
    try:
        with _patch():
            yield
    finally:
        _observer.reset(token)


class FunctionLayer(nn.Module):
    """Layer that calls an autograd function."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *args: Any) -> Any:
        return self.kind.apply(*args)


def _apply(kind: Kind, *args: Any, **kwargs: Any) -> Any:
    """Apply the autograd function ``kind``; the replacement of ``Function.apply``.

    Checkpointing becomes a plain call. If an observer is set, it handles the user's functions. Under ``torch.func``, a
    function of the older form is replaced by its subclass in the newer form.
    """
    if kind is checkpoint.CheckpointFunction:
        run, _preserve_rng_state, *inputs = args
        return run(*inputs)
    if kwargs:  # only the newer form accepts these
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
    """Run the checkpointed function ``fn`` without saving anything; the replacement of torch's generator of checkpointing.

    The caller runs ``fn`` between the two steps of this generator.
    """
    with context_fn()[0]:
        yield


_patch = ThreadPatch()
_patch.replace(Function, "apply", classmethod(_apply))
_patch.replace_function(checkpoint, "_checkpoint_without_reentrant_generator", _uncheckpointed)


class _EmptyContext:
    """Context of an autograd function that discards what the function saves."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *tensors: Any) -> None: ...
    def save_for_forward(self, *tensors: Any) -> None: ...
    def mark_dirty(self, *tensors: Any) -> None: ...
    def mark_non_differentiable(self, *tensors: Any) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


@functools.cache
def _twin(kind: Kind) -> Kind:
    """Return a subclass of ``kind``, an autograd function of the older form, that computes the same in the newer form.

    The older form saves tensors in ``forward(ctx, ...)``, the newer one in a separate ``setup_context``.
    """

    def forward(*args: Any) -> Any:
        return kind.forward(_EmptyContext(len(args)), *args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        with torch.no_grad():
            kind.forward(ctx, *inputs)

    parts = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "generate_vmap_rule": True,
    }
    return type(kind.__name__, (kind,), parts)
