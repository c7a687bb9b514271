"""A thing with its options in one line, for the command line: ``fedpaq:bits=3``, ``per_fedavg:mode=exact,alpha=0.03``."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from edgefl.wire.errors import ConfigError

GRAMMAR = "NAME[:KEY=VALUE,...]"
_TEXT = re.compile(r"\s*(?P<name>[^:=,\s]+)\s*(?::(?P<options>.*))?", re.DOTALL)
_OWN = re.compile(r"\s*((?:[^:]*[^:\s]\.py|[^:=,\s]+):[A-Za-z_]\w*)\s*(?::(.*))?", re.DOTALL)
"""A program of the user's own: ``package.module:factory`` or ``path/to/file.py:factory``, with or without options."""
_NEXT = re.compile(r",(?=\s*\w+\s*=)")
"""A comma that begins an option: those inside of a value are not followed by a key."""


def parse_named(text: str, what: str) -> dict[str, Any]:
    """``name`` and ``options`` of ``what`` ("codec", "program"). Values are JSON where they can be read as such, else
    strings.

    ConfigError with the grammar for anything else; whether name and options exist is for the catalog to say.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(f"cannot read the {what} {text!r}; a {what} is {GRAMMAR}", **{what: text})
    options: dict[str, Any] = {}
    for item in _NEXT.split(match["options"] or "") if match["options"] is not None else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value or key in options:
            raise ConfigError(
                f"cannot read {item.strip()!r} of the {what} {text!r}; a {what} is {GRAMMAR}", **{what: text}
            )
        options[key] = _value(value)
    return {"name": match["name"], "options": options}


def parse_program(text: str) -> dict[str, Any]:
    """Settings of a federation file's table ``program`` by dotted key, from ``name:lr=0.1,alpha=0.03``."""
    from edgefl.programs.catalog import PROGRAMS

    own_factory = None if text.partition(":")[0].strip() in PROGRAMS else _OWN.fullmatch(text)
    name, options = (own_factory[1], own_factory[2]) if own_factory else (None, None)
    program = parse_named(text if name is None else "own" if options is None else f"own:{options}", "program")
    options_by_key = {f"program.{key}": value for key, value in program["options"].items()}
    return {"program.name": name or program["name"], **options_by_key}


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
