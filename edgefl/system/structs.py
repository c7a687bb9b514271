"""Build a struct from objects that hold its fields."""

from __future__ import annotations

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
