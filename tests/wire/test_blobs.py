"""Blobs: cut, described, checked, joined."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.blobs import BlobRef, describe, split, verify_blob
from tests.support.errors import BundleError, refuses
from tests.wire.texts import LETTERS

DATA = st.binary(max_size=300)
CHUNK = st.integers(min_value=1, max_value=64)


@given(DATA, CHUNK)
def test_chunks_join_to_the_blob_and_each_is_accepted_in_its_place(data: bytes, chunk: int) -> None:
    ref = describe(data, chunk)
    pieces = list(split(data, chunk))

    ref.check(limit=1000)
    assert len(pieces) == ref.count
    assert all(len(piece) <= chunk for piece in pieces)
    assert all(ref.accepts(index, piece) for index, piece in enumerate(pieces))
    assert verify_blob(ref, b"".join(pieces)) == data


@given(st.binary(min_size=1, max_size=300), CHUNK, st.data())
def test_a_changed_byte_is_refused(data: bytes, chunk: int, draw: st.DataObject) -> None:
    ref = describe(data, chunk)
    place = draw.draw(st.integers(0, len(data) - 1))
    damaged = data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]

    index = place // chunk
    assert not ref.accepts(index, damaged[index * chunk : (index + 1) * chunk])
    with refuses(BundleError, sha256=...):
        verify_blob(ref, damaged)


@given(DATA, CHUNK, st.integers(-3, 400))
def test_an_index_that_does_not_exist_accepts_nothing(data: bytes, chunk: int, index: int) -> None:
    ref = describe(data, chunk)

    if not 0 <= index < ref.count:
        assert not ref.accepts(index, b"")
        assert not ref.accepts(index, data)


@pytest.mark.parametrize("size", [1, 99, 101, 1 << 40])
def test_a_chunk_of_another_length_than_the_blob_says_is_no_chunk_of_it(size: int) -> None:
    data = bytes(100)
    lying = BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=size, chunk=1 << 50)
    several = describe(data, 40)
    lying_list = msgspec.structs.replace(several, size=size if size <= 120 else 81)

    assert not lying.accepts(0, data)
    assert not lying_list.accepts(2, data[80:])


def test_a_blob_of_one_chunk_carries_no_digest_list() -> None:
    ref = describe(b"edgefl", 6)

    assert (ref.count, ref.digests, ref.sha256) == (1, b"", hashlib.sha256(b"edgefl").hexdigest())


def test_an_empty_blob_has_one_empty_chunk() -> None:
    ref = describe(b"", 8)

    assert (ref.count, list(split(b"", 8)), ref.accepts(0, b"")) == (1, [b""], True)


GOOD = describe(bytes(20), 8)


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1},
        {"chunk": 0},
        {"chunk": -8},
        {"size": 1, "chunk": 1 << 30, "digests": b""},
        {"size": 0, "chunk": (1 << 27) + 1, "digests": b""},
        {"sha256": "ab"},
        {"sha256": "Z" * 64},
        {"digests": b""},
        {"digests": bytes(64)},
        {"size": 8},
        {"size": 1 << 62},
    ],
)
def test_a_reference_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    ref: BlobRef = msgspec.structs.replace(GOOD, **change)

    with pytest.raises(BundleError, match="malformed"):
        ref.check(limit=1 << 30)


def test_a_blob_over_the_limit_is_refused_with_both_numbers() -> None:
    with refuses(BundleError, size=20, limit=19):
        GOOD.check(limit=19)


@given(
    st.builds(
        BlobRef,
        sha256=st.text(LETTERS, max_size=70),
        size=st.integers(-(2**63), 2**63 - 1),
        chunk=st.integers(-(2**63), 2**63 - 1),
        digests=st.binary(max_size=100),
    )
)
def test_whatever_a_server_sends_is_checked_without_a_traceback(ref: BlobRef) -> None:
    with pytest.raises(BundleError):
        ref.check(limit=1 << 30)
