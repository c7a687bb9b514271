"""Names of rows of a port."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import BundleError
from edgefl.wire.bundle.graphs import RowRange, cover, parse_rows, rows_of_port


@given(st.text(min_size=1), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_name_tells_whole_and_rows(whole: str, start: int, stop: int) -> None:
    name = rows_of_port(whole, start, stop)

    found = parse_rows(name)

    assert found is None if "\n" in whole else found == RowRange(whole, start, stop)


@pytest.mark.parametrize(
    "name", ["", "w", "w[0]", "w[0:]", "[0:1]", "w[-1:2]", "w[0:1].next", f"w[0:{10**12}]"]
)
def test_other_names_are_whole(name: str) -> None:
    assert parse_rows(name) is None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_rows_cover_a_tensor_in_order_only(lengths: list[int]) -> None:
    ends = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    parts = [RowRange("w", start, stop) for start, stop in itertools.pairwise(ends)]

    assert cover(parts, ends[-1])
    assert not cover(parts, ends[-1] + 1)
    assert not cover(parts[1:], ends[-1])
    assert not cover([*parts, parts[-1]], ends[-1])


@pytest.mark.parametrize("shape", [(), (4,), (0, 3)])
def test_rows_that_a_tensor_does_not_have_have_no_place(shape: tuple[int, ...]) -> None:
    with pytest.raises(BundleError, match="rows 2 to 5 of 'w'"):
        RowRange("w", 2, 5).place(1000, shape, 4)


def test_rows_lie_behind_those_before_them() -> None:
    assert RowRange("w", 2, 5).place(1000, (5, 3, 2), 4) == ([3, 3, 2], 1000 + 2 * 6 * 4)
