"""Names of factories in Python files, found without running them."""

from __future__ import annotations

import ast
import os
from importlib.util import find_spec
from pathlib import Path

from edgefl.system.processes import folder_last

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DYNAMIC = frozenset({"globals", "vars", "locals", "exec", "eval", "setattr", "__getattr__"})
"""With these names a module can get attributes that its text does not show."""


def is_own(name: str) -> bool:
    """Return True if ``name`` is a factory or a Python file, and not an entry of a catalog."""
    return name.rpartition(":")[0] != "" or name.endswith(".py")


def defined_names(place: str) -> tuple[list[str], set[str]] | None:
    """Return the names that a file or a module defines, and those that it imports. None if only an import shows them.

    Raises:
        SyntaxError: The file is no Python code.
    """
    path = _source_file(place)
    try:
        tree = ast.parse(path.read_bytes()) if path else None
    except (OSError, RecursionError, MemoryError):
        tree = None
    except ValueError as error:  # zeros in the file; a SyntaxError from Python 3.12 on
        raise SyntaxError(str(error)) from error
    if tree is None or any(map(_is_dynamic, ast.walk(tree))):
        return None
    definitions = [node.name for node in tree.body if isinstance(node, _DEFINITIONS)]
    others = [node for node in tree.body if not isinstance(node, _DEFINITIONS)]
    nodes = [node for statement in others for node in ast.walk(statement)]
    bound = [name for node in nodes if (name := _bound(node))]
    aliases = [node for node in nodes if isinstance(node, ast.alias)]
    imported = {node.asname or node.name.partition(".")[0] for node in aliases}
    return list(dict.fromkeys([*definitions, *bound])), imported


def _bound(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else ""
    return node.name if isinstance(node, _DEFINITIONS) else ""


def _is_dynamic(node: ast.AST) -> bool:
    if isinstance(node, ast.alias):
        return node.name == "*"
    if isinstance(node, ast.Name):
        return node.id in _DYNAMIC
    return isinstance(node, ast.Global) or (isinstance(node, _DEFINITIONS) and node.name in _DYNAMIC)


def _source_file(place: str) -> Path | None:
    """Return the source file of ``file.py`` or ``package.module``. Imports nothing; None if there is no such file."""
    if place.endswith(".py"):
        return Path(place)
    top, *rest = place.split(".")
    try:
        with folder_last(os.getcwd()):
            spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not (rest or spec.origin):
        return None
    if not rest:
        return Path(spec.origin or "")
    folders = [Path(each, *rest) for each in spec.submodule_search_locations or ()]
    files = [file for each in folders for file in (each / "__init__.py", each.with_name(f"{each.name}.py"))]
    return next((file for file in files if file.is_file()), None)
