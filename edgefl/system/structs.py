"""Structs from other objects, and digests of plain values."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def filled(kind: type[_Struct], /, *sources: object, **own: Any) -> _Struct:
    """Return a struct of ``kind``. Each field comes from ``own``, otherwise from the first source with such an attribute.

    Raises:
        TypeError: a field without default is missing.
    """
    for name in kind.__struct_fields__:
        for source in sources:
            if name not in own and hasattr(source, name):
                own[name] = getattr(source, name)
    return kind(**own)


def digest_of(values: object) -> str:
    """SHA-256 of what JSON can hold, dataclasses among it, whatever the order of keys."""
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()
