"""Reading of federation files, with one error that lists every problem."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from edgefl.config.federation import Federation
from edgefl.config.names import name_problems
from edgefl.config.tables import TierTable
from edgefl.config.text import parse_toml
from edgefl.errors import ConfigError, DataError
from edgefl.facts import shipped
from edgefl.wire.text import similar, suggest


def load(path: Path | None, overrides: Mapping[str, object] | None = None) -> Federation:
    """Return the federation in a file. Names of models, algorithms and options are not checked (:func:`checked` does).

    Args:
        path: the TOML file; None for the defaults.
        overrides: values by dotted key that replace those of the file.

    Raises:
        ConfigError: the file is missing or unreadable, or has wrong keys or values. The text lists each key with its
            expected value.
    """
    tables = _read(path) if path else {}
    if path and path.name in _OF_FOLDERS:
        _move_trackers(tables)
    for key, value in (overrides or {}).items():
        _assign(tables, key, value)
    return parse(tables, source=str(path) if path else "the built-in defaults")


_OF_FOLDERS = ("run.toml", "config.toml")
"""Files that runs and simulations write into their folders. Those of earlier releases are read."""


def _move_trackers(tables: dict[str, Any]) -> None:
    """Move the trackers of an earlier release from the table ``simulation`` to ``tracking``."""
    simulation, tracking = tables.get("simulation"), tables.get("tracking", {})
    if isinstance(simulation, dict) and isinstance(tracking, dict):
        earlier = {key: simulation.pop(key) for key in ("tensorboard", "mlflow") if simulation.get(key)}
        tables["tracking"] = earlier | tracking


def checked(path: str | Path) -> Federation:
    """Return the federation in the file ``path``, with every name and option checked against the shipped catalogs.

    Builds no model and does not load torch.

    Raises:
        ConfigError: the file cannot be read, or keys, values, names or options are wrong. The text lists all of them.
    """
    tables = _read(Path(path))
    return parse(tables, source=str(path), problems=name_problems(tables))


def check_names(path: Path | None, overrides: Mapping[str, object]) -> Federation:
    """Return the federation in a file, after a check of keys, names, options and paths that needs no torch.

    Args:
        path: the TOML file; None for the defaults.
        overrides: values by dotted key that replace those of the file, such as options of the command line.

    Raises:
        ConfigError: the file cannot be read, or keys, values, names or options are wrong. The text lists all of them.
        DataError: a file or folder of data is missing.
    """
    tables = _read(path) if path else {}
    for key, value in overrides.items():
        _assign(tables, key, value)
    source = str(path) if path else "the command line"
    federation = parse(tables, source=source, problems=name_problems(_plain(tables)), given=overrides)
    _check_places(federation)
    return federation


def check_tiers(federation: Federation, wanted: Iterable[str]) -> None:
    """Check that each name in ``wanted`` is a tier of the federation or, if it has no tiers, a preset tier of its model.

    Raises:
        ConfigError: there is no such tier.
    """
    known = list(federation.tiers) or shipped().tiers(federation.model.name) or ["strong"]
    for name in wanted:
        if name not in known:
            raise ConfigError(
                f"no tier {name!r}; there are: {', '.join(known)}{suggest(name, known)}", tier=name
            )


def _check_places(federation: Federation) -> None:
    """Raise DataError for a file or a folder of data that is missing and that no command creates."""
    table = federation.data
    fetched = table.download or table.name in ("digits", "random", "file")
    places = {
        "data.file": table.file if table.name == "file" else "",
        "data.devices_dir": table.devices_dir,
        "data.dir": "" if fetched else table.dir,
    }
    for key, place in places.items():
        if place and not Path(place).exists():
            raise DataError(
                f"{key}: there is no file or folder {place}{similar(Path(place))}; correct the path",
                path=place,
            )


def parse(
    tables: Mapping[str, Any], *, source: str, problems: Sequence[str] = (), given: Iterable[str] = ()
) -> Federation:
    """Return the federation of plain tables.

    Args:
        tables: the tables, as in a TOML file.
        source: name of their origin, for errors.
        problems: texts of further problems to report, each of which begins with ``key: ``. A problem of a key whose
            value is refused anyway is left out.
        given: dotted keys that come from the command line. Errors about them name the command line instead of
            ``source``.

    Raises:
        ConfigError: a key or value is wrong, or ``problems`` is not empty. The text lists all of them.
    """
    refused: list[str] = []
    try:
        federation = Federation.model_validate(_plain(tables))
        lines, cause = list(problems), None
    except ValidationError as error:
        lines, cause = [_explain(problem) for problem in error.errors()], error
        refused = [_key(problem) for problem in error.errors()]
        lines += [line for line in problems if line.partition(":")[0] not in refused]
    if lines:
        blamed: dict[str, list[str]] = {}
        for line in lines:
            own = any(f"{line.partition(':')[0]}.".startswith(f"{key}.") for key in given)
            blamed.setdefault("the command line" if own else source, []).append(f"\n  - {line}")
        raise ConfigError(
            "\n".join(f"{each} cannot be used:{''.join(found)}" for each, found in blamed.items()),
            keys=[*refused, *(line.partition(":")[0] for line in lines[len(refused) :])],
        ) from cause
    return federation


def _plain(value: Any) -> Any:
    """Return a value as it would be in a TOML file: lists for tuples, text for paths, and no None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


_RENAMED = {
    "program": "algorithm",
    "simulation.tensorboard": "tracking.tensorboard",
    "simulation.mlflow": "tracking.mlflow",
}
"""Keys of earlier releases, or their last parts, and what each is called now."""


def _explain(problem: Any) -> str:
    key = _key(problem)
    if problem["type"] == "extra_forbidden" and key in _RENAMED:
        return f"{key}: it is called {_RENAMED[key]!r} now; write {_RENAMED[key]} in its place"
    if problem["type"] == "extra_forbidden" and problem["loc"][-1] in _RENAMED:
        new = _RENAMED[problem["loc"][-1]]
        return (
            f"{key}: it is called {new!r} now; write {key.removesuffix(problem['loc'][-1])}{new} in its place"
        )
    if problem["type"] == "extra_forbidden":
        known = sorted(_known_keys(problem["loc"][:-1]))
        close = suggest(str(problem["loc"][-1]), known)
        return f"{key}: unknown key; this table knows {', '.join(known)}{close}"
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        known = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{key}: {problem['msg']} (found {problem['input']!r}){suggest(problem['input'], known)}"
    text = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {text} (found {problem['input']!r})" if problem["loc"] else text


def _key(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"]) or "file"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    table: type[BaseModel] = Federation
    for part in location:
        field = table.model_fields.get(str(part))
        if str(part) == "tiers":
            table = TierTable
        elif (
            field is not None
            and isinstance(field.annotation, type)
            and issubclass(field.annotation, BaseModel)
        ):
            table = field.annotation
    return list(table.model_fields)


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no federation file {path}{similar(path)}; `edgefl validate --template` prints one"
        ) from error
    except OSError as error:
        raise ConfigError(f"the federation file {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: it is no text in UTF-8; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _assign(tables: dict[str, Any], key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {parent} is not a table")
    table[leaf] = value
