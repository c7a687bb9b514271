"""Construction of structs from other objects, and digests of plain values."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def filled(kind: type[_Struct], /, *sources: object, **own: Any) -> _Struct:
    """Return a struct of type ``kind``. Each field is taken from ``own``, else from the first source with such an
    attribute.

    Raises:
        TypeError: a field without default is missing.
    """
    for name in kind.__struct_fields__:
        for source in sources:
            if name not in own and hasattr(source, name):
                own[name] = getattr(source, name)
    return kind(**own)


def digest_of(values: object) -> str:
    """Return the SHA-256 of values that JSON can express, including dataclasses, independent of the order of keys."""
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()
