"""Covering arrays have every pair, in few rows; formats take turns."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairs import by_default, in_turn, pairs

CODECS, KINDS, FORMATS = tuple("abcdefgh"), tuple("uvwxy"), ("onnx", "executorch")


def joint(rows: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    """(place, value, place, value) of every pair in a row."""
    return {(a, row[a], b, row[b]) for row in rows for a, b in combinations(range(len(row)), 2)}


@pytest.mark.parametrize(
    "factors", [(CODECS,), (CODECS, FORMATS), (CODECS, KINDS, FORMATS), (KINDS, KINDS, KINDS)]
)
def test_every_pair_of_the_product_is_in_a_row(factors: tuple[tuple[str, ...], ...]) -> None:
    rows = pairs(*factors)

    assert joint(rows) == joint(list(product(*factors)))
    assert {row[0] for row in rows} == set(factors[0])
    assert len(rows) == len(set(rows)) and set(rows) <= set(product(*factors))


def test_there_are_few_rows() -> None:
    assert len(pairs(CODECS, KINDS, FORMATS)) == len(CODECS) * len(KINDS)
    assert len(pairs(*[FORMATS] * 10)) <= 12


def test_a_row_that_is_not_allowed_is_in_none_and_its_other_pairs_are() -> None:
    def allowed(codec: str, kind: str, _: str) -> bool:
        return (codec, kind) != ("a", "u")

    rows = pairs(CODECS, KINDS, FORMATS, allowed=allowed)

    assert joint(rows) == joint([row for row in product(CODECS, KINDS, FORMATS) if allowed(*row)])


def test_values_need_no_hash() -> None:
    assert pairs([{}, {"a": 1}], [[1], [2]]) == [({}, [1]), ({}, [2]), ({"a": 1}, [1]), ({"a": 1}, [2])]


def test_formats_take_turns_and_the_slow_ring_has_the_others() -> None:
    params = in_turn(["a", "b"], rare=["c"])

    assert [(param.values, bool(param.marks)) for param in params] == [
        (("a", "onnx"), False),
        (("a", "executorch"), True),
        (("b", "onnx"), True),
        (("b", "executorch"), False),
        (("c", "onnx"), True),
    ]


def test_rows_of_the_default_ring_are_among_the_rows() -> None:
    assert [bool(param.marks) for param in by_default(["a", "b"], ["b"])] == [True, False]
    with pytest.raises(AssertionError, match="missing"):
        by_default(["a", "b"], ["c"])
