"""Changes of a module's tensors that no graph can represent: other memory, shape or dtype, and parameters
made in forward.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from edgefl.errors import ModelError
from edgefl.models.user_code import at_line


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors with the same storage, such as views of one tensor.

    For a tensor without a storage it is the tensor's ``id``.
    """
    with torch._C.DisableTorchFunction():
        try:
            storage = tensor.untyped_storage()
            return storage.data_ptr() or int(storage._cdata)  # an empty one has no address
        except (NotImplementedError, RuntimeError):
            return id(tensor)


def shape_error(what: str, before: Tensor, now: Tensor, at: str = "") -> ModelError:
    """Return the ModelError for a buffer whose shape or dtype changes in a step.

    Args:
        what: Kind and name of the buffer, for the error text.
        before: Buffer before the step.
        now: Buffer after the step.
        at: Location in the user's code, such as `` (at file:line)``, for the error text.
    """
    how = "shape" if now.shape != before.shape else "type"
    return ModelError(
        f"{what} changes its {how} in forward: expected {_describe(before)} in every step, found {_describe(now)}{at}; "
        "register a buffer of the final shape and type, and write its entries by copy_",
        refused=True,
    )


@contextmanager
def without_new(module: nn.Module) -> Iterator[None]:
    """Check after the ``with`` block that no parameter was added to ``module``.

    Buffers may be added, since they can be cached constants.

    Raises:
        ModelError: The block added a parameter.
    """
    before = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    try:
        yield
    finally:
        for name, _ in module.named_parameters(remove_duplicate=False):
            if name not in before:
                raise ModelError(
                    f"{type(module).__name__} makes the parameter {name!r} in forward; expected all parameters in __init__; "
                    "make it there, or use a lazy layer such as nn.LazyLinear",
                    parameter=name,
                    refused=True,
                ) from None


def _describe(tensor: Tensor) -> str:
    shape = str(tuple(size if type(size) is int else "batch" for size in tensor.shape)).replace("'", "")
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _assign(tensor: Tensor, value: Any = None, *rest: Any, **options: Any) -> Any:
    """Copy ``value`` into ``tensor``; the rule for ``tensor.data = value`` and ``tensor.set_(value)``.

    Returns ``tensor``, or NotImplemented for other arguments than one tensor.

    Raises:
        ModelError: The shape or dtype differs, or ``tensor`` requires a gradient and is no parameter or buffer.
    """
    if rest or options or not isinstance(value, Tensor):
        return NotImplemented
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise shape_error(_name_of(tensor) or "a tensor", tensor, value, at_line())
    if tensor.requires_grad and not _name_of(tensor):
        raise ModelError(
            f"expected tensors that keep the values their gradient belongs to, found new ones by .data{at_line()}; compute "
            "another tensor, such as h = h.clamp(max=1)",
            refused=True,
        )
    with torch.no_grad():
        return tensor.copy_(value.detach())


def _keeping(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of ``func``, a function that changes the shape of its first argument.

    If the first argument is a buffer or parameter whose shape would change, the rule raises ModelError. Otherwise
    torch runs the function.
    """

    def rule(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if name := _name_of(tensor):
            now = func(tensor.detach().clone(), *args, **kwargs)
            if now.shape != tensor.shape:
                raise shape_error(name, tensor, now, at_line())
        return NotImplemented

    return rule


def _name_of(tensor: Tensor) -> str:
    """Return kind and name, such as ``buffer 'mean'``, that ``tensor`` has in the innermost running module that has it.

    Return "" if it is neither a buffer nor a parameter of a running module.
    """
    for frame, _ in traceback.walk_stack(None):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            for word, named in (("buffer", module.named_buffers()), ("parameter", module.named_parameters())):
                if name := next((name for name, each in named if each is tensor), ""):
                    return f"{word} {name!r}"
    return ""


_RESHAPING = (
    Tensor.resize_, Tensor.resize_as_, Tensor.unsqueeze_, Tensor.squeeze_, Tensor.t_, Tensor.transpose_, Tensor.swapaxes_,
    Tensor.swapdims_, Tensor.as_strided_,
)  # fmt: skip
RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    Tensor.data.__set__: _assign,  # type: ignore[attr-defined]
    Tensor.set_: _assign,
    **{func: _keeping(func) for func in _RESHAPING},
}
"""Rules by torch function, in the form of :mod:`edgefl.models.torch_functions.rules`."""
