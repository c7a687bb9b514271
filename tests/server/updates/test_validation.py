"""What a device says of itself, as the journal and people get it."""

from __future__ import annotations

import msgspec

from edgefl.cli.federation.lines import text_of
from edgefl.wire.mqtt.messages import Task
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl_server.updates.validation import report_event
from tests.server.fleet import update_for


def test_words_of_a_device_about_its_forms_are_few_short_and_printable() -> None:
    task = Task(run="run", round=1, tier="weak", seed=0, nonce="n")
    update = update_for("weak-0", task, "1", {})
    dropped = {f"g\x1b[2J{number:03}": "no\nsuch\x1b]0;op\x07" * 100 for number in range(500)}
    profile = msgspec.structs.replace(update.profile, variants={"train\r": "blocked\x00"}, dropped=dropped)

    told = report_event(
        msgspec.structs.replace(update, profile=profile), PublishTraffic(1, 1), PublishTraffic(1, 1)
    )

    text = text_of(told)
    assert text is not None and text.isprintable() and "train  as blocked" in text
    assert len(told.dropped) <= 100 and max(map(len, told.dropped.values())) <= 200
