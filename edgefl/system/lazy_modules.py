"""Modules that a library imports and this process most often does not use."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_LOCK = threading.Lock()


class _Unused(ModuleType):
    """Stands for a module until somebody reads an attribute of it, and then gives what the module itself gives.

    Not the standard library's ``LazyLoader``: its module loads as soon as anybody imports it.
    """

    def __getattr__(self, name: str) -> object:
        with _LOCK:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def on_first_use(name: str) -> None:
    """Let ``import name`` cost nothing until it is used, for every importer in this process: to be called by what starts the
    process. Nothing happens where the module is loaded already, or unknown."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None:
        return
    module = _Unused(name)
    module.__spec__ = spec
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:  # what the import of a submodule leaves behind
        setattr(import_module(parent), child, module)
