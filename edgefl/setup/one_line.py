"""A thing with its options in one line, for the command line: ``fedpaq:bits=3``, ``per_fedavg:mode=exact,alpha=0.03``."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from edgefl.errors import ConfigError
from edgefl.facts import shipped

GRAMMAR = "NAME[:KEY=VALUE,...]"
_TEXT = re.compile(r"\s*(?P<name>[^:=,\s]+)\s*(?::(?P<options>.*))?", re.DOTALL)
_OWN = re.compile(r"\s*((?:[^:]*[^:\s]\.py|[^:=,\s]+):[A-Za-z_]\w*)\s*(?::(.*))?", re.DOTALL)
"""An algorithm or a loss of the user's own: ``package.module:factory`` or ``path/to/file.py:factory``, with options or
not."""
_NEXT = re.compile(r",(?=\s*\w+\s*=)")
"""A comma that begins an option: those inside of a value are not followed by a key."""


def parse_named(text: str, what: str) -> dict[str, Any]:
    """``name`` and ``options`` of ``what`` ("codec", "algorithm"). Values are JSON where they can be read as such, else
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


def parse_algorithm(text: str) -> dict[str, Any]:
    """Settings of a federation file's table ``algorithm`` by dotted key, from ``name:lr=0.1,alpha=0.03``."""
    algorithm = _named_or_own(text, "algorithm", shipped().algorithms)
    options_by_key = {f"algorithm.{key}": value for key, value in algorithm["options"].items()}
    return {"algorithm.name": algorithm["name"], **options_by_key}


def parse_loss(text: str) -> dict[str, Any]:
    """The table ``loss`` of a federation file, from ``huber:delta=2`` or ``path/to/file.py:function``."""
    return _named_or_own(text, "loss", shipped().losses)


def _named_or_own(text: str, what: str, known: Collection[str]) -> dict[str, Any]:
    """``name`` and ``options`` of one that is ``known``, or of one in a file of the user's own."""
    own = None if text.partition(":")[0].strip() in known else _OWN.fullmatch(text)
    if own is None:
        return parse_named(text, what)
    name, options = own.groups()
    return parse_named("own" if options is None else f"own:{options}", what) | {"name": name}


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
