"""What a device carries from round to round stands or falls with the update that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import StoreError
from edgefl_device.store.database import Outgoing, PastRound, Store
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import ScriptedServer, weights_of
from tests.device_runtime.store.stores import carry_of, open_store, run_sql
from tests.device_runtime.tiny import World

NAME = "run/ef/weak"


def compute(store: Store, nonce: str, carry: bytes | None, name: str = NAME) -> None:
    """What the end of a round's work leaves."""
    store.finish_job(Outgoing("run", 3, nonce, b"update"), carry, name)


def hear(store: Store, nonce: str, outcome: str) -> None:
    """The server's word on an update."""
    store.settle(PastRound(run="run", round=3, tier="weak", nonce=nonce, outcome=outcome))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def begun(store: Store) -> Store:
    """After an accepted round that left ``e0``."""
    compute(store, "n0", b"e0")
    hear(store, "n0", "accepted")
    return store


def kept(store: Store) -> list[bytes]:
    """Every carry in the file, oldest first."""
    return [data for (data,) in run_sql(store, "SELECT data FROM carries ORDER BY id")]


def test_an_accepted_carry_and_the_one_before_stay(begun: Store) -> None:
    """Its round may still be abandoned."""
    compute(begun, "n1", b"e1")

    hear(begun, "n1", "accepted")

    assert carry_of(begun, NAME) == b"e1"
    assert kept(begun) == [b"e0", b"e1"]


def test_a_carry_knows_its_round_and_whether_its_update_waits(begun: Store) -> None:
    compute(begun, "n1", b"e1")

    assert [(row.nonce, row.round, row.waits) for row in begun.carries()] == [
        ("n0", 3, False),
        ("n1", 3, True),
    ]


def test_a_carry_that_was_dropped_meanwhile_has_no_bytes(begun: Store) -> None:
    [row] = begun.carries()

    begun.drop_carries([row])

    assert (begun.carry(row), begun.carries()) == (None, [])


def test_a_rejected_update_brings_the_carry_from_before_its_round_back(begun: Store) -> None:
    compute(begun, "n1", b"e1")

    hear(begun, "n1", "rejected")

    assert carry_of(begun, NAME) == b"e0"
    assert kept(begun) == [b"e0"]


def test_after_a_rejected_first_update_there_is_no_carry(store: Store) -> None:
    compute(store, "n1", b"e1")

    hear(store, "n1", "rejected")

    assert carry_of(store, NAME) is None


def test_a_rejected_update_leaves_the_carry_of_a_later_round_alone(begun: Store) -> None:
    compute(begun, "n1", b"e1")
    compute(begun, "n2", b"e2")

    hear(begun, "n1", "rejected")
    assert carry_of(begun, NAME) == b"e2"

    hear(begun, "n2", "accepted")
    assert carry_of(begun, NAME) == b"e2"
    assert kept(begun) == [b"e0", b"e2"]


@pytest.mark.parametrize("first", ["n1", "n2"])
def test_two_rejected_updates_bring_the_carry_from_before_both_back(begun: Store, first: str) -> None:
    compute(begun, "n1", b"e1")
    compute(begun, "n2", b"e2")

    hear(begun, first, "rejected")
    hear(begun, "n2" if first == "n1" else "n1", "rejected")

    assert carry_of(begun, NAME) == b"e0"


def test_a_rejected_update_brings_the_accepted_carry_back(begun: Store) -> None:
    compute(begun, "n1", b"e1")
    compute(begun, "n2", b"e2")

    hear(begun, "n1", "accepted")
    hear(begun, "n2", "rejected")

    assert carry_of(begun, NAME) == b"e1"


def test_a_word_on_one_tiers_update_changes_no_other_tiers_carry(begun: Store) -> None:
    compute(begun, "n1", b"other", "run/ef/strong")
    compute(begun, "n2", b"e2")

    hear(begun, "n1", "rejected")
    hear(begun, "n2", "accepted")

    assert (carry_of(begun, "run/ef/strong"), carry_of(begun, NAME)) == (None, b"e2")


def test_a_round_without_carry_keeps_the_carry_before(begun: Store) -> None:
    for nonce, outcome in (("n1", "accepted"), ("n2", "rejected")):
        compute(begun, nonce, None)
        hear(begun, nonce, outcome)

        assert carry_of(begun, NAME) == b"e0"


@pytest.mark.parametrize(("outcome", "left"), [("accepted", b"e1"), ("rejected", b"e0")])
def test_the_word_may_come_to_the_next_process(tmp_path: Path, outcome: str, left: bytes) -> None:
    store = open_store(tmp_path)
    compute(store, "n0", b"e0")
    hear(store, "n0", "accepted")
    compute(store, "n1", b"e1")
    store.close()

    again = open_store(tmp_path)
    assert carry_of(again, NAME) == b"e1"
    hear(again, "n1", outcome)
    again.close()

    last = open_store(tmp_path)
    assert carry_of(last, NAME) == left
    last.close()


def test_carry_and_outbox_hear_the_word_together_or_not_at_all(begun: Store) -> None:
    compute(begun, "n1", b"e1")
    run_sql(begun, "CREATE TRIGGER fail BEFORE INSERT ON history BEGIN SELECT RAISE(ABORT, 'full'); END")

    with pytest.raises(StoreError, match="full"):
        hear(begun, "n1", "rejected")

    assert begun.waits("n1")
    assert carry_of(begun, NAME) == b"e1"


# -- a whole device --------------------------------------------------------------------------------------------


def test_after_a_rejection_the_carry_before_is_read(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start()
    server.open(world)
    server.ack(server.update(), "rejected", "closed-round")
    agent.event("rejected")
    server.open(world, number=2)

    update = server.update(2)

    expected, _, _ = tiny.expected_round(world, world.job(), tiny.ROWS)
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-5)


def test_a_device_that_is_not_sampled_keeps_its_carry_to_the_byte(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    name = f"run/{world.bundle.manifest.program}/{world.bundle.manifest.tier}"
    agent = start()
    server.open(world)
    server.ack(server.update())
    agent.event("accepted")
    before = carry_of(agent.agent.store, name)
    for number in (2, 3):
        server.announce(world.announcement(number=number))
        server.announce(world.announcement(number=number, state="closed"))
    agent.stop()
    store = store_of(tmp_path)
    after = carry_of(store, name)
    store.close()

    start()
    server.open(world, number=4)
    update = server.update(4)

    assert before is not None and after == before
    _, carry, _ = tiny.expected_round(world, world.job(), tiny.ROWS)
    expected, _, _ = tiny.expected_round(world, world.job(), tiny.ROWS, carry)
    np.testing.assert_allclose(weights_of(update)["head.w"], expected, rtol=1e-5)
