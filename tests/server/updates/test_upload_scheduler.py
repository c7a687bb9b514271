"""Queue of uploads as a pure function of a clock: bounded bytes, a turn for every device, no device blocks the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import UpdateChunk
from edgefl_server.updates.upload_scheduler import IDLE_S, MIN_SLOW_S, SCAN_S, UploadScheduler


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def offer(size: int, nonce: str = "n") -> UpdateChunk:
    return UpdateChunk(nonce=nonce, sha256="0" * 64, index=0, count=9, size=size, data=b"")


def piece(nbytes: int = 1) -> UpdateChunk:
    return UpdateChunk(nonce="n", sha256="0" * 64, index=0, count=9, size=100, data=bytes(nbytes))


def names(turns: UploadScheduler, deadline: float = 1e9, opened: float = -60.0) -> list[str]:
    return [device for device, _ in turns.next(opened, deadline)]


def line(*devices: str) -> tuple[UploadScheduler, Clock]:
    """Turns of one device at a time, for which these wait."""
    clock = Clock()
    turns = UploadScheduler(100, clock)
    for device in devices:
        turns.offer(device, offer(100))
    return turns, clock


def test_turns_go_round_in_order_and_within_the_bytes() -> None:
    turns = UploadScheduler(100, Clock())
    for device in "abcd":
        turns.offer(device, offer(40))
    assert names(turns) == ["a", "b"] and names(turns) == []
    turns.remove("b")
    assert names(turns) == ["c"]
    turns.remove("a")
    turns.remove("c")
    assert names(turns) == ["d"]


def test_one_that_is_larger_than_all_that_may_be_asked_for_goes_alone() -> None:
    turns = UploadScheduler(100, Clock())
    turns.offer("large", offer(1000))
    turns.offer("small", offer(1))
    assert names(turns) == ["large"]
    turns.remove("large")
    assert names(turns) == ["small"]


def test_a_device_that_trickles_loses_its_turn_and_is_queued_last() -> None:
    turns, clock = line("trickle", "next", "last")
    deadline = clock.now + 24
    assert names(turns, deadline) == ["trickle"]
    for pause_s in (4, 3.9):  # 24 s for three: 8 s each
        clock.now += pause_s
        turns.note_chunk("trickle", piece())
    assert names(turns, deadline) == ["next"] and turns.take_lost() == []
    turns.offer("new", offer(100))
    clock.now += 0.1
    turns.note_chunk("trickle", piece())
    assert names(turns, deadline) == [] and turns.take_lost() == ["trickle"]
    for device in ("next", "last", "new"):
        turns.remove(device)
    names(turns, deadline)
    assert turns.is_requested("trickle", offer(100))


def test_a_silent_device_loses_its_turn_only_while_others_wait() -> None:
    turns, clock = line("silent")
    assert names(turns) == ["silent"] and turns.due_in() is None
    clock.now += 100
    assert names(turns) == [] and turns.take_lost() == []
    turns.offer("next", offer(100))
    assert names(turns) == ["next"] and turns.take_lost() == ["silent"]
    turns.remove("next", is_complete=True)
    assert names(turns) == ["silent"]  # asked anew, because it sends nothing


def test_a_slow_link_that_still_sends_is_not_asked_again() -> None:
    turns, clock = line("slow", "quick")
    deadline = clock.now + IDLE_S
    names(turns, deadline)
    clock.now += IDLE_S
    turns.note_chunk("slow", piece())
    assert names(turns, deadline) == ["quick"] and turns.take_lost() == ["slow"]
    turns.note_chunk("slow", piece())
    turns.remove("quick", is_complete=True)
    assert names(turns, deadline) == [] and turns.is_requested("slow", offer(100))
    turns.remove("slow", is_complete=True)
    assert not turns.is_requested("slow", offer(100))


def test_a_turn_is_slow_after_a_third_of_the_rounds_age_at_the_latest() -> None:
    turns, clock = line("slow", "next")
    assert names(turns, opened=-0.6) == ["slow"] and turns.due_in() == SCAN_S
    clock.now += 0.19
    assert names(turns, opened=-0.6) == []
    clock.now += SCAN_S
    assert names(turns, opened=-0.6) == ["next"]


def test_where_all_are_slow_and_send_much_not_all_are_asked_at_once() -> None:
    turns, clock = line("slow", "next", "last")
    assert names(turns, opened=-3.0) == ["slow"]
    for expected in (["next"], [], [], ["last"]):
        turns.note_chunk("slow", piece(20))
        clock.now += 1.0
        assert names(turns, opened=-3.0) == expected
    assert turns.take_lost() == []


@pytest.mark.parametrize("attackers", [1, 3, 5])
@pytest.mark.parametrize("sent", [0, 1, 5], ids="sends-{}-of-100".format)
@pytest.mark.parametrize("usual_s", [0.1, 1.0])
def test_attackers_at_most_double_the_time_of_others(attackers: int, sent: int, usual_s: float) -> None:
    """Five of twelve begin and do not finish; the others need ``usual_s`` for training and for each upload."""
    bad = [f"bad-{index}" for index in range(attackers)]
    good = [f"good-{index}" for index in range(7)]
    turns, clock = line()
    for _ in range(3):
        opened, due = clock.now, dict[str, float]()
        left = set(good)
        for device in bad:
            turns.offer(device, offer(100))
        while left:
            if due.keys().isdisjoint(good) and clock.now - opened >= usual_s:
                for device in sorted(left):
                    turns.offer(device, offer(100))
            for device in names(turns, opened + 1000.0, opened):
                due[device] = clock.now + usual_s
                if device in bad:
                    turns.note_chunk(device, piece(sent))
            for device in [each for each in left if due.get(each, 1e9) <= clock.now]:
                turns.remove(device, is_complete=True)
                left.discard(device)
            clock.now += usual_s / 40
        assert clock.now - opened <= 2 * usual_s * (1 + len(good))
        turns.clear()


def test_a_turn_that_takes_longer_than_usual_blocks_nobody() -> None:
    turns, clock = line()
    for _ in range(3):
        turns.offer("usual", offer(100))
        names(turns)
        clock.now += 0.4
        turns.remove("usual", is_complete=True)
    for device in ("slow", "honest"):
        turns.offer(device, offer(100))
    assert names(turns) == ["slow"]
    clock.now += 0.5
    assert names(turns) == []
    clock.now += 2 * MIN_SLOW_S
    turns.note_chunk("slow", piece())
    assert names(turns) == ["honest"] and turns.take_lost() == []


def test_an_offer_that_comes_again_is_answered_again_and_keeps_its_place() -> None:
    turns, _ = line("a", "b", "c")
    assert names(turns) == ["a"]
    turns.offer("b", offer(100, "other"))
    turns.offer("a", offer(100))
    assert names(turns) == ["a"] and names(turns) == []
    turns.offer("a", offer(100, "another"))
    assert names(turns) == ["b"]
    turns.remove("b")
    assert names(turns) == ["c"]
    turns.remove("c")
    assert names(turns) == ["a"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offer", "over", "fed", "wait", "next", "clear"]),
            st.sampled_from("abcdef"),
            st.integers(1, 60),
        )
    )
)
def test_all_come_to_their_turn(events: list[tuple[str, str, int]]) -> None:
    clock = Clock()
    turns, waiting = UploadScheduler(100, clock), set[str]()
    for what, device, size in events:
        match what:
            case "offer":
                waiting.add(device)
                turns.offer(device, offer(size))
            case "over":
                turns.remove(device, is_complete=size > 30)
                waiting.discard(device)
            case "fed":
                turns.note_chunk(device, piece(size))
            case "wait":
                clock.now += size / 20
            case "clear":
                turns.clear()
                waiting.clear()
            case "next":
                waiting -= set(names(turns, 10.0))
        moving = [turn.offer.size for turn in turns._turns.values() if not turn.is_slow]
        assert turns._requested_bytes == sum(moving) <= 100
        assert turns._slow == len(turns._turns) - len(moving)
    for _ in range(20):
        clock.now += IDLE_S
        waiting -= set(names(turns))
    assert not waiting
