"""User-defined factories of models, algorithms and losses, addressed as ``place:function``.

The place is a module (``package.module:factory``), or a file that need not be installed (``path/to/file.py:factory``).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from edgefl.errors import ConfigError, EdgeflError, ModelError
from edgefl.models.user_code import user_errors
from edgefl.system.processes import folder_last

_loading: ContextVar[str] = ContextVar("loading", default="")
_remembered: dict[Path, bytes] = {}
_ERRORS: dict[str, type[EdgeflError]] = {"model": ModelError, "algorithm": ConfigError, "loss": ConfigError}


def factory_of(name: str, what: str) -> Callable[..., Any]:
    """Load a user's code and return the factory that ``name`` addresses.

    Args:
        name: ``package.module:factory`` or ``path/to/file.py:factory``.
        what: "model", "algorithm" or "loss", for error texts and the class of the error.

    Raises:
        ModelError: ``what`` is "model", and the module, file or factory is missing or its code fails.
        ConfigError: ``what`` is "algorithm" or "loss", and one of these is missing or its code fails.
    """
    place, _, attribute = name.rpartition(":")
    module = _module(name, place, what)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        own = [each for each, thing in vars(module).items() if _defined_by(module, thing)]
        raise _ERRORS[what](
            f"cannot load {what} {name!r}: {place} has no function {attribute!r}; it defines "
            f"{', '.join(own) or 'none'}",
            name=name,
        )
    made: Callable[..., Any] = factory
    return made


def absolute(name: str) -> str:
    """Return the address ``name`` with an absolute path if it addresses a file, so that it is valid in other processes.

    An address of a module, or a name of a catalog, is returned unchanged.
    """
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if _is_file(place) else name


def source_of(name: str, what: str) -> bytes:
    """Return the source code of the factory's file, or b"" for a module without a source file.

    Imports a module to find it.

    Args:
        name: Address of the factory.
        what: "model", "algorithm" or "loss", for error texts.

    Raises:
        ModelError: ``what`` is "model", and the file is missing or its module cannot be imported.
        ConfigError: ``what`` is "algorithm" or "loss", and the file is missing or its module cannot be imported.
    """
    place = name.rpartition(":")[0]
    if _is_file(place):
        return _read(name, place, what)
    try:
        file = inspect.getsourcefile(_module(name, place, what))
        return Path(file).read_bytes() if file else b""
    except (OSError, TypeError):  # built in, or without a source file
        return b""


def files_of(names: Iterable[str]) -> dict[Path, bytes]:
    """Return the contents of the files that the addresses ``names`` of factories name, by absolute path.

    Addresses of modules and names of catalogs are skipped.
    """
    paths = [Path(place).resolve() for name in names if _is_file(place := name.rpartition(":")[0])]
    return {path: _source(path) for path in paths}


def remember(files: Mapping[Path, bytes]) -> None:
    """Use these contents, by absolute path, instead of the files themselves, from now on in this process.

    So all parts of a run load the same code, even if the files change later.
    """
    _remembered.update(files)


@contextmanager
def importing_for(name: str) -> Iterator[None]:
    """Extend ``sys.path`` for the ``with`` block, so that the code of the factory ``name`` can import its neighbours.

    Adds the file's folder, the folder of its outermost package, and the working folder, all behind installed modules.
    """
    place = name.rpartition(":")[0]
    folders = [Path.cwd()]
    if _is_file(place):
        folder = Path(place).resolve().parent
        folders = [folder, folder.joinpath(*[".."] * len(_packages(folder))).resolve(), *folders]
    with ExitStack() as stack:
        for each in dict.fromkeys(map(str, folders)):
            stack.enter_context(folder_last(each))
        yield


def _packages(folder: Path) -> list[str]:
    """Return the names of the packages that contain the files of ``folder``, outermost first; [] if it is no package."""
    names: list[str] = []
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _source(path: Path) -> bytes:
    """Return the contents of a file: those that :func:`remember` set, else those on disk."""
    known = _remembered.get(path.resolve())
    return path.read_bytes() if known is None else known


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _read(name: str, place: str, what: str) -> bytes:
    """Return the source of the file ``place``.

    Args:
        name: Address of the factory, for the error text.
        place: Path of the file.
        what: "model", "algorithm" or "loss", which selects the class of the error.

    Raises:
        ModelError: The file cannot be read, and ``what`` is "model".
        ConfigError: The file cannot be read, and ``what`` is "algorithm" or "loss".
    """
    try:
        return _source(Path(place))
    except OSError as error:
        raise _ERRORS[what](
            f"cannot load {what} {name!r}: {Path(place).absolute()}: {error.strerror or error}; give the path of "
            "a file, from the working directory or absolute",
            name=name,
        ) from error


def _module(name: str, place: str, what: str) -> ModuleType:
    """Load the module or file that ``place`` names, and return it.

    Args:
        name: Address of the factory, for the error text.
        place: Path of a file, or name of a module.
        what: "model", "algorithm" or "loss", which selects the class of the error.

    Raises:
        ModelError: ``what`` is "model", and the module or file is missing or its code fails.
        ConfigError: ``what`` is "algorithm" or "loss", and the module or file is missing or its code fails.
    """
    source = _read(name, place, what) if _is_file(place) else b""
    try:
        with user_errors(f"cannot load {what} {name!r}"), importing_for(name):
            return (
                _load_file(Path(place).resolve(), source)
                if _is_file(place)
                else importlib.import_module(place)
            )
    except ModelError as error:
        raise _ERRORS[what](error.message, **{**error.details, "name": name}) from error


def _load_file(path: Path, source: bytes) -> ModuleType:
    """Return the module of a file. Equal contents of the same path are loaded once in a process.

    It is compiled from ``source``, because Python's cache considers a file unchanged if its size and its time in
    seconds are.
    """
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()
    name = ".".join([*_packages(path.parent), f"{path.stem}_{digest[:16]}"])  # for relative imports
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look a module up by its name
    outer = _loading.set(str(path))
    try:
        exec(loader.source_to_code(source, str(path)), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loading.reset(outer)
    return module


def refuse_while_loading(what: str) -> None:
    """Check that no user file is being loaded for its factory at the moment.

    An action at the top level of such a file would be repeated in every process that loads it.

    Args:
        what: Action in the imperative, for the error text.

    Raises:
        ConfigError: A user's file is being loaded.
    """
    if path := _loading.get():
        raise ConfigError(
            f"{path} is loaded for a factory in it, and would {what} again in every process that loads it: put that call "
            'below `if __name__ == "__main__":`',
            path=path,
        )


def _defined_by(module: ModuleType, thing: object) -> bool:
    return inspect.isfunction(thing) and thing.__module__ == module.__name__


def address_of(factory: Callable[..., Any], what: str) -> str:
    """Return the address ``/path/to/file.py:name`` of a function, with an absolute path.

    Args:
        factory: Function or class at the top level of a file.
        what: Kind of the function, such as "a model", for the error text.

    Raises:
        ConfigError: It is not at the top level of a file, so other processes could not load it.
    """
    name = getattr(factory, "__qualname__", "")
    try:
        file = inspect.getsourcefile(factory)
    except TypeError:
        file = None
    if not name.isidentifier() or file is None or not Path(file).is_file():
        raise ConfigError(
            f"{what} of your own is a function at the top level of a file, found {_short(factory)}: other processes load "
            "it from there",
            factory=repr(factory),
        )
    return f"{Path(file).resolve()}:{name}"


def _short(factory: object) -> str:
    """Return a description of an object for an error text."""
    # Not the repr of a module, which shows all of its layers.
    return repr(factory) if inspect.isfunction(factory) else f"an object of {type(factory).__name__}"
