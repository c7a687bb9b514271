"""The arena: no two values that live at once overlap, and it is no larger than what lies in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgefl_export.executorch.xnnpack.memory import ALIGNMENT, Lifetime, aligned, planned

spans = st.builds(
    lambda size, first, length: Lifetime(size, first, first + length),
    st.integers(1, 5000),
    st.integers(0, 30),
    st.integers(0, 12),
)


@given(st.lists(spans, max_size=40))
def test_values_that_live_at_once_never_overlap(found: list[Lifetime]) -> None:
    offsets, _ = planned(dict(enumerate(found)))

    for a in offsets:
        for b in offsets:
            if a < b and found[a].first <= found[b].last and found[b].first <= found[a].last:
                assert offsets[a] + found[a].size <= offsets[b] or offsets[b] + found[b].size <= offsets[a]


@given(st.lists(spans, max_size=40))
def test_the_arena_ends_where_the_last_value_ends(found: list[Lifetime]) -> None:
    offsets, total = planned(dict(enumerate(found)))
    most = max(
        (sum(aligned(s.size) for s in found if s.first <= turn <= s.last) for turn in range(60)), default=0
    )

    assert total == max((offsets[key] + aligned(found[key].size) for key in offsets), default=0)
    assert total >= most
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())


def test_memory_of_a_dead_value_is_used_again() -> None:
    offsets, total = planned({"a": Lifetime(640, 0, 1), "b": Lifetime(640, 2, 3), "c": Lifetime(64, 0, 3)})

    assert offsets["a"] == offsets["b"]
    assert total == 704


def test_a_small_value_lies_in_the_smallest_gap() -> None:
    row = {
        "a": Lifetime(6400, 0, 9),
        "b": Lifetime(3200, 0, 1),
        "c": Lifetime(1600, 0, 9),
        "d": Lifetime(640, 0, 1),
        "e": Lifetime(320, 0, 9),
    }
    offsets, _ = planned({**row, "new": Lifetime(64, 5, 6)})

    assert offsets["new"] == offsets["d"]
