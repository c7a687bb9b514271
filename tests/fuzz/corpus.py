"""Genuine bytes of each kind, and ways to make them wrong."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from benchmarks.fuzz_messages import mutated
from edgefl_conformance.vectors.write import GOLDEN


def golden(*patterns: str) -> list[bytes]:
    """The byte vectors of the protocol whose names fit."""
    found = [path.read_bytes() for pattern in patterns for path in sorted(GOLDEN.glob(pattern))]
    assert found, patterns
    return found


def wrong(genuine: list[bytes]) -> st.SearchStrategy[bytes]:
    """Mutated messages, some that are nothing but bytes, and genuine ones."""
    drawn = st.builds(
        lambda seed, payload: mutated(random.Random(seed), payload, genuine),
        st.integers(0, 2**32),
        st.sampled_from(genuine),
    )
    return st.one_of(drawn, drawn, drawn, st.binary(max_size=300), st.sampled_from(genuine))
