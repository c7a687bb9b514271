"""Combinations of algorithm, codec, submodel kind, server optimizer and round mode that work: `edgefl ls combinations`.

`make facts` tries the rules that refuse on each pair of the catalogs, so the table cannot say something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from edgefl.errors import ConfigError
from edgefl.facts import shipped

WHOLE, ROLLING = "whole", "rolling width"
"""Kinds in the table beside those of the catalog: a tier without frozen units, and a width whose window moves."""
_COMMAND = "`edgefl ls combinations`"
_COLUMNS = {"codec": "codecs", "kind": "kinds", "optimizer": "optimizers", "mode": "modes"}


def combination_error(text: str, **choice: str) -> ConfigError:
    """Return the ConfigError for a combination that does not work. Its text ends with the nearest combinations that do.

    Args:
        text: Explanation: the two parts, the reason, and what to change.
        choice: Names of the two parts that exclude each other. Keys are two of algorithm, codec, kind, optimizer and
            mode.
    """
    return ConfigError(f"{text} ({combination_hint(**choice)})", **choice)


def combination_hint(**choice: str) -> str:
    """Return a text with the nearest combinations that work, and the command that lists all.

    ``choice`` has the names of the two parts that exclude each other, under two of the keys algorithm, codec, kind,
    optimizer and mode.
    """
    nearest = " or ".join(_nearest(choice))
    return (
        f"nearest that work: {nearest}; {_COMMAND} lists all" if nearest else f"{_COMMAND} lists what works"
    )


def table() -> list[dict[str, str]]:
    """Return the rows of `edgefl ls combinations`, each by column.

    One row lists all algorithms with the same partners, or all codecs with the same ones. A cell is abbreviated to
    ``all`` or ``all but ...`` if that is shorter.
    """
    columns = list(_COLUMNS.values())
    every = {column: _union(row.get(column, ()) for row in _rows()) for column in columns}
    named: dict[tuple[str, ...], list[str]] = {}
    for row in _rows():
        cells = [_short(row[column], every[column]) if column in row else "" for column in columns]
        cells += [", ".join(row["engines"]), row.get("exchanges", "")]
        named.setdefault((row["what"], *cells), []).append(row["name"])
    return [
        dict(zip((what, *columns, "engines", "exchanges"), (", ".join(names), *cells), strict=True))
        for (what, *cells), names in named.items()
    ]


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _short(names: list[str], every: list[str]) -> str:
    """Return ``names`` as text: "all", "all but ..." with the missing ones of ``every`` if these are fewer, else a list."""
    missing = [name for name in every if name not in names]
    if not missing:
        return "all"
    return f"all but {', '.join(missing)}" if len(missing) < len(names) else ", ".join(names)


def works(algorithm: str, column: str, value: str) -> bool:
    """Return False if the table of combinations lists ``algorithm`` without ``value``.

    Args:
        algorithm: Name of the algorithm. For one that is not listed the result is True.
        column: Kind of its partner: codec, kind, optimizer or mode.
        value: Name of the partner.
    """
    row = _row("algorithm", algorithm)
    return row is None or value in row[_COLUMNS[column]]


def _nearest(parts: dict[str, str]) -> Iterator[str]:
    """Yield texts of up to two combinations that work: the first part with another second one, and the reverse.

    ``parts`` has two entries, such as ``{"algorithm": "fedbat", "codec": "dense"}``.
    """
    (first, one), (second, other) = parts.items()
    if found := _partner(first, one, second, other):
        yield f"{first} {one!r} with {second} {found!r}"
    if found := _partner(second, other, first, one):
        yield f"{first} {found!r} with {second} {other!r}"


def _partner(key: str, name: str, changed: str, old: str) -> str:
    """Return a part of kind ``changed`` that works with the part ``name`` of kind ``key``; "" if there is none.

    Codecs are compared by bits per value: the one nearest to ``old`` is returned. Otherwise the first one is.
    """
    row = _row(key, name)
    if row is not None and changed in _COLUMNS:
        found = [each for each in row[_COLUMNS[changed]] if each != old]
    else:
        rows = [each for each in _rows() if each["what"] == changed]
        found = [each["name"] for each in rows if key in _COLUMNS and name in each[_COLUMNS[key]]]
    bits = {each["name"]: math.log2(each["bits"]) for each in shipped().rows["codecs"]}
    if changed == "codec" and old in bits:
        found.sort(key=lambda each: abs(bits[each] - bits[old]))
    return next(iter(found), "")


def _row(what: str, name: str) -> dict[str, Any] | None:
    return next((row for row in _rows() if (row["what"], row["name"]) == (what, name)), None)


def _rows() -> list[dict[str, Any]]:
    return shipped().rows.get("combinations", [])
