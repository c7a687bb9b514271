"""What a server repeats of a device's reasons."""

from __future__ import annotations

import pytest

from edgefl.wire.mqtt.messages import NO_CARRY, Decline
from edgefl_server.updates.validation import decline_reason


@pytest.mark.parametrize(
    ("reason", "carry_needed", "known"),
    [
        ("no-memory", False, "no-memory"),
        ("No Memory", False, "other"),
        ("x" * 500, False, "other"),
        ("no-memory\n", False, "other"),
        ("", False, "other"),
        (NO_CARRY, True, NO_CARRY),
        (NO_CARRY, False, "other"),
    ],
)
def test_a_reason_is_one_word_of_ours_that_can_be(reason: str, carry_needed: bool, known: str) -> None:
    decline = Decline(round=1, nonce="n", reason=reason, text="too\x1b[31m large")

    found, text = decline_reason(decline, carry_needed=carry_needed)

    assert found == known and "\x1b" not in text
    assert ("nothing of the kind is needed" in text) == (reason == NO_CARRY and not carry_needed)
