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


class FactoryOption(msgspec.Struct, frozen=True, kw_only=True):
    """Option of a factory in a catalog. ``type`` is the source text of its annotation, which :func:`type_of` evaluates."""

    type: str = "Any"


Options = dict[str, dict[str, FactoryOption]]
"""The options of each factory of a catalog, by their names."""


class CatalogFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of all catalogs.

    Attributes:
        rows: Rows that `edgefl ls` prints, by the command's argument, such as ``models``.
        models: Options of each model's factory, by name of the model and of the option.
        losses: Options of each loss, by name of the loss and of the option.
        kinds: Options of each kind of submodel, by name of the kind and of the option.
        algorithms: Options of each algorithm, by name of the algorithm and of the option.
        optimizers: Options of each server optimizer, by name of the optimizer and of the option.
        codecs: Options of each codec, by name of the codec and of the option.
        training: Name of the algorithm that each codec requires, by name of the codec; "" if it works with any.
    """

    rows: dict[str, list[dict[str, Any]]]
    models: Options
    losses: Options
    kinds: Options
    algorithms: Options
    optimizers: Options
    codecs: Options
    training: dict[str, str]

    def not_buffered(self, algorithm: str) -> str:
        """Return the reason why an algorithm forbids ``round.mode buffered``.

        Return "" if it allows the mode, or is not listed.
        """
        return next(
            (str(row["not_buffered"]) for row in self.rows["algorithms"] if row["name"] == algorithm), ""
        )

    def tiers(self, model: str) -> list[str]:
        """Return the names of the preset tiers of a catalog model; [] if it has none or is not listed."""
        return [str(row["tier"]) for row in self.rows["submodels"] if row.get("model") == model]

    def units(self, model: str) -> tuple[str, ...]:
        """Return the names of the units (stages) of a catalog model with default options, in order; () if it is not
        listed.
        """
        return next((tuple(row["units"]) for row in self.rows["models"] if row["name"] == model), ())


@cache
def shipped() -> CatalogFacts:
    """Return the facts in ``facts.json``, which are shipped with this version. The file is read once."""
    return msgspec.json.decode(PLACE.read_bytes(), type=CatalogFacts)


def encode(facts: CatalogFacts) -> bytes:
    """Return ``facts`` as the indented JSON that ``facts.json`` contains."""
    return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"


@cache
def type_of(text: str) -> Any:
    """Return the type of an annotation's source text, such as ``int | None`` or ``Literal['a', 'b']``.

    The text is evaluated as Python code, so it must come from the package itself.
    """
    return eval(text, {"__builtins__": {}}, dict(_WORDS))  # our own file, never a user's


def problem_of(option: FactoryOption, value: object) -> str:
    """Return the reason why ``value`` does not have the option's type; "" if it does."""
    try:
        msgspec.convert(value, type_of(option.type))
    except msgspec.ValidationError as error:
        return str(error)
    return ""
