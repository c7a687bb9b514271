"""Federations as TOML text: a documented file of all keys, a file that loads as an equal federation, and differences."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.main import IncEx

from edgefl.config.federation import Federation
from edgefl.config.tables import TierTable
from edgefl.wire.limits import Limits


def document() -> str:
    """Return a TOML file of all tables and keys, each with its default and a comment that explains it.

    The text is a valid federation file.
    """
    lines: list[str] = []
    for table, field in Federation.model_fields.items():
        lines += _document_limits() if table == "limits" else _document_table(table, field.annotation)
    return "\n".join(lines) + "\n"


def _document_table(table: str, annotation: Any) -> list[str]:
    model: type[BaseModel] = TierTable if table == "tiers" else annotation
    lines = [f"# {(model.__doc__ or '').strip()}", "[tiers.strong]" if table == "tiers" else f"[{table}]"]
    for key, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        setting = f"# {key} =" if default is None else f"{key} = {_toml(default)}"
        lines.append(f"{setting}  # {field.description}")
    return [*lines, ""]


def _document_limits() -> list[str]:
    defaults = msgspec.to_builtins(Limits())
    return ["# Timeouts, sizes and limits; the reasons are in edgefl/wire/limits.py.", "[limits]"] + [
        f"{key} = {_toml(value)}" for key, value in defaults.items()
    ]


def dump(federation: Federation) -> str:
    """Return the federation as TOML, which :func:`edgefl.config.load` reads as an equal one."""
    tables = federation.model_dump()
    tiers = tables.pop("tiers")
    lines: list[str] = []
    for name, table in [*tables.items(), *((f"tiers.{_key(tier)}", table) for tier, table in tiers.items())]:
        pairs = (f"{key} = {_toml(value)}" for key, value in table.items() if value is not None)
        lines += [f"[{name}]", *pairs, ""]
    return "\n".join(lines)


def changes(before: Federation, now: Federation, but: IncEx) -> list[str]:
    """Return a text for each key that differs, such as ``federation.rounds was 40, is 400``; [] if all are equal.

    Args:
        before: The earlier federation.
        now: The later federation.
        but: Keys to ignore, as ``exclude`` of pydantic's ``model_dump``.
    """
    old, new = (by_key(each.model_dump(exclude=but)) for each in (before, now))
    return [
        f"{key} was {_toml_or_nothing(old, key)}, is {_toml_or_nothing(new, key)}"
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]


def by_key(tables: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key, such as ``{"tiers.weak.cut": 3}``.

    A mapping that is one setting, such as ``options``, stays one value. ``parent`` is a prefix of all keys.
    """
    values: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{parent}{name}"
        if isinstance(value, Mapping) and (not parent or parent == "tiers."):
            values |= by_key(value, f"{key}.")
        else:
            values[key] = value
    return values


def _key(name: str) -> str:
    """Return ``name`` as one part of a TOML key, in quotes if it has a dot."""
    return _toml(name) if "." in name else name


def _toml_or_nothing(values: Mapping[str, Any], key: str) -> str:
    return "not set" if values.get(key) is None else _toml(values[key])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables in TOML text, as nested dictionaries.

    Raises:
        TOMLDecodeError: the text is malformed, has a number that is too long, or is nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # Python converts no number of more than 4,300 digits
        raise tomllib.TOMLDecodeError("a number has thousands of digits") from error
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("lists or tables are nested too deeply") from error
