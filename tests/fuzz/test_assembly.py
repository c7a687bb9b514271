"""The assembly of updates as a state machine: whatever devices send, it holds what it counts, and no more than it may."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edgefl.errors import UpdateRejected
from edgefl.wire.mqtt.messages import UpdateChunk
from edgefl_server.updates.reassembly import (
    CHUNK_OVERHEAD_BYTES,
    UPDATE_OVERHEAD_BYTES,
    ChunkReassembler,
    ReassembledUpdate,
)

MOST_BYTES, UPDATE_BYTES = 3_000, 1_000
DEVICES = st.sampled_from(("one", "two", "three"))
DATA = st.sampled_from([bytes([n]) * size for n in range(3) for size in (1, 40, 300, 900)])


class Uploads(RuleBasedStateMachine):
    """Honest chunks in any order, and chunks that are wrong in every field."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = ChunkReassembler(max_update_bytes=UPDATE_BYTES, max_bytes=MOST_BYTES, min_chunk_bytes=1)

    def _add(self, device: str, chunk: UpdateChunk) -> None:
        try:
            done = self.parts.add(device, chunk)
        except UpdateRejected:
            self.parts.drop(device)  # as the intake does
            return
        if isinstance(done, ReassembledUpdate):
            assert hashlib.sha256(done.data).hexdigest() == done.sha256 == chunk.sha256

    @rule(device=DEVICES, data=DATA, pieces=st.integers(1, 4), index=st.integers(0, 3))
    def honest(self, device: str, data: bytes, pieces: int, index: int) -> None:
        size = -(-len(data) // pieces)
        count = -(-len(data) // size)
        at = min(index, count - 1)
        self._add(
            device,
            UpdateChunk(
                nonce="n",
                sha256=hashlib.sha256(data).hexdigest(),
                index=at,
                count=count,
                size=len(data),
                data=data[at * size : (at + 1) * size],
            ),
        )

    @rule(
        device=DEVICES,
        sha256=st.one_of(
            st.sampled_from([hashlib.sha256(b"a").hexdigest(), "", "0" * 5000]), st.text(max_size=70)
        ),
        index=st.one_of(st.integers(-2, 5), st.integers(-(2**63), 2**64 - 1)),
        count=st.one_of(st.integers(-2, 5), st.integers(-(2**63), 2**64 - 1)),
        size=st.one_of(st.integers(-2, 2000), st.integers(-(2**63), 2**64 - 1)),
        data=st.binary(max_size=1200),
    )
    def wrong(self, device: str, sha256: str, index: int, count: int, size: int, data: bytes) -> None:
        self._add(
            device, UpdateChunk(nonce="n", sha256=sha256, index=index, count=count, size=size, data=data)
        )

    @rule(device=DEVICES)
    def dropped(self, device: str) -> None:
        self.parts.drop(device)

    @rule()
    def round_over(self) -> None:
        self.parts.clear()
        assert self.parts.held_bytes == 0

    @invariant()
    def counts_what_it_holds(self) -> None:
        partials = self.parts._partial.values()
        held = sum(len(piece) for partial in partials for piece in partial.chunks.values())
        around = sum(
            UPDATE_OVERHEAD_BYTES + CHUNK_OVERHEAD_BYTES * len(partial.chunks) for partial in partials
        )
        assert held + around == self.parts.held_bytes <= MOST_BYTES + UPDATE_BYTES
        assert all(len(partial.chunks) <= UPDATE_BYTES for partial in self.parts._partial.values())
        assert all(len(partial.head.sha256) <= 64 for partial in self.parts._partial.values())


TestUploads = Uploads.TestCase
TestUploads.settings = settings(max_examples=60, stateful_step_count=30)
