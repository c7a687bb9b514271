"""Cache key for the result of a comparison."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable
from types import MethodType
from weakref import ref

from torch import Tensor

from edgefl.comparison import torch_side
from edgefl.comparison.inputs import UserSamples
from edgefl.contract.tensors import TensorSpec
from edgefl.models.hooks import hook_ids
from edgefl.models.python_state.references import StateSearch
from edgefl.models.source import ModelSource
from edgefl.models.spec import ModelSpec


def key_of(spec: ModelSpec, source: ModelSource, data: UserSamples | None) -> object:
    """Return the cache key of a comparison. Equal keys mean that the module, its settings, loss and data give the same
    result.

    Args:
        spec: the model.
        source: the user's module, with the request that cut it. Attributes that users change are part of the key.
        data: the user's samples, or None.
    """
    request = source.request
    inputs = tuple(torch_side.inputs_of(source).items())
    parts = tuple(
        (path, id(type(part)), part.training, hook_ids(part)) for path, part in source.module.named_modules()
    )
    learns = tuple(each.requires_grad for each in source.module.parameters())
    state = tuple(
        tuple((str(key), _known(value)) for key, value in container.read().items() if not _is_own(key))
        for container in StateSearch(source.module).containers
    )
    # Losses of edgefl are equal if what they hold is. A loss of the user's may refer to the module.
    of_edgefl = type(spec.loss).__module__.startswith("edgefl.")
    loss = (type(spec.loss), *map(_known, vars(spec.loss).values() if of_edgefl else [spec.loss]))
    asked = request.cuts, request.units, request.output, request.classes, data is None
    return inputs, asked, loss, parts, learns, state


def _is_own(key: object) -> bool:
    return isinstance(key, str) and key.startswith(("edgefl_", "_flat_weight"))


def _known(value: object) -> Hashable:
    """Return a hashable key of an attribute's value. A tensor counts by shape and dtype, a list, dict or set by its
    type.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        # The bytes can be those of a large array, which the key would keep in memory.
        return type(value), hashlib.sha256(value).digest() if isinstance(value, bytes) else value
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, MethodType):  # another object each time
        return _IdentityKey(value.__self__), _IdentityKey(value.__func__)
    if isinstance(value, tuple):
        return tuple(map(_known, value))
    if isinstance(value, Tensor):  # training moves its values
        return value.shape, value.dtype
    return type(value) if isinstance(value, list | dict | set | deque) else _IdentityKey(value)


class _IdentityKey:
    """Key that compares an object by identity. A later object at the same address is not equal, if weak references exist."""

    def __init__(self, value: object) -> None:
        self._address = id(value)
        self._alive: ref[object] | None
        try:
            self._alive = ref(value)
        except TypeError:
            self._alive = None

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _IdentityKey) or self._address != other._address:
            return False
        if self._alive is None or other._alive is None:
            return self._alive is other._alive
        return self._alive() is other._alive()
