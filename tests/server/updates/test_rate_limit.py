"""Who is heard, and how often."""

from __future__ import annotations

from edgefl.wire.limits import Limits
from edgefl_server.updates.rate_limit import RateLimiter, TokenBuckets


class Watch:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(watch: Watch | None = None, **limits: float) -> RateLimiter:
    return RateLimiter(Limits(**limits), watch or Watch())  # type: ignore[arg-type]


def test_names_that_said_no_hello_share_what_is_answered() -> None:
    watch = Watch()
    door = gate(watch, stranger_messages_s=2)
    heard = sum(door.accepts(f"x{n}", "updates", 10, is_known=False, devices=0) for n in range(1000))
    assert heard == 20 and door.counts == {"unknown names": 980}
    watch.now = 1.0
    assert sum(door.accepts(f"y{n}", "updates", 10, is_known=False, devices=0) for n in range(1000)) == 2


def test_a_flood_of_one_device_costs_no_other() -> None:
    door = gate(device_messages_s=5)
    heard = sum(door.allow("message", "loud") for _ in range(1000))
    assert heard == 50 and door.allow("message", "quiet")
    assert door.counts == {"messages too often": 950}


def test_unverified_messages_use_a_rate_of_their_own() -> None:
    door = gate()
    assert sum(door.allow("unverified", "d") for _ in range(1000)) == 32
    assert sum(door.allow("copy", "d") for _ in range(1000)) == 32
    assert sum(door.allow("answer", "d") for _ in range(1000)) == 32


def test_a_name_that_has_all_its_share_again_is_forgotten() -> None:
    watch = Watch()
    shares = TokenBuckets(2.0, 10.0, watch)
    for n in range(1000):
        assert shares.allow(f"d{n}")
    assert len(shares) == 1000
    watch.now = 4.0
    assert sum(shares.allow("loud") for _ in range(20)) == 10
    watch.now = 6.0  # what the others spent is saved up, what the loud one did is not
    assert shares.allow("loud") and len(shares) == 1001
    watch.now = 9.0
    assert sum(shares.allow("loud") for _ in range(20)) == 9
    watch.now = 11.5
    assert sum(shares.allow("loud") for _ in range(20)) == 5 and len(shares) == 1


def test_large_messages_are_not_read() -> None:
    door = gate(hello_bytes=300)
    for leaf, most in (("hello", 300), ("status", 1024), ("progress", 4096), ("declines", 16_384)):
        assert door.accepts("d", leaf, most, is_known=True, devices=1)
        assert not door.accepts("d", leaf, most + 1, is_known=True, devices=1)
    assert sum(door.counts.values()) == 4


def test_new_names_are_bounded_and_known_ones_stay() -> None:
    door = gate(max_devices=3)
    assert door.accepts("new", "hello", 10, is_known=False, devices=2)
    assert not door.accepts("new", "hello", 10, is_known=False, devices=3)
    assert door.accepts("old", "hello", 10, is_known=True, devices=3)


def test_of_a_name_without_a_hello_only_its_presence_is_known_and_of_few() -> None:
    door = gate(max_strangers=2)
    for name in ("a", "b", "c"):
        door.set_presence(name, online=False)
    assert [door.take_presence(name) for name in ("a", "b", "c", "b")] == [True, False, False, True]
