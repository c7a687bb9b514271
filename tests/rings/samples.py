"""Rows of a test that run in the default ring, for tests with more rows than it needs."""

from __future__ import annotations

from collections import defaultdict

import pytest


def mark(items: list[pytest.Item]) -> None:
    """Mark rows as slow, so that n of each test with the mark ``sample(n)`` stay in the default ring."""
    rows: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None and "slow" not in item.keywords:
            rows[item.nodeid.partition("[")[0]].append(item)
    for tests in rows.values():
        closest = tests[0].get_closest_marker("sample")
        assert closest is not None
        chosen = spread(len(tests), closest.args[0])
        for place, item in enumerate(tests):
            if place not in chosen:
                item.add_marker("slow")


def spread(count: int, most: int) -> set[int]:
    """Return up to ``most`` places among ``count``, spread evenly, the first and the last among them."""
    if most >= count:
        return set(range(count))
    return {round(step * (count - 1) / max(most - 1, 1)) for step in range(most)}
