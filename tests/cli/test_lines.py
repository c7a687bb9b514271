"""The server's log for people: local times, short digests, sizes with units, names."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgefl.cli.federation.lines import RepeatedTexts, line, text_of
from edgefl_export.compiler import cache
from edgefl_server import events
from edgefl_server.events import AwaitedDevice
from tests.support.events import device_evaluation, round_closed

NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
SHA = "a1b2c3d4e5f60789" * 4


def closed(**changes: Any) -> events.RoundClosed:
    usual = {"accuracy": None, "loss": None, "reports": 1, "weights_sha256": SHA}
    return round_closed(2, **{**usual, "down_bytes": 3 << 20, "up_bytes": 2048, **changes})


started = partial(
    events.Started, federation="demo", run="r1", rounds=2, model_version=SHA, device="cpu", resumed=False
)
seen = partial(events.DeviceSeen, device="a", tier="weak", round=1)
ended = partial(events.RoundEnded, round=2, reports=0, missing={}, seconds=1.0)
LINES: list[tuple[events.Event, str | None]] = [
    (events.UpdateAccepted(device="a", tier="t", round=1, nonce="n", sha256=SHA, weight=1), None),
    (
        events.Limited(counts={"unknown names": 7, "inbox full": 2}),
        "turned away unread so far: inbox full (2), unknown names (7)",
    ),
    (
        started(next_round=1),
        "federation 'demo' begins: run r1, 2 rounds, model a1b2c3d4e5f6, updates are summed on cpu",
    ),
    (
        started(next_round=3, resumed=True),
        "federation 'demo' has trained all rounds: run r1, 2 rounds, model a1b2c3d4e5f6, updates are summed on cpu",
    ),
    (events.Online(broker="lan:1883"), "online: connected to the broker at lan:1883"),
    (events.Stopped(next_round=3, rounds=3), "stopped; the same command goes on with round 3"),
    (events.Stopped(next_round=4, rounds=3), "stopped; the same command ends it"),
    (events.Exporting(tier="weak", text="step"), "exporting tier weak: step"),
    (
        events.Compiled(compiled=1, reused=2, cache="c", cache_bytes=3 << 20),
        cache.cache_summary(compiled=1, reused=2, folder=Path("c"), nbytes=3 << 20),
    ),
    (events.Warned(tier="weak", text="look out"), "warning: look out"),
    (events.Noted(text="by the way"), "by the way"),
    (
        events.Waiting(next_round=2, known=1, needed=3, missing=("a", "b")),
        "round 2 waits for devices: 1 of 3 are there, missing a, b",
    ),
    (events.Offline(text="no route", retry_s=0.25), "offline: no route; trying again in 0.2 s"),
    (events.DeviceJoined(device="weak-0", tier="weak"), "weak-0 is there, as tier weak"),
    (
        events.DeviceLost(device="weak-0", tier="weak", round=3, until=NOON + 61),
        "weak-0 is gone: it was stopped or killed, or its link broke; round 3 gives it until 12:01:01 to come back",
    ),
    (
        events.DeviceFitness(device="weak-0", tier="weak", unfit="it is hot"),
        "weak-0 is left out of rounds for now: it is hot",
    ),
    (events.DeviceFitness(device="weak-0", tier="weak", unfit=""), "weak-0 may be selected again"),
    (
        events.DeviceLost(device="weak-0", tier="weak"),
        "weak-0 is gone: it was stopped or killed, or its link broke",
    ),
    (
        events.DeviceFailed(device="weak-0", round=3, text="no space"),
        "weak-0 failed in round 3 and tries again: no space",
    ),
    (
        events.Awaiting(
            round=3,
            devices=(
                AwaitedDevice(device="a", online=False, stage="", since=NOON),
                AwaitedDevice(device="b", online=True, stage="train 3/10", since=NOON + 1),
                AwaitedDevice(device="c", online=True, stage="", since=0.0),
            ),
            until=NOON + 3600,
        ),
        "round 3 waits until 13:00:00 for a (offline since 12:00:00), b (train 3/10 at 12:00:01), "
        "c (online, no step reported yet)",
    ),
    (
        events.Awaiting(round=3, devices=(), until=NOON + 3600),  # where versions wait for nobody
        "round 3 waits until 13:00:00 for devices that are ready",
    ),
    (
        events.RolloutStarted(round=1, devices={"strong": 2, "weak": 0}),
        "round 1 begins the trial of the candidate: 2 of tier strong, 0 of tier weak try it",
    ),
    (
        events.RolloutJudged(round=5, promoted=False, text="it is slow"),
        "after round 5 the candidate is taken back (it is slow)",
    ),
    (events.RolledBack(round=2, text="worse", accuracy=0.1, loss=2.0), None),
    (
        events.RoundOpened(round=1, goal=1, devices=("a",), deadline=NOON + 120),
        "round 1 opened for 1 device until 12:02:00: a",
    ),
    (
        events.RoundOpened(round=6, goal=1, devices=("a",), deadline=NOON + 120, evaluates=True),
        "round 6 opened for 1 device to evaluate the model until 12:02:00: a",
    ),
    (seen(stage="train"), None),
    (seen(stage="reported", up_bytes=1 << 10), "a reported for round 1: up 1.0 KiB"),
    (
        seen(stage="reported", loss=0.51234, step_ms=12.3, peak_bytes=5 << 20),
        "a reported for round 1: loss 0.5123, step 12 ms, peak 5.0 MiB, up 0.0 KiB",
    ),
    (seen(stage="reported", loss=0.5, up_bytes=1 << 10), "a reported for round 1: loss 0.5, up 1.0 KiB"),
    (
        events.Rejected(device="a", round=2, reason="not-finite", text="NaN"),
        "a was refused in round 2 (not-finite): NaN",
    ),
    (events.Rejected(device="a", round=0, reason="no-tier", text="fits none"), "a, no-tier: fits none"),
    (
        events.ParticipationDeclined(device="a", round=2, reason="no-memory", text="64 MiB"),
        "a declined round 2 (no-memory): 64 MiB",
    ),
    (
        events.ParticipationDeclined(device="a", round=2, reason="other", text=""),
        "a declined round 2 (other)",
    ),
    (events.Refused(text="lacks a"), "the run ends unfinished: lacks a"),
    (
        ended(outcome="closed", reports=1, missing={"a": "it declined (x)"}, seconds=1.26),
        "round 2 closed after 1.3 s with 1 update, without a (it declined (x))",
    ),
    (ended(outcome="closed", reports=3, evaluates=True), "round 2 closed after 1.0 s with 3 reports"),
    (events.Vitals(inbox=3, server_lag_s=0.5), None),
    (events.Ordered(order="pause", by="10.0.0.7", done=True), "the order 'pause' of 10.0.0.7 is carried out"),
    (
        events.Ordered(order="rollback", by="", done=False, text="there is no such model"),
        "the order 'rollback' of somebody is refused: there is no such model",
    ),
    (
        ended(outcome="abandoned", missing={"a": "b"}, text="too few"),
        "round 2 abandoned after 1.0 s with 0 updates: too few",
    ),
    (
        closed(accuracy=0.5, loss=1.25),
        "round 2 evaluated, accuracy 50.0%, loss 1.25, down 3.0 MiB, up 2.0 KiB, weights a1b2c3d4e5f6",
    ),
    (
        closed(text="evaluation failed: no data"),
        "round 2 not evaluated, down 3.0 MiB, up 2.0 KiB, weights a1b2c3d4e5f6: evaluation failed: no data",
    ),
    (
        closed(
            accuracy=0.5, loss=3.5, metric="perplexity", metrics={"perplexity": 33.123456, "accuracy": 0.5}
        ),
        "round 2 evaluated, perplexity 33.12, loss 3.5, down 3.0 MiB, up 2.0 KiB, weights a1b2c3d4e5f6",
    ),
    (
        closed(loss=0.25, metric="loss"),
        "round 2 evaluated, loss 0.25, down 3.0 MiB, up 2.0 KiB, weights a1b2c3d4e5f6",
    ),
    (closed(outcome="abandoned", text="too few"), None),
    (
        closed(evaluation=device_evaluation()),
        "round 2 on devices: accuracy 78.2%, median 75.5%, worst decile 65.4%, 5 devices, down 3.0 MiB, up 2.0 KiB",
    ),
    (
        closed(evaluation=device_evaluation(devices=None)),
        "round 2 on devices: too few to be shown, down 3.0 MiB, up 2.0 KiB",
    ),
    (
        events.Finished(
            rounds=1, model="out/model.safetensors", weights_sha256=SHA, accuracy=0.75, loss=None
        ),
        "finished 1 round, accuracy 75.0%, model out/model.safetensors (a1b2c3d4e5f6)",
    ),
]


@pytest.mark.parametrize(("event", "text"), LINES, ids=[type(event).__name__ for event, _ in LINES])
def test_each_event_is_a_sentence(event: events.Event, text: str | None) -> None:
    assert text_of(event) == text
    assert line(event, NOON + 5) == (None if text is None else f"12:00:05  {text}")
    assert not re.search(r"[0-9a-f]{13}|[0-9]{9}", text or ""), (
        "neither whole digests nor epoch seconds or bytes"
    )


def test_what_a_round_repeats_is_said_in_full_once() -> None:
    repeats = RepeatedTexts()

    def said(number: int, text: str = "NaN") -> list[str | None]:
        end = ended(round=number, outcome="abandoned", text=f"round {number} lacks a: {text}")
        refused = [events.Rejected(device=name, round=number, reason="bad", text=text) for name in ("a", "b")]
        return [line(event, NOON, repeats) for event in (*refused, end)]

    first, second, third = said(1), said(2), said(3, "too large")
    assert all(text is not None and "NaN" in text for text in first)
    assert second == [
        "12:00:00  a was refused in round 2 (bad): as in round 1",
        "12:00:00  b was refused in round 2 (bad): as in round 1",
        "12:00:00  round 2 abandoned after 1.0 s with 0 updates: as in round 1",
    ]
    assert all(text is not None and "too large" in text for text in third)


def test_every_event_has_a_sentence() -> None:
    kinds = {
        each for each in vars(events).values() if isinstance(each, type) and issubclass(each, events.Event)
    }
    assert kinds - {events.Event} == {type(event) for event, _ in LINES}


def test_algorithms_get_whole_values() -> None:
    told = msgspec.json.decode(msgspec.json.encode(closed()))
    assert told["weights_sha256"] == SHA and told["down_bytes"] == 3 << 20 and told["event"] == "roundclosed"
