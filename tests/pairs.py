"""Rows of parameters that tests choose from a product, and the ring each row runs in.

A covering array has every pair of values of any two factors in some row, in far fewer rows than the product::

    pairs(["fedavg", "swat"], ["mlp", "cnn", "vit"], ["onnx", "executorch"])  # 6 rows in place of 12
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

FORMATS = ("onnx", "executorch")
Row = tuple[Any, ...]
_Pair = tuple[int, int, int, int]  # factor, position of its value, another factor, position of its value


def pairs(*factors: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[Row]:
    """Rows with every pair of values that an allowed row has; the same rows each time.

    Greedy: the row that has most of the pairs still missing comes next, the first of equals. Values need no hash.
    """
    places = [
        row
        for row in product(*(range(len(values)) for values in factors))
        if allowed(*(values[place] for values, place in zip(factors, row, strict=True)))
    ]
    missing = {pair for row in places for pair in _pairs_of(row)}
    rows = []
    while missing:
        best = max(places, key=lambda row: len(missing & _pairs_of(row)))
        missing -= _pairs_of(best)
        rows.append(tuple(values[place] for values, place in zip(factors, best, strict=True)))
    return rows


def _pairs_of(row: tuple[int, ...]) -> set[_Pair]:
    if len(row) == 1:
        return {(0, row[0], 0, row[0])}
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}


def in_turn(
    rows: Iterable[Any], rare: Iterable[Any] = (), formats: Sequence[str] = FORMATS, *, every: int = 1
) -> list[Any]:
    """Parameters ``(*row, format)``: the default ring has each row, or one in ``every``, with one format, which take turns;
    the slow ring has all else. Rows in ``rare`` are slow and have one format."""
    everyday = [_tuple(row) for row in rows]
    params = []
    for number, row in enumerate(everyday):
        turn = number // every % len(formats) if number % every == 0 else -1
        params += [
            pytest.param(*row, name, marks=() if place == turn else pytest.mark.slow)
            for place, name in enumerate(formats)
        ]
    params += [
        slow(*_tuple(row), formats[number % len(formats)]) for number, row in enumerate(rare, len(everyday))
    ]
    return params


def in_both(*row: Any, formats: Sequence[str] = FORMATS) -> list[Any]:
    """A row of the slow ring in every format."""
    return [slow(*row, name) for name in formats]


def by_default(rows: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Parameters of which the default ring has the rows in ``default``."""
    listed = list(rows)
    assert all(row in listed for row in default), "a row of the default ring is missing"
    return [pytest.param(*_tuple(row)) if row in default else slow(*_tuple(row)) for row in listed]


def slow(*values: Any, id: str | None = None) -> Any:
    """A row of the slow ring."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def _tuple(row: Any) -> Row:
    return row if isinstance(row, tuple) else (row,)
