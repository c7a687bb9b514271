"""Entries of the catalogs in a JSON file that is read without torch, for `edgefl ls` and `edgefl validate`.

``python -m tools.facts`` writes the file anew from the catalogs themselves (`make facts`); a test compares
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

PLACE = Path(__file__).with_name("facts.json")

# Names that the types of options may contain.
_WORDS: Mapping[str, object] = {
    "Any": Any,
    "Literal": Literal,
    "Mapping": Mapping,
    "Sequence": Sequence,
    **{each.__name__: each for each in (bool, dict, float, int, list, str, tuple)},
}


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """Option of a factory: its type, as :func:`type_of` reads it."""

    type: str = "Any"


Options = dict[str, dict[str, Option]]
"""The options of each factory of a catalog, by their names."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of all catalogs. ``rows``: rows of `edgefl ls`, by its argument. ``training``: the algorithm that each codec
    requires, with default options; "" if the codec works with any."""

    rows: dict[str, list[dict[str, Any]]]
    models: Options
    losses: Options
    kinds: Options
    algorithms: Options
    optimizers: Options
    codecs: Options
    training: dict[str, str]

    def not_buffered(self, algorithm: str) -> str:
        """Return the reason why an algorithm forbids round.mode buffered; empty if it does not, or is not listed."""
        return next(
            (str(row["not_buffered"]) for row in self.rows["algorithms"] if row["name"] == algorithm), ""
        )

    def tiers(self, model: str) -> list[str]:
        """Return the names of the preset tiers of a model."""
        return [str(row["tier"]) for row in self.rows["submodels"] if row.get("model") == model]

    def units(self, model: str) -> tuple[str, ...]:
        """Return the units of a model with its default options; empty if the model is not listed."""
        return next((tuple(row["units"]) for row in self.rows["models"] if row["name"] == model), ())


@cache
def shipped() -> Facts:
    """Return the facts that are shipped with this version."""
    return msgspec.json.decode(PLACE.read_bytes(), type=Facts)


def encode(facts: Facts) -> bytes:
    """Return the content of the file."""
    return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"


@cache
def type_of(text: str) -> Any:
    """Return the type of an annotation such as ``int | None`` or ``Literal['a', 'b']``."""
    return eval(text, {"__builtins__": {}}, dict(_WORDS))  # our own file, never a user's


def problem_of(option: Option, value: object) -> str:
    """Return the reason why ``value`` does not have the option's type; "" if it does."""
    try:
        msgspec.convert(value, type_of(option.type))
    except msgspec.ValidationError as error:
        return str(error)
    return ""
