"""Names of a package that are imported when they are first used.

A module of its own: every ``import edgefl`` loads it, and :mod:`edgefl.system.lazy_modules` imports twenty others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily_from(package: str, names: Collection[str], modules: Sequence[str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package``. An attribute in ``names`` is taken from the first of ``modules`` that
    has it.

    The modules are imported at the first use of such an attribute.
    """

    def attribute(name: str) -> Any:
        for module in modules if name in names else ():
            if hasattr(import_module(module), name):
                value = getattr(import_module(module), name)
                setattr(sys.modules[package], name, value)
                return value
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
        )

    return attribute


def lazily(package: str, places: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` that imports a name's module when the name is first used.

    Args:
        package: Name of the package.
        places: Exported names by module. ``Round=RoundTable`` exports ``RoundTable`` of the module as ``Round``.
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
