"""Selection of a model's output from the value that its forward returns, such as logits besides a loss and a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from edgefl.errors import ModelError

Output = str | int | None
"""Key, attribute or position of the output in a returned value. None: ``logits`` if there is one, else the first floating
tensor."""

LOGITS = "logits"


def select_output(returned: object, output: Output, name: str) -> Tensor:
    """Return the output tensor in the value that a model's forward returned.

    Args:
        returned: Tensor, or a mapping, a dataclass, a tuple or a list with tensors.
        output: Key, attribute or position of the output. None: the tensor itself, else ``logits``, else the first
            floating tensor.
        name: Class of the model, for the error text.

    Raises:
        ModelError: There is no such tensor. The message lists the existing ones.
    """
    if output is None and isinstance(returned, Tensor):
        return returned
    parts = dict(_parts(returned))
    key = LOGITS if output is None and LOGITS in parts else output
    if key is None:
        selected: object = next(
            (each for _, each in _tensors(returned, "") if each.is_floating_point()), None
        )
    elif isinstance(key, str):
        selected = parts.get(key)
    else:
        selected = list(parts.values())[key] if -len(parts) <= key < len(parts) else None
    if isinstance(selected, Tensor):
        return selected
    known = [f"{path} {_shape(tensor)}" for path, tensor in _tensors(returned, "")]
    if isinstance(returned, Tensor):
        kind, remedy = "a tensor", ": leave `output` out"
    elif known:
        kind, remedy = type(returned).__name__, f" with {', '.join(known)}: name one of them as `output`"
    else:
        kind, remedy = type(returned).__name__, ": return one, or leave it in a mapping or a tuple"
    missing = "no floating tensor" if key is None else f"no tensor {key!r}"
    raise ModelError(f"{name} returns {missing}; it returns {kind}{remedy}", output=output)


@contextmanager
def output_only(root: nn.Module, output: Output) -> Iterator[None]:
    """Make calls of ``root`` in the ``with`` block return only its output, after its hooks ran.

    Caches of keys are disabled in the block, because they would be a second output.

    Args:
        root: Module.
        output: Selects the output.

    Raises:
        ModelError: A call returns no such tensor. Calls raise it.
    """
    call: Callable[..., Any] = root._call_impl

    def call_for_output(*args: Any, **kwargs: Any) -> Tensor:
        return select_output(call(*args, **kwargs), output, type(root).__name__)

    with replaced_call(root, call_for_output), without_cache(root):
        yield


def return_output_only(root: nn.Module, output: Output) -> nn.Module:
    """Change ``root`` in place so that all calls return only its output, after its hooks ran, and return ``root``.

    Its class becomes a subclass. Caches of keys are disabled, because they would be a second output.
    """
    kind = type(root)
    for config in filter(None, map(_caching_config, root.modules())):
        config.use_cache = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return select_output(kind._call_impl(self, *args, **kwargs), output, kind.__name__)

    # _call_impl and not forward: hooks of the module see all that it returns.
    root.__class__ = type(kind.__name__, (kind,), {"_call_impl": call, "__module__": kind.__module__})
    return root


def replaced_call(module: nn.Module, call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace the function that a call of ``module`` runs, hooks included, for the ``with`` block."""
    return _replaced_attribute(module, "_call_impl", call)


def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace the forward of ``module`` for the ``with`` block. Its hooks still run."""
    return _replaced_attribute(module, "forward", forward)


@contextmanager
def _replaced_attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Set the attribute ``name`` of ``module`` itself for the ``with`` block, and restore or delete it afterwards."""
    own = {name: module.__dict__[name]} if name in module.__dict__ else {}
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]
        module.__dict__.update(own)


@contextmanager
def without_cache(root: nn.Module) -> Iterator[None]:
    """Set ``use_cache`` of all configurations in ``root`` to False for the ``with`` block.

    A cache would be a second output.
    """
    configs = {id(config): config for config in map(_caching_config, root.modules()) if config is not None}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _caching_config(module: nn.Module) -> Any:
    """Return the configuration of ``module`` if it enables a cache of keys and values of attention, else None."""
    config = module.__dict__.get("config")
    return config if getattr(config, "use_cache", None) is True else None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield each part of ``value`` as (key, attribute or position as text, part).

    A value that is no container has no parts.
    """
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        yield from ((str(position), part) for position, part in enumerate(value))


def _tensors(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in ``value``, at any depth and in order, as (path, tensor). Paths begin with ``path``."""
    for key, part in _parts(value):
        inner = f"{path}.{key}" if path else key
        if isinstance(part, Tensor):
            yield inner, part
        else:
            yield from _tensors(part, inner)


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(str(size) if isinstance(size, int) else 'batch' for size in tensor.shape)})"
