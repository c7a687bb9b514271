"""No bytes make a decoder raise anything but an error of ours, or unfold to more than it was allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.corpus import golden, wrong
from tests.fuzz.targets import TARGETS


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", TARGETS)
@given(st.data())
def test_wrong_bytes_raise_errors_of_ours_only(name: str, data: st.DataObject) -> None:
    target, genuine = TARGETS[name]
    target(data.draw(wrong(golden(*genuine))))


@given(st.text(max_size=80))
def test_any_text_is_a_topic_or_refused(text: str) -> None:
    TARGETS["topics"][0](text.encode("utf-8", "replace"))
