"""A codec in one line, for the command line: ``fedpaq:bits=3`` or ``fedbat:rho=6,alpha_range=[0.001,1]``."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from edgefl.wire.errors import ConfigError

GRAMMAR = "NAME[:KEY=VALUE,...]"
_TEXT = re.compile(r"\s*(?P<name>[^:=,\s]+)\s*(?::(?P<options>.*))?", re.DOTALL)
_NEXT = re.compile(r",(?=\s*\w+\s*=)")
"""A comma that begins an option: those inside of a value are not followed by a key."""


def parse_codec(text: str) -> dict[str, Any]:
    """The federation file's table ``codec``. Values are JSON where they can be read as such, else strings.

    ConfigError with the grammar for anything else; whether codec and options exist is for the catalog to say.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ConfigError(f"cannot read the codec {text!r}; a codec is {GRAMMAR}", codec=text)
    options: dict[str, Any] = {}
    for item in _NEXT.split(found["options"] or "") if found["options"] is not None else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value or key in options:
            raise ConfigError(
                f"cannot read {item.strip()!r} of the codec {text!r}; a codec is {GRAMMAR}", codec=text
            )
        options[key] = _value(value)
    return {"name": found["name"], "options": options}


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
