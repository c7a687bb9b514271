"""Which tensor of all that a model returns is its output, and models that would keep a cache beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from edgefl.errors import ModelError

Output = str | int | None
"""A key or attribute, or a position, of what a model returns; None: ``logits``, or else its first floating tensor."""

LOGITS = "logits"


def tensor_of(returned: object, output: Output, name: str) -> Tensor:
    """The output of the model ``name`` in what its forward returned: a tensor, or a mapping, a dataclass, a tuple or a list
    of such. ModelError, with what there is, where it is not there."""
    if output is None and isinstance(returned, Tensor):
        return returned
    parts = dict(_parts(returned))
    key = LOGITS if output is None and LOGITS in parts else output
    floats = (tensor for _, tensor in _tensors(returned, "") if tensor.is_floating_point())
    found = next(floats, None) if key is None else _part(parts, key)
    if isinstance(found, Tensor):
        return found
    told = [f"{path} {_shape(tensor)}" for path, tensor in _tensors(returned, "")]
    wanted = "no floating tensor" if key is None else f"no tensor {key!r}"
    kind = "a tensor" if isinstance(returned, Tensor) else type(returned).__name__
    raise ModelError(
        f"{name} returns {wanted}; it returns {kind}"
        + (f" with {', '.join(told)}: name one of them as `output`" if told else "")
        + (": leave `output` out" if isinstance(returned, Tensor) else "")
        + (
            ""
            if told or isinstance(returned, Tensor)
            else ": return one, or leave it in a mapping or a tuple"
        ),
        output=output,
    )


@contextmanager
def giving(root: nn.Module, output: Output) -> Iterator[None]:
    """Let ``root`` return its output alone inside, behind its hooks; models that could keep a cache keep none."""
    call: Callable[..., Any] = root._call_impl

    def giving_one(*args: Any, **kwargs: Any) -> Tensor:
        return tensor_of(call(*args, **kwargs), output, type(root).__name__)

    with called_by(root, giving_one), without_cache(root):
        yield


@contextmanager
def _holding(module: nn.Module, name: str, value: object) -> Iterator[None]:
    own = {name: module.__dict__[name]} if name in module.__dict__ else {}
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]
        module.__dict__.update(own)


def called_by(module: nn.Module, call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace what a call of ``module`` runs, hooks included, inside."""
    return _holding(module, "_call_impl", call)


def calling(root: nn.Module, forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside, ``root`` runs ``forward``."""
    return _holding(root, "forward", forward)


@contextmanager
def without_cache(root: nn.Module) -> Iterator[None]:
    """Inside, no part of ``root`` has a configuration that says to keep a cache."""
    configs = {id(config): config for config in map(_caching, root.modules()) if config is not None}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def returning(root: nn.Module, output: Output) -> nn.Module:
    """``root`` as :func:`giving` has it, for good: in place."""
    kind = type(root)
    for config in filter(None, map(_caching, root.modules())):
        config.use_cache = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return tensor_of(kind._call_impl(self, *args, **kwargs), output, kind.__name__)

    # The hooks of the module run before its output is chosen.
    root.__class__ = type(kind.__name__, (kind,), {"_call_impl": call, "__module__": kind.__module__})
    return root


def _caching(module: nn.Module) -> Any:
    config = module.__dict__.get("config")
    return config if getattr(config, "use_cache", None) is True else None


def _part(parts: Mapping[str, object], key: str | int) -> object:
    if isinstance(key, str):
        return parts.get(key)
    return list(parts.values())[key] if -len(parts) <= key < len(parts) else None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What ``value`` is made of, by key, attribute or position."""
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        yield from ((str(place), part) for place, part in enumerate(value))


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(str(size) if isinstance(size, int) else 'batch' for size in tensor.shape)})"


def _tensors(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors in ``value``, in order, with where they are."""
    for key, part in _parts(value):
        inner = f"{path}.{key}" if path else key
        if isinstance(part, Tensor):
            yield inner, part
        else:
            yield from _tensors(part, inner)
