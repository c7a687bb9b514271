"""Chunks into updates, from devices nobody trusts."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from edgefl_server.updates.reassembly import (
    CHUNK_OVERHEAD_BYTES,
    MAX_DAMAGED,
    MAX_MISSING,
    UPDATE_OVERHEAD_BYTES,
    ChunkReassembler,
    MissingChunks,
    ReassembledUpdate,
)
from tests.server.fleet import chunks_of
from tests.support.errors import UpdateRejected, refuses


def assembly(update_bytes: int = 1000, max_bytes: int = 10_000) -> ChunkReassembler:
    return ChunkReassembler(max_update_bytes=update_bytes, max_bytes=max_bytes, min_chunk_bytes=1)


def held(nbytes: int, pieces: int = 1, updates: int = 1) -> int:
    """What that takes in memory."""
    return nbytes + pieces * CHUNK_OVERHEAD_BYTES + updates * UPDATE_OVERHEAD_BYTES


@given(st.binary(max_size=200), st.integers(1, 60), st.randoms(use_true_random=False), st.booleans())
def test_any_order_makes_the_update(data: bytes, size: int, random: Any, again: bool) -> None:
    pieces = chunks_of(data, "n", size)
    sent = pieces + (pieces[:-1] if again else [])
    random.shuffle(sent)
    parts = assembly()
    results = [parts.add("d", chunk) for chunk in sent]
    assert ReassembledUpdate(hashlib.sha256(data).hexdigest(), data) in results


def test_what_surrounds_the_bytes_of_an_update_is_bounded_too() -> None:
    honest, parts = chunks_of(bytes(50), "n", 10)[0], assembly()
    for changes in ({"sha256": "0" * (5 << 20)}, {"nonce": "n" * 65}):
        with pytest.raises(UpdateRejected, match="letters"):
            parts.add("d", structs.replace(honest, **changes))
    assert parts.held_bytes == 0


def test_the_last_chunk_names_the_gaps() -> None:
    pieces, parts = chunks_of(bytes(50), "n", 10), assembly()
    assert parts.add("d", pieces[1]) is None
    assert parts.add("d", pieces[4]) == MissingChunks([0, 2, 3])
    assert [parts.add("d", pieces[index]) for index in (0, 2)] == [None, None]
    assert isinstance(parts.add("d", pieces[3]), ReassembledUpdate)


def test_devices_do_not_mix() -> None:
    one, other, parts = chunks_of(b"a" * 20, "n", 10), chunks_of(b"b" * 20, "n", 10), assembly()
    parts.add("one", one[0])
    parts.add("other", other[0])
    assert parts.add("one", one[1]) == ReassembledUpdate(one[0].sha256, b"a" * 20)
    assert parts.held_bytes == held(10)


def test_an_update_over_the_limit_is_refused_with_both_sizes() -> None:
    (first, *_) = chunks_of(bytes(1001), "n", 100)
    with refuses(UpdateRejected, size=1001, reason="too-large"):
        assembly(update_bytes=1000).add("d", first)


def test_a_device_may_not_cut_its_update_into_crumbs() -> None:
    parts = ChunkReassembler(max_update_bytes=1 << 30, max_bytes=1 << 30)
    honest = chunks_of(bytes(1000), "n", 300)[0]
    for changes in ({"count": 5}, {"count": 3 * 10**7, "size": 1 << 30}, {"data": bytes(255)}):
        with pytest.raises(UpdateRejected, match="every chunk but the last has at least 256"):
            parts.add("d", structs.replace(honest, **changes))
    assert parts.held_bytes == 0


def test_gaps_are_named_some_at_a_time_and_the_last_chunk_asks_for_more() -> None:
    pieces, parts = chunks_of(bytes(3000), "n", 1), assembly(update_bytes=3000)
    answer, asked = parts.add("d", pieces[-1]), []
    while isinstance(answer, MissingChunks):
        assert len(answer.indices) <= MAX_MISSING
        asked += answer.indices
        for index in answer.indices:
            answer = parts.add("d", pieces[index])
    assert isinstance(answer, ReassembledUpdate) and set(asked) == set(range(3000))


def test_a_damaged_update_may_be_sent_again_a_few_times() -> None:
    good, parts = chunks_of(b"a" * 50, "n", 10), assembly()
    bad = [*good[:2], structs.replace(good[2], data=b"b" * 10), *good[3:]]
    for _ in range(MAX_DAMAGED):
        answer = [parts.add("d", chunk) for chunk in bad][-1]
        assert isinstance(answer, MissingChunks) and answer.indices == [0, 1, 2, 3, 4]
        assert answer.text.startswith("the 50 bytes that came have the digest ")
    assert isinstance([parts.add("d", chunk) for chunk in good][-1], ReassembledUpdate)
    with pytest.raises(UpdateRejected, match="digest"):
        [parts.add("d", chunk) for chunk in bad]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": 1001}, "too-large"),
        ({"index": 5}, "malformed"),
        ({"index": -1}, "malformed"),
        ({"count": 0}, "malformed"),
        ({"count": 10**9}, "malformed"),
        ({"data": bytes(51)}, "malformed"),
        ({"count": 1, "index": 0}, "malformed"),
    ],
)
def test_an_impossible_chunk_is_refused(changes: dict[str, Any], reason: str) -> None:
    honest, parts = chunks_of(bytes(50), "n", 10)[0], assembly()
    with pytest.raises(UpdateRejected) as refused:
        parts.add("d", structs.replace(honest, **changes))
    assert refused.value.reason == reason and parts.held_bytes == 0


# -- at the edges ------------------------------------------------------------------------------------------------


def test_an_update_as_large_as_the_limit_in_the_smallest_chunks_is_taken() -> None:
    parts = ChunkReassembler(max_update_bytes=1024, max_bytes=1024)
    pieces = chunks_of(bytes(1024), "n", 256)
    assert len(pieces) == 4
    assert [parts.add("d", chunk) for chunk in pieces[:3]] == [None] * 3
    assert parts.held_bytes == held(768, 3)
    assert parts.add("d", pieces[3]) == ReassembledUpdate(pieces[0].sha256, bytes(1024))
    assert parts.held_bytes == 0


def test_the_last_chunk_may_be_short_or_empty() -> None:
    parts, last = (
        ChunkReassembler(max_update_bytes=1024, max_bytes=1024),
        chunks_of(bytes(1000), "n", 256)[-1],
    )
    assert len(last.data) == 232
    assert parts.add("d", last) == MissingChunks([0, 1, 2])
    with pytest.raises(UpdateRejected, match="1000 bytes in 5 chunks"):
        parts.add("e", structs.replace(last, index=4, count=5))


def test_bytes_up_to_the_bound_are_held_and_one_device_alone_may_pass_it() -> None:
    pieces, parts = chunks_of(bytes(30), "n", 10), assembly(max_bytes=held(20, 2, 2))
    parts.add("first", pieces[0])
    parts.add("second", pieces[0])
    assert parts.held_bytes == held(20, 2, 2)
    alone = assembly(max_bytes=5)
    assert [alone.add("d", chunk) for chunk in pieces[:2]] == [None, None] and alone.held_bytes == held(20, 2)


def test_the_device_that_was_fed_last_is_kept() -> None:
    pieces, parts = chunks_of(bytes(30), "n", 10), assembly(max_bytes=held(35, 3, 2))
    for device in ("first", "second"):
        parts.add(device, pieces[0])
    parts.add("first", pieces[1])
    parts.add("third", pieces[0])
    assert parts.held_bytes == held(30, 3, 2) and parts.dropped == 1
    assert parts.add("first", pieces[2]) == ReassembledUpdate(pieces[0].sha256, bytes(30))
    assert parts.add("second", pieces[2]) == MissingChunks([0, 1])


def test_a_duplicate_neither_counts_nor_replaces_what_came_first() -> None:
    pieces, parts = chunks_of(b"a" * 30, "n", 10), assembly()
    parts.add("d", pieces[0])
    parts.add("d", structs.replace(pieces[0], data=b"b" * 10))
    assert parts.held_bytes == held(10)
    assert [parts.add("d", chunk) for chunk in pieces[1:]][-1] == ReassembledUpdate(
        pieces[0].sha256, b"a" * 30
    )


@pytest.mark.parametrize("changes", [{"nonce": "m"}, {"sha256": "0" * 64}, {"count": 4}, {"size": 31}])
def test_a_chunk_of_another_update_begins_anew(changes: dict[str, Any]) -> None:
    pieces, parts = chunks_of(bytes(30), "n", 10), assembly()
    parts.add("d", pieces[0])
    assert parts.add("d", structs.replace(pieces[1], **changes)) is None
    assert parts.held_bytes == held(10)
    assert parts.add("d", pieces[2]) == MissingChunks([0, 1])


def test_chunks_that_do_not_add_up_to_the_size_are_refused() -> None:
    pieces, parts = chunks_of(bytes(30), "n", 10), assembly()
    parts.add("d", pieces[0])
    with pytest.raises(UpdateRejected, match="hold more bytes than it has"):
        parts.add("d", structs.replace(pieces[1], data=bytes(21)))
    assert parts.held_bytes == 0
    for chunk in pieces[:2]:
        parts.add("d", chunk)
    with pytest.raises(UpdateRejected, match="should have 30 bytes, found 29"):
        parts.add("d", structs.replace(pieces[2], data=bytes(9)))
    assert parts.held_bytes == 0


@pytest.mark.parametrize(("missing", "named"), [(1024, [*range(1024)]), (1025, [*range(1023), 1025])])
def test_as_many_gaps_are_named_as_fit_and_beyond_that_the_last_chunk(missing: int, named: list[int]) -> None:
    last = chunks_of(bytes(missing + 1), "n", 1)[-1]
    assert assembly(update_bytes=2000).add("d", last) == MissingChunks(named)


def test_clear_forgets_partial_and_damaged_updates() -> None:
    good, parts = chunks_of(b"a" * 20, "n", 10), assembly()
    bad = [good[0], structs.replace(good[1], data=b"b" * 10)]
    for _ in range(MAX_DAMAGED):
        first, last = (parts.add("d", chunk) for chunk in bad)
        assert first is None and isinstance(last, MissingChunks) and last.indices == [0, 1]
    assert isinstance([parts.add("other", chunk) for chunk in bad][-1], MissingChunks), (
        "each device has its own"
    )
    parts.add("d", good[0])
    parts.clear()
    assert parts.held_bytes == 0
    assert parts.add("d", good[1]) == MissingChunks([0])
    parts.drop("d")
    parts.drop("nobody")
    assert parts.held_bytes == 0
    for _ in range(MAX_DAMAGED):
        first, last = (parts.add("d", chunk) for chunk in bad)
        assert first is None and isinstance(last, MissingChunks) and last.indices == [0, 1]
    assert MAX_DAMAGED == 3
