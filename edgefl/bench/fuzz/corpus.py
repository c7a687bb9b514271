"""Genuine messages of a federation: those that an honest round sent, and one of each kind that it had no reason to send."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from edgefl.bench.fuzz.mutate import mutated, random_topic
from edgefl.wire.errors import ProtocolError
from edgefl.wire.mqtt.messages import (
    Ack,
    Decline,
    Hello,
    Message,
    Progress,
    Round,
    Status,
    Task,
    decode,
    encode,
)
from edgefl.wire.mqtt.topics import Topics

_NONCE = "0123456789abcdef"
_MOST = 400


def further_messages() -> list[Message]:
    """What an undisturbed round may not send."""
    progress = Progress(
        round=1,
        tier="all",
        stage="train",
        step=1,
        steps=2,
        loss=0.5,
        step_ms=1,
        peak_bytes=1,
        down_bytes=1,
        up_bytes=1,
    )
    return [
        Ack(round=1, nonce=_NONCE, status="missing", missing=[0, 1]),
        Ack(round=1, nonce=_NONCE, status="rejected", reason="stale", text="too late"),
        Decline(round=1, nonce=_NONCE, reason="no-memory", text="too large"),
        Hello(agent="edgefl/0", memory_bytes=1 << 30, cores=1, samples=10, engines={"onnxruntime": "1"}),
        Status(online=False),
        progress,
    ]


@dataclass(frozen=True)
class Fuzzer:
    """Draws messages, (topic, payload), for one side of the federation ``name``. ``heard`` are genuine messages.

    Not among them are those that a broker without access lists cannot tell from the right ones, as long as nobody signs:
    for a server the hello and status of an honest device, and a whole hello of a stranger, who takes part then; for a device
    a whole announcement and a whole task.
    """

    name: str
    honest: tuple[str, ...]
    heard: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, name: str, honest: Iterable[str], heard: Iterable[tuple[str, bytes]], newest: int) -> Fuzzer:
        """With at most some hundred of the messages that were ``heard``, of rounds up to ``newest``."""
        old = [pair for pair in heard if _round_of(*pair) <= newest]
        return cls(name, tuple(honest), tuple(old[-_MOST:]))

    @cached_property
    def _of_devices(self) -> list[tuple[str, bytes]]:
        return [pair for pair in self.heard if "/devices/" in pair[0]]

    @cached_property
    def _chunks(self) -> list[str]:
        root = Topics(self.name).root
        return [topic for topic, _ in self.heard if "/blobs/" in topic] or [f"{root}/blobs/{'0' * 64}/0"]

    def to_server(self, rng: random.Random) -> tuple[str, bytes]:
        """What a stranger sends, and what is sent in the name of an honest device that is no word of its own."""
        topic, payload = self._drawn(rng, self._of_devices)
        root = Topics(self.name).root
        joins = _reads(Hello, payload)
        if rng.random() < 0.3:
            stray = random_topic(rng, root)
            return f"{stray}/x" if joins or self._speaks_for_honest(stray) else stray, payload
        device, _, leaf = topic.partition("/devices/")[2].partition("/")
        if leaf in ("hello", "status") or rng.random() < 0.5:
            device = f"fuzz-{rng.randrange(10_000)}"
        if leaf == "hello" and joins:
            leaf = "progress"
        return f"{root}/devices/{device}/{leaf}", payload

    def _speaks_for_honest(self, topic: str) -> bool:
        return any(f"/devices/{device}/" in topic for device in self.honest)

    def to_device(self, rng: random.Random, device: str) -> tuple[str, bytes]:
        """What a false server sends to ``device``."""
        topics = Topics(self.name)
        mine = topics.device(device)
        _, payload = self._drawn(rng, self.heard)
        topic = rng.choice(
            (mine.tasks, mine.acks, mine.profile_requests, topics.current_round, rng.choice(self._chunks))
        )
        forged = (topic == topics.current_round and _reads(Round, payload)) or (
            topic == mine.tasks and _reads(Task, payload)
        )
        return mine.acks if forged else topic, payload

    def _drawn(self, rng: random.Random, heard: Sequence[tuple[str, bytes]]) -> tuple[str, bytes]:
        topic, payload = rng.choice(heard)
        if rng.random() < 0.2:
            payload = encode(rng.choice(further_messages()))
        return topic, mutated(rng, payload, [rng.choice(heard)[1]])


def _round_of(topic: str, payload: bytes) -> int:
    """The round that a genuine message is about; 0 for none."""
    _, found, rest = topic.partition("/updates/")
    if found:
        return int(rest.partition("/")[0])
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0
    number = fields.get("round", 0) if isinstance(fields, dict) else 0
    return number if isinstance(number, int) else 0


def _reads(kind: type[Message], payload: bytes) -> bool:
    try:
        decode(kind, payload)
    except ProtocolError:
        return False
    return True
