"""Modules that are imported when they are first used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import MappingProxyType, ModuleType

_LOCK = threading.Lock()
_NOTHING: Mapping[str, object] = MappingProxyType({})


class _UnloadedModule(ModuleType):
    """Placeholder for a module that is imported when an attribute is first read.

    Unlike with the standard library's ``LazyLoader``, an import alone does not load the module.
    """

    def __getattr__(self, name: str) -> object:
        with _LOCK:  # so do the packages that it is in, and what is in it
            for other, module in list(sys.modules.items()):
                if isinstance(module, _UnloadedModule) and (
                    _is_in(other, self.__name__) or _is_in(self.__name__, other)
                ):
                    del sys.modules[other]
        loaded = import_module(self.__name__)
        for child, module in _loaded_before(self.__name__):
            vars(loaded).setdefault(child, module)
        value = getattr(loaded, name)
        return _LazySearchPath(value) if name == "__path__" else value


def on_first_use(name: str, known: Mapping[str, object] = _NOTHING, alone: Sequence[str] = ()) -> None:
    """Make ``import name`` load the module only when an attribute is first read, for all importers in this process.

    Call it early in a process. It does nothing if the module is already loaded or does not exist.

    Args:
        name: Name of the module.
        known: Values of attributes that can be read without loading the module, by name.
        alone: Submodules of a package to import now without loading the package. Any other submodule loads the
            package.
    """
    spec = None if name in sys.modules else _specification(name)
    if spec is None:
        return
    if not any(isinstance(each, _LoadedModuleFinder) for each in sys.meta_path):
        sys.meta_path.insert(0, _LoadedModuleFinder())
    module = _UnloadedModule(name)
    module.__spec__, module.__file__ = spec, spec.origin or ""
    vars(module).update(known)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:  # what the import of a submodule leaves behind
        setattr(import_module(parent), child, module)
    for part in alone:
        _load_alone(module, part)


@contextmanager
def parts_alone(*packages: str) -> Iterator[None]:
    """Open a context in which submodules of ``packages`` are imported without running the packages' own code, which
    loads far more.

    The packages are loaded at their first use later, or with any other of their modules. Name the outermost package
    first.
    """
    opened = []
    for name in packages:
        on_first_use(name)
        module = sys.modules.get(name)
        if isinstance(module, _UnloadedModule) and module.__spec__ is not None:
            vars(module)["__path__"] = list(module.__spec__.submodule_search_locations or ())
            opened.append(module)
    try:
        yield
    finally:
        for module in opened:
            vars(module).pop("__path__", None)


def not_here(*names: str) -> None:
    """Let imports of the modules ``names`` fail in this process, unless they are already loaded.

    Libraries that need them optionally then start faster. Call it early in a process.
    """
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # which Python takes for one that there is not


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Open a context in which imports of the modules ``names`` fail, as if they were not installed. Loaded ones stay
    usable.
    """
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]  # Python's mark of a module that is not installed
    try:
        yield
    finally:
        for name in missing:
            sys.modules.pop(name, None)


def _load_alone(package: ModuleType, child: str) -> None:
    name = f"{package.__name__}.{child}"
    spec = _specification(name)
    if spec is None or spec.loader is None:
        return
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(package, child, module)


def _specification(name: str) -> ModuleSpec | None:
    """Return the import specification of a module that is not loaded, or None if it does not exist.

    Its package is imported for this, unless it is a placeholder of this module.
    """
    package = sys.modules.get(name.rpartition(".")[0])
    if isinstance(package, _UnloadedModule):
        assert package.__spec__ is not None
        return PathFinder.find_spec(name, package.__spec__.submodule_search_locations)
    return find_spec(name)


def _loaded_before(package: str) -> list[tuple[str, ModuleType]]:
    """Return (name, module) of the modules of a package that were loaded before the package itself."""
    parts = ((name.rpartition("."), module) for name, module in list(sys.modules.items()))
    return [(child, module) for (above, _, child), module in parts if above == package and module is not None]


def _is_in(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def is_unused(name: str) -> bool:
    """Return True if ``name`` is a placeholder made by :func:`on_first_use`, not loaded so far."""
    return isinstance(sys.modules.get(name), _UnloadedModule)


class _LazySearchPath(list[str]):
    """Search path of a lazy package, for imports of its submodules."""


class _LoadedModuleFinder(MetaPathFinder, Loader):
    """Finder that returns modules of a lazy package which were loaded together with the package.

    The import system may still be searching for such a module when the package is loaded.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not isinstance(path, _LazySearchPath) or name not in sys.modules:
            return None
        return ModuleSpec(name, self, loader_state=sys.modules[name].__spec__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification of a module that has run already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
