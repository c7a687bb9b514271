"""What a server tells reaches whoever follows, over full files, half lines and new runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl_server import events
from edgefl_server.events import DeviceSeen, Noted, UpdateAccepted
from edgefl_server.storage import feed
from edgefl_server.storage.feed import AnyEvent, FeedEvent, FeedReader, FeedWriter, decode_event
from tests.support.events import round_closed


def followed(tail: FeedReader) -> list[FeedEvent]:
    return [each for line in tail.lines() if (each := decode_event(line)) is not None]


def written(folder: Path, *told_: events.Event, **options: int) -> None:
    made = FeedWriter(folder, lambda: 5.0, **options)
    for event in told_:
        assert made.take(event) is None
    made.close()


def seen(stage: str, step: int, **more: object) -> DeviceSeen:
    fields = {"device": "a", "tier": "strong", "round": 1, "stage": stage, "step": step, "steps": 9, **more}
    return DeviceSeen(**fields)  # type: ignore[arg-type]


def test_every_kind_of_event_can_be_read_again() -> None:
    assert set(AnyEvent.__args__) == set(events.Event.__subclasses__())


def test_what_is_told_is_read_as_it_was_told(tmp_path: Path) -> None:
    closed = round_closed(accuracy=None, loss=0.5, train_loss=None, metrics={"f1": 0.25})
    written(tmp_path, closed, Noted(text="a"), seen("reported", 0, variants={"g": "b"}))

    first, second, third = followed(FeedReader(tmp_path))

    assert (first.at, first.event, second.event) == (5.0, closed, Noted(text="a"))
    assert isinstance(third.event, DeviceSeen) and third.event.variants == {"g": "b"}
    assert third.event.loss != third.event.loss, "no loss is no number"


def test_the_newest_progress_of_a_device_and_every_report_are_written(tmp_path: Path) -> None:
    accepted = UpdateAccepted(device="a", tier="strong", round=1, nonce="n", sha256="s", weight=1)
    written(tmp_path, *(seen("train", step) for step in range(1000)), accepted, seen("reported", 0))

    steps = [each.event.step for each in followed(FeedReader(tmp_path)) if isinstance(each.event, DeviceSeen)]

    assert len(steps) < 10 and steps[-1] in (0, 999) and 999 in steps


def test_what_became_of_a_device_stands_behind_what_it_said_before(tmp_path: Path) -> None:
    opened = events.RoundOpened(round=2, goal=1, devices=("a",), deadline=9.0)
    written(
        tmp_path, seen("train", 5), events.DeviceLost(device="a", tier="strong"), seen("train", 6), opened
    )

    kinds = [type(each.event).__name__ for each in followed(FeedReader(tmp_path))]

    assert kinds == ["DeviceSeen", "DeviceLost", "DeviceSeen", "RoundOpened"]


def test_a_full_file_makes_room_and_whoever_follows_misses_nothing(tmp_path: Path) -> None:
    tail, texts = FeedReader(tmp_path), []
    for number in range(9):
        written(tmp_path, Noted(text=str(number) * 400), most_bytes=1000)
        texts += [each.event.text[0] for each in followed(tail) if isinstance(each.event, Noted)]

    assert "".join(texts) == "012345678"
    kept = [each.event.text[0] for each in followed(FeedReader(tmp_path)) if isinstance(each.event, Noted)]
    assert kept == list("345678") and sum(path.stat().st_size for path in tmp_path.iterdir()) < 4000


def test_lines_before_a_rotation_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / feed.NAME
    path.write_bytes(b"one\n")
    tail = FeedReader(tmp_path)
    assert list(tail.lines()) == [b"one"]
    looked: list[int] = []
    look = tail._is_replaced

    def full_meanwhile() -> bool:
        if not looked:
            path.write_bytes(b"one\ntwo\n")
            path.rename(tmp_path / feed.BEFORE)
            path.write_bytes(b"three\n")
        looked.append(1)
        return look()

    monkeypatch.setattr(tail, "_is_replaced", full_meanwhile)
    assert list(tail.lines()) == [b"two", b"three"]


def test_a_line_that_a_killed_server_left_half_written_costs_itself_only(tmp_path: Path) -> None:
    written(tmp_path, Noted(text="before"))
    with (tmp_path / feed.NAME).open("ab") as file:
        file.write(b'{"at":1.0,"event":{"event":"no')
    tail = FeedReader(tmp_path)
    assert [each.event for each in followed(tail)] == [Noted(text="before")]

    written(tmp_path, Noted(text="after"))

    assert [each.event for each in followed(tail)] == [Noted(text="after")]


def test_news_of_a_later_release_and_garbage_are_passed_over(tmp_path: Path) -> None:
    lines = [
        b'{"at":1.0,"event":{"event":"teleported","device":"a"}}',
        b"\xff\xfe",
        b"[[[[",
        b'{"at":2.0,"event":{"event":"noted","text":"a","colour":"red"}}',
    ]
    (tmp_path / feed.NAME).write_bytes(b"\n".join(lines) + b"\n")

    assert [each.event for each in followed(FeedReader(tmp_path))] == [Noted(text="a")]


def test_a_feed_that_cannot_be_written_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / feed.NAME).mkdir()
    made = FeedWriter(tmp_path)
    assert made.take(Noted(text="lost")) is None
    made.close()

    problem = made.take(Noted(text="also lost"))

    assert problem is not None and "events.jsonl lacks events" in problem.text
    assert made.take(Noted(text="lost, too")) is None


@pytest.mark.parametrize("there", [False, True])
def test_a_feed_may_begin_before_its_server(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
        (folder / feed.NAME).write_bytes(b"\n")
    feed.begin(folder)

    assert (folder / feed.NAME).stat().st_size == there
