"""Check of the names and options in a federation file against the shipped catalogs, without torch or built models.

Properties that only a built model has (if it fits the data, sizes, combinations) are checked when it is built.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError
from edgefl.facts import problem_of, shipped
from edgefl.facts.combinations import WHOLE, combination_hint, works
from edgefl.system.processes import folder_last
from edgefl.wire.text import similar, suggest

_PERSONAL = "personal"  # of every algorithm
_ANY_TRAINING = ("sgd",)  # algorithms that a codec may replace by a training of its own
_PLAIN_OPTIONS = frozenset({"name", "batch", "steps", "lr", _PERSONAL})
"""Options of an algorithm that its combinations do not depend on."""
_OWN_FIELDS = frozenset({"name", _PERSONAL})


def name_problems(tables: Mapping[str, Any]) -> list[str]:
    """Return a text for every wrong name or option in the tables of a federation file; [] if all are right.

    Each text begins with the dotted key, such as ``model.name: ``. Tables and values of a wrong type are skipped, because
    the validation of types reports them.
    """
    codec = _table(tables, "codec")
    tiers = [(name, each) for name, each in _table(tables, "tiers").items() if isinstance(each, Mapping)]
    return [
        *_model(tables),
        *_loss(tables),
        *_algorithm(tables),
        *_optimizer(tables),
        *_listed("codec", "codec", _name(codec, "dense"), shipped().codecs, _table(codec, "options")),
        *(problem for tier, table in tiers for problem in _tier(f"tiers.{tier}", table, tables)),
    ]


def check_kinds(wanted: Iterable[str]) -> None:
    """Raise ConfigError if ``wanted`` contains a name that is no kind of submodel."""
    known = sorted(shipped().kinds)
    for kind in wanted:
        if kind not in known:
            raise ConfigError(
                f"no submodel kind {kind!r}; there are: {', '.join(known)}{suggest(kind, known)}", kind=kind
            )


def _model(tables: Mapping[str, Any]) -> Iterator[str]:
    table, facts = _table(tables, "model"), shipped()
    name, options = _name(table, "resnet8"), _table(table, "options")
    if is_own(name):
        yield from _factory("model", name)
        return
    if name not in facts.models:
        known = ", ".join(facts.models)
        yield f"model.name: no model {name!r}; there are: {known}, or 'file.py:factory'{suggest(name, facts.models)}"
        return
    yield from _options("model.options", f"model {name!r}", facts.models[name], options)
    if table.get("bn", "global") != "global" and "bn" not in facts.models[name]:
        yield f"model.bn: model {name!r} has no batch norm mode; remove model.bn, or choose a model that has one"
    if table.get("output") is not None:
        yield f"model.output: model {name!r} returns one tensor; remove model.output"


def _loss(tables: Mapping[str, Any]) -> Iterator[str]:
    table = _table(tables, "loss")
    name = _name(table, "")
    if is_own(name):
        yield from _factory("loss", name)
    elif name:
        yield from _listed("loss", "loss", name, shipped().losses, _table(table, "options"))


def _algorithm(tables: Mapping[str, Any]) -> Iterator[str]:
    table, facts = _table(tables, "algorithm"), shipped()
    name = _name(table, "sgd")
    options = {key: value for key, value in table.items() if key not in _OWN_FIELDS}
    if is_own(name):
        yield from _factory("algorithm", name)
        return
    if name in facts.optimizers:
        yield (
            f"algorithm.name: {name!r} is an optimizer of the server and no algorithm: set algorithm fedavg and optimizer "
            f'{name}, in a federation file [optimizer] name = "{name}"'
        )
        return
    if name not in facts.algorithms:
        known = ", ".join(facts.algorithms)
        yield (
            f"algorithm.name: no algorithm {name!r}; there are: {known}, 'package.module:factory' or "
            f"'path/to/file.py:factory'"
            f"{suggest(name, facts.algorithms)}"
        )
        return
    codec = _name(_table(tables, "codec"), "dense")
    training = facts.training.get(codec, "")
    yield from _combinations(training if name in _ANY_TRAINING and training else name, tables)
    accepted = facts.algorithms[name] | facts.algorithms.get(training, {})
    yield from _options("algorithm", f"algorithm {training or name!r}", accepted, options)


def _combinations(algorithm: str, tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error text for each chosen codec, optimizer, round mode or kind of tier that cannot be combined with
    the catalog algorithm ``algorithm``.

    Choices with options of their own are skipped, since options can change the answer.
    """
    if _table(tables, "algorithm").keys() - _PLAIN_OPTIONS:
        return
    chosen = {"codec": (_table(tables, "codec"), "dense"), "optimizer": (_table(tables, "optimizer"), "none")}
    for part, (table, default) in chosen.items():
        name = _name(table, default)
        if name in getattr(shipped(), f"{part}s") and not table.get("options"):
            yield from _combination_problem(f"{part}.name", algorithm, part, name)
    if _table(tables, "round").get("mode") == "buffered":
        yield from _combination_problem("round.mode", algorithm, "mode", "buffered")
    for tier, table in _table(tables, "tiers").items():
        if isinstance(table, Mapping) and not table.get("options") and table.get("gamma") != 1:
            kind = _name(table, "output_side", "kind")
            frozen = kind == "output_side" and table.get("cut", 0) != 0
            if kind in shipped().kinds:
                label = kind if frozen or kind != "output_side" else WHOLE
                yield from _combination_problem(f"tiers.{tier}.kind", algorithm, "kind", label)


def _combination_problem(key: str, algorithm: str, part: str, value: str) -> Iterator[str]:
    """Yield a text, which begins with ``key``, if the catalog algorithm cannot be combined with ``value``.

    Args:
        key: Dotted key of the value in the file.
        algorithm: Name of the algorithm.
        part: Kind of the value: ``codec``, ``optimizer``, ``mode`` or ``kind``.
        value: Name of the codec, optimizer, round mode or submodel kind.
    """
    if not works(algorithm, part, value):
        why = shipped().not_buffered(algorithm) if part == "mode" else ""
        hint = combination_hint(algorithm=algorithm, **{part: value})
        yield f"{key}: {value!r} does not go with algorithm {algorithm!r}{f': {why}' if why else ''} ({hint})"


def _optimizer(tables: Mapping[str, Any]) -> Iterator[str]:
    table, facts = _table(tables, "optimizer"), shipped()
    name, options = _name(table, "none"), _table(table, "options")
    if name == "none":
        if options:
            yield f"optimizer.options: optimizer 'none' takes no options, found {', '.join(options)}; choose an optimizer"
        return
    yield from _listed("optimizer", "optimizer", name, {"none": {}, **facts.optimizers}, options)


def _tier(key: str, table: Mapping[str, Any], tables: Mapping[str, Any]) -> Iterator[str]:
    kinds = shipped().kinds
    kind = _name(table, "output_side", "kind")
    if kind not in kinds:
        yield f"{key}.kind: no submodel kind {kind!r}; there are: {', '.join(sorted(kinds))}{suggest(kind, kinds)}"
        return
    what = f"submodel kind {kind!r}"
    yield from _options(f"{key}.options", what, kinds[kind], _table(table, "options"))
    if "gamma" in table and "gamma" not in kinds[kind]:
        yield f"{key}.gamma: {what} has no option 'gamma'; it takes {', '.join(kinds[kind])}"
    if kind == "output_side":
        yield from _cut(key, table, tables)


def _cut(key: str, table: Mapping[str, Any], tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each wrong ``cut`` or ``chunks`` in a tier's ``table``. ``key`` is the dotted key of that table.

    Checks only catalog models with default options, because only their units are known without building the model.
    """
    model = _table(tables, "model")
    units = () if _table(model, "options") else shipped().units(_name(model, "resnet8"))
    cut, chunks = table.get("cut", 0), table.get("chunks", 1)
    if not units or not isinstance(cut, int):
        return
    if not 0 <= cut < len(units):
        names = ", ".join(units)
        yield f"{key}.cut: a cut of {_name(model, 'resnet8')} lies in 0..{len(units) - 1} (its units: {names}); found {cut}"
    elif isinstance(chunks, list) and all(isinstance(group, list) for group in chunks):
        listed = [name for group in chunks for name in group]
        if listed != list(units[:cut]) or not all(chunks):
            yield f"{key}.chunks: the chunks of cut {cut} must list the units {list(units[:cut])} in order, found {chunks}"


def _listed(
    key: str, what: str, name: str, catalog: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[str]:
    if name not in catalog:
        yield f"{key}.name: no {what} {name!r}; there are: {', '.join(catalog)}{suggest(name, catalog)}"
    else:
        yield from _options(f"{key}.options", f"{what} {name!r}", catalog[name], options)


def _options(key: str, what: str, accepted: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if name not in accepted:
            yield f"{key}.{name}: {what} has no option {name!r}; it takes {', '.join(accepted)}{suggest(name, accepted)}"
        elif problem := problem_of(accepted[name], value):
            yield f"{key}.{name}: {problem} (found {value!r})"


def _factory(what: str, name: str) -> Iterator[str]:
    """Yield a text for each reason why the user's own factory ``name`` cannot exist, without importing it.

    Args:
        what: Table of the file: ``model``, ``loss`` or ``algorithm``.
        name: ``file.py:factory`` or ``package.module:factory``.
    """
    place, factory = name.rpartition(":")[::2] if ":" in name else (name, "")
    if problems := [*_missing(what, place)]:
        yield from problems
        return
    try:
        names = defined_names(place)
    except SyntaxError as error:
        line = f" (line {error.lineno})" if error.lineno else ""
        yield f"{what}.name: {place} is no Python code: {error.msg}{line}"
        return
    known = [each for each in (names[0] if names else ()) if not each.startswith("_")]
    there = f"; it defines {', '.join(known)}{suggest(factory, known)}" if known else ""
    if not factory:
        yield f"{what}.name: name the factory too, such as {place}:{known[0] if known else 'make'}{there}"
    elif names and factory not in names[0] and factory not in names[1]:
        yield f"{what}.name: {place} has no function {factory!r}{there or '; it defines none'}"


def _missing(what: str, place: str) -> Iterator[str]:
    """Yield a text if the file or module ``place`` of the user's own code is missing, or is no Python file."""
    if not place.endswith(".py") and Path(place).is_file():
        yield f"{what}.name: {place} is no file of Python code; name one that ends in .py"
    elif not place.endswith(".py"):
        yield from _missing_module(f"{what}.name", what, place)
    elif not Path(place).is_file():
        yield (
            f"{what}.name: there is no file {place}{similar(Path(place))}; give its path from the working directory, or "
            "absolute"
        )


def _missing_module(key: str, what: str, module: str) -> Iterator[str]:
    """Yield a text if the top-level package of ``module`` is missing. Only an import could check the modules inside."""
    top = module.partition(".")[0]
    try:
        with folder_last(os.getcwd()):
            missing = find_spec(top) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        yield f"{key}: there is no module {top!r} for the {what}; install it, or put its folder on PYTHONPATH"


def _table(tables: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = tables.get(key, {})
    return value if isinstance(value, Mapping) else {}


def _name(table: Mapping[str, Any], default: str, key: str = "name") -> str:
    value = table.get(key, default)
    return value if isinstance(value, str) else default


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DYNAMIC = frozenset({"globals", "vars", "locals", "exec", "eval", "setattr", "__getattr__"})
"""With these names a module can get attributes that its text does not show."""


def is_own(name: str) -> bool:
    """Return True if ``name`` names the user's own code (``place:factory``, or a path ending in .py), not an entry of
    a catalog.
    """
    return name.rpartition(":")[0] != "" or name.endswith(".py")


def defined_names(place: str) -> tuple[list[str], set[str]] | None:
    """Return the names at the top level of a Python file or module, found without importing it.

    Args:
        place: ``path/to/file.py`` or ``package.module``.

    Returns:
        (names that it defines, in order; names that it imports). None if only an import can find them: the source is
        missing or unreadable, or has ``import *``, ``global``, ``exec`` or similar.

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
    """Return the source file of ``file.py`` or ``package.module``, or None if there is none.

    Imports nothing. A path that ends in .py is returned without a check that it exists.
    """
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
