"""Construction of structs from other objects, and digests of plain values."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def filled(kind: type[_Struct], /, *sources: object, **own: Any) -> _Struct:
    """Return a struct of type ``kind`` whose fields are copied from other objects.

    Each field is taken from ``own``, else from the first of ``sources`` with an attribute of that name.

    Raises:
        TypeError: If a field without default is missing.
    """
    for name in kind.__struct_fields__:
        for source in sources:
            if name not in own and hasattr(source, name):
                own[name] = getattr(source, name)
    return kind(**own)


def digest_of(values: object) -> str:
    """Return the SHA-256 (hexadecimal) of ``values`` as JSON with sorted keys. Dataclasses and structs are allowed."""
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()
