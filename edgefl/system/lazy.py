"""Names of a package that are imported when they are first used: a device's half needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, places: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``.

    Args:
        package: its name.
        places: names by the module that each comes from; ``Round=RoundTable`` for one that has another name there.
    """
    found = {
        name.partition("=")[0]: (place, name.rpartition("=")[2])
        for place, names in places.items()
        for name in names
    }

    def attribute(name: str) -> Any:
        if name not in found:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
            )
        place, inside = found[name]
        value = getattr(import_module(place), inside)
        setattr(sys.modules[package], name, value)
        return value

    return attribute
