"""Parsing of TOML text, with one exception for all faults."""

from __future__ import annotations

import tomllib
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables in ``text``; raise TOMLDecodeError for all faults, long numbers and deep nesting included."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # Python converts no number of more than 4,300 digits
        raise tomllib.TOMLDecodeError("a number has thousands of digits") from error
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("lists or tables are nested too deeply") from error
