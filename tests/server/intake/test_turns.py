"""Whose update is asked for: bounded bytes, nobody forgotten, nobody holds a turn for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.mqtt.messages import UpdateChunk
from server.intake.turns import PATIENCE_S, Turns


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def offer(size: int, nonce: str = "n") -> UpdateChunk:
    return UpdateChunk(nonce=nonce, sha256="0" * 64, index=0, count=9, size=size, data=b"")


def names(turns: Turns) -> list[str]:
    return [device for device, _ in turns.next()]


def test_turns_go_round_in_order_and_within_the_bytes() -> None:
    turns = Turns(100)
    for device in "abcd":
        turns.offer(device, offer(40))
    assert names(turns) == ["a", "b"] and names(turns) == []
    turns.over("b")
    assert names(turns) == ["c"]
    turns.over("a")
    turns.over("c")
    assert names(turns) == ["d"]


def test_one_that_is_larger_than_all_that_may_be_asked_for_goes_alone() -> None:
    turns = Turns(100)
    turns.offer("large", offer(1000))
    turns.offer("small", offer(1))
    assert names(turns) == ["large"]
    turns.over("large")
    assert names(turns) == ["small"]


def test_who_is_silent_loses_its_turn_and_who_sends_keeps_it() -> None:
    clock = Clock()
    turns = Turns(100, clock)
    for device in ("silent", "slow", "next"):
        turns.offer(device, offer(50))
    assert names(turns) == ["silent", "slow"] and turns.wait() == PATIENCE_S
    clock.now += PATIENCE_S - 1
    turns.fed("slow")
    assert names(turns) == [] and turns.wait() == 1
    clock.now += 1
    assert names(turns) == ["next"] and turns.wait() is None
    turns.offer("silent", offer(50))  # it is there again, and waits as others do
    assert names(turns) == []
    turns.over("slow")
    assert names(turns) == ["silent"]


def test_an_offer_that_comes_again_is_answered_again_and_keeps_its_place() -> None:
    turns = Turns(100)
    for device in "abc":
        turns.offer(device, offer(100))
    assert names(turns) == ["a"]
    turns.offer("b", offer(100, "other"))
    turns.offer("a", offer(100))
    assert names(turns) == ["a"] and names(turns) == []
    turns.offer("a", offer(100, "another"))
    assert names(turns) == ["b"]
    turns.over("b")
    assert names(turns) == ["c"]
    turns.over("c")
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
def test_never_more_than_the_bytes_and_all_come_to_their_turn(events: list[tuple[str, str, int]]) -> None:
    clock = Clock()
    turns, asked, waiting = Turns(100, clock), dict[str, int](), set[str]()
    for what, device, size in events:
        match what:
            case "offer":
                if not turns.has_heard(device, offer(size)):
                    asked.pop(device, None)
                waiting.add(device)
                turns.offer(device, offer(size))
            case "over":
                turns.over(device)
                asked.pop(device, None)
                waiting.discard(device)
            case "fed":
                turns.fed(device)
            case "wait":
                clock.now += size / 20
            case "clear":
                turns.clear()
                asked.clear()
                waiting.clear()
            case "next":
                for name, head in turns.next():
                    assert name in waiting
                    waiting.discard(name)
                    asked[name] = head.size
                assert turns._asked_bytes <= max(100, max(asked.values(), default=0))
    for _ in range(10):
        clock.now += PATIENCE_S
        waiting -= set(names(turns))
    assert not waiting
