"""Messages of protocol version 1, encoded as msgpack maps. Version 2 signs them (:mod:`edgefl.wire.mqtt.envelope`).

Readers ignore unknown fields, so fields can be added. A message with another ``v`` is refused with an error that names
both versions. The encoded bytes of every message are in conformance/edgefl_conformance/data/golden.

The messages of ``edgefl profile --fleet`` (``Profile...``) are independent of training runs. A device that does not
know them does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from edgefl.errors import ProtocolError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.tensors import Piece

POWER = ("battery", "charging")
LINK = ("metered", "unmetered")
THERMAL = ("cool", "warm", "hot")
"""Known values of :class:`Conditions`; thermal states in ascending order. ``charging``: power that does not run out, with
or without a battery. ``hot``: the processor is throttled, or will be soon."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Conditions of a device, part of :class:`Hello`. Used only for selection, because the device reports them itself.

    Attributes:
        power: Value of :data:`POWER`, "" if unknown.
        link: Value of :data:`LINK`, "" if unknown.
        thermal: Value of :data:`THERMAL`, "" if unknown.
        available: True if the owner's rules allow training now. None: unknown.
    """

    power: str = ""
    link: str = ""
    thermal: str = ""
    available: bool | None = None


UNKNOWN_CONDITIONS = Conditions()


def known_conditions(conditions: Conditions) -> Conditions:
    """Return ``conditions`` with values that this release does not know replaced by "".

    Equal results are the same object, to save memory in a large fleet.
    """
    return _intern_conditions(
        conditions.power if conditions.power in POWER else "",
        conditions.link if conditions.link in LINK else "",
        conditions.thermal if conditions.thermal in THERMAL else "",
        conditions.available,
    )


@cache
def _intern_conditions(power: str, link: str, thermal: str, available: bool | None) -> Conditions:
    """Return the cached conditions with these values."""
    return Conditions(power=power, link=link, thermal=thermal, available=available)


VERSION = 1
ELSEWHERE = 3
"""``v`` of a :class:`Round` that a reader of version 1 would misread: its offers are in a blob, or its blobs only on
mirrors."""
ENVELOPE_BYTES = 512
"""Largest size of an UpdateChunk without its data. Data are cut so that the whole payload fits in ``chunk_bytes``."""

MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""Exceptions that msgspec raises for invalid bytes. Deep nesting and broken UTF-8 raise Python's own exceptions."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all messages. ``v`` is the protocol version."""

    v: int = VERSION


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Bundles (compiled models, named by the blob of their manifest) in one format, by tier.

    Attributes:
        bundles: Blob of each tier's manifest.
        signatures: Ed25519 signature of each tier's bundle. Empty if the server has no key.
    """

    bundles: dict[str, BlobRef]
    signatures: dict[str, bytes] = {}


class LiveRound(msgspec.Struct, frozen=True, kw_only=True):
    """Earlier round that still accepts updates. Its fields have the same meaning as in :class:`Round`."""

    model_version: str
    units: dict[str, tuple[BlobRef, ...]]
    hyper: dict[str, float]


class Round(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Announcement of the open round, or of the last closed one. Retained on ``rounds/current``.

    Attributes:
        run: Name of the training run. A device discards all state of another run.
        round: Number of the round.
        state: ``open``, ``closed`` (until the next round opens), or ``done`` (the run is over).
        model_version: Version of the weights.
        offers: Bundles by format.
        units: Blobs of each unit's weights, by the unit's name: a keyframe (full weights), then the patches that
            lead to ``model_version``, in order (:mod:`edgefl.wire.patches`).
        hyper: Scalars of the algorithm for this round. They override the defaults of the manifest.
        base: Last round whose updates are in the model, 0 before the first. A carry (state that a device stored)
            from a later round is invalid, because that round was abandoned.
        deadline: End of the round in seconds since 1970.
        mirrors: URLs of the blobs' mirrors (:mod:`edgefl.wire.mirrors`).
        mirrors_only: True if only the mirrors serve the blobs, and the broker does not.
        pages: Blob of the :class:`Page` that contains ``offers`` and all ``units``. Those fields are empty then.
        live: Earlier rounds that also accept updates, by number. Devices with a task of one of these continue.
    """

    # A factory, so that it is written, as all but the last four are.
    v: int = msgspec.field(default_factory=lambda: VERSION)
    run: str
    round: int
    state: Literal["open", "closed", "done"]
    model_version: str
    offers: dict[str, Offer]
    units: dict[str, tuple[BlobRef, ...]]
    hyper: dict[str, float]
    base: int
    deadline: float
    mirrors: tuple[str, ...] = ()
    mirrors_only: bool = False
    pages: BlobRef | None = None
    live: dict[int, LiveRound] = {}

    def at(self, number: int) -> Round | None:
        """Return the announcement as it was for round ``number``: with that round's weights and scalars.

        None: the round does not accept updates.
        """
        if self.state != "open" or number == self.round:
            return self if self.state == "open" else None
        live = self.live.get(number)
        if live is None:
            return None
        return msgspec.structs.replace(
            self, round=number, model_version=live.model_version, units=live.units, hyper=live.hyper
        )

    @property
    def takes(self) -> tuple[int, ...]:
        """Numbers of the rounds that accept updates, in ascending order. Empty unless the current round is open."""
        return (*sorted(self.live), self.round) if self.state == "open" else ()

    def offer(self, format: str) -> Offer:
        """Return the bundles in ``format``. The result has no bundles if the round has none in that format."""
        return self.offers.get(format, Offer(bundles={}))

    def formats_of(self, tier: str) -> tuple[str, ...]:
        """Return the names of the formats in which ``tier`` has a bundle, sorted."""
        return tuple(sorted(name for name, offer in self.offers.items() if tier in offer.bundles))

    @property
    def page(self) -> bytes:
        """Encoded :class:`Page` of this announcement: its offers and units (stages of the model), which grow with the
        model.
        """
        live = {number: each.units for number, each in self.live.items()}
        return _encoder.encode(Page(offers=self.offers, units=self.units, live=live))

    def paged(self, pages: BlobRef) -> Round:
        """Return a copy of the announcement in which the blob ``pages`` replaces offers and units (stages of the
        model), for large models.
        """
        live = {number: msgspec.structs.replace(each, units={}) for number, each in self.live.items()}
        return msgspec.structs.replace(self, v=ELSEWHERE, offers={}, units={}, live=live, pages=pages)

    def whole(self, page: bytes) -> Round:
        """Return a copy of the announcement with offers and units (stages of the model) from its page.

        Args:
            page: Verified bytes of the blob ``pages``.

        Raises:
            ProtocolError: The page is malformed.
        """
        try:
            read = _page.decode(page)
        except MALFORMED as error:
            raise ProtocolError(
                f"the page of the announcement of round {self.round} is malformed: {error}", round=self.round
            ) from error
        live = {
            number: msgspec.structs.replace(each, units=read.live.get(number, {}))
            for number, each in self.live.items()
        }
        return msgspec.structs.replace(self, offers=read.offers, units=read.units, live=live, pages=None)


class Page(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Offers and units (stages of the model) of a :class:`Round`, stored as a blob.

    Attributes:
        offers: Bundles by format.
        units: Blobs of each unit's weights, by the unit's name.
        live: Blobs of each unit's weights in earlier rounds that accept updates, by number of the round and name
            of the unit.
    """

    offers: dict[str, Offer]
    units: dict[str, tuple[BlobRef, ...]]
    live: dict[int, dict[str, tuple[BlobRef, ...]]] = {}


class Status(Message, frozen=True, kw_only=True):
    """Connection state of a device. Retained on ``devices/<id>/status``; the last will sends ``online`` False."""

    online: bool


class Hello(Message, frozen=True, kw_only=True):
    """Description of a device. Retained on ``devices/<id>/hello``.

    A device sends it after each connection, and when ``conditions`` change.

    Attributes:
        agent: Name and version of the agent's software, for display.
        memory_bytes: Memory that the device offers. The server chooses a tier by it, and by the device's name.
        cores: Number of processor cores.
        samples: Number of local samples.
        engines: Version of each engine, by name.
        tier: Tier that the device asks for. "": the server chooses.
        token: Name of a one-time token of `edgefl enroll token`, or "".
        proof: Proof that the device has the token (:mod:`edgefl.wire.enrolment`).
        conditions: Conditions of the device. Unset: unknown.
        again: True if only the conditions changed since the last hello on this connection. The server then does not
            repeat the task.
    """

    agent: str
    memory_bytes: int
    cores: int
    samples: int
    engines: dict[str, str]
    tier: str = ""
    token: str = ""
    proof: bytes = b""
    conditions: Conditions | msgspec.UnsetType = msgspec.UNSET
    again: bool | msgspec.UnsetType = msgspec.UNSET


class Task(Message, frozen=True, kw_only=True):
    """Request that a device takes part in a round. Sent on ``devices/<id>/tasks``.

    Attributes:
        run: Name of the training run.
        round: Number of the round.
        tier: Tier that the device trains.
        seed: Seed of batches and noise.
        nonce: Identifier of the task, which the device's answer repeats.
        samples: Most local samples to use. 0: all.
        ask: Send an offer before an update of several chunks (:class:`UpdateChunk`).
        progress_s: Least seconds between two messages of progress.
        shard: Shard for the topics of the update (:meth:`edgefl.wire.mqtt.topics.DeviceTopics.update`).
    """

    run: str
    round: int
    tier: str
    seed: int
    nonce: str
    samples: int = 0
    ask: bool | msgspec.UnsetType = msgspec.UNSET
    progress_s: float | msgspec.UnsetType = msgspec.UNSET
    shard: int | msgspec.UnsetType = msgspec.UNSET


class Progress(Message, frozen=True, kw_only=True):
    """Progress of a device's round, for display only. Sent on ``devices/<id>/progress`` with QoS 0.

    Attributes:
        round: Number of the round.
        tier: Tier of the device.
        stage: ``forward <k>``, ``train``, or :data:`FAILED` followed by a reason code.
        step: Number of completed steps (rows for ``forward``).
        steps: Number of all steps (rows for ``forward``).
        loss: Mean loss so far, NaN if there is none.
        step_ms: Time of the last step.
        peak_bytes: Peak of anonymous memory in this round.
        down_bytes: Bytes received in this round.
        up_bytes: Bytes sent in this round.
    """

    round: int
    tier: str
    stage: str
    step: int
    steps: int
    loss: float
    step_ms: float
    peak_bytes: int
    down_bytes: int
    up_bytes: int


class ResourceUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cost of a round on the device. Memory is anonymous memory in bytes. A client that cannot measure a number sends 0.

    Attributes:
        step_ms: Median time of a training step in milliseconds.
        forward_ms: Total time of the frozen units' forward pass in milliseconds.
        load_ms: Total time to load graphs in milliseconds.
        idle_bytes: Memory of the idle process.
        peak_bytes: Peak memory.
        down_bytes: Payload bytes of blob messages since the last update.
        down_wire_bytes: Bytes of the same messages including MQTT headers (:mod:`edgefl.wire.mqtt.topics`).
        variants: Chosen variant of each graph for which several were measured. "": the graph itself.
        dropped: Reason for each "graph/variant" that cannot run on this device.
        mirror_bytes: Bytes of blobs from mirrors. ``down_bytes`` and ``down_wire_bytes`` exclude them.
    """

    step_ms: float
    forward_ms: float
    load_ms: float
    idle_bytes: int
    peak_bytes: int
    down_bytes: int
    down_wire_bytes: int
    variants: dict[str, str] = {}
    dropped: dict[str, str] = {}
    mirror_bytes: int = 0


class UpdateFigures(Message, frozen=True, kw_only=True):
    """The fields of an :class:`Update` that describe its cost and its training, without the tensors.

    Decoding only these avoids a copy of the tensors.

    Attributes:
        tier: Tier of the device.
        metrics: Means over the local steps, by name.
        profile: Cost of the round.
    """

    tier: str
    metrics: dict[str, float]
    profile: ResourceUsage


class Update(Message, frozen=True, kw_only=True):
    """Result of a task. Its encoded bytes are sent in :class:`UpdateChunk` messages.

    Attributes:
        run: Name of the training run.
        round: Number of the round.
        device: Name of the device.
        nonce: Nonce of the task.
        tier: Tier of the device.
        model_version: Version of the weights that training started from.
        samples: Number of local samples used, at least 1.
        metrics: Means over the local steps, by name, such as ``loss``.
        profile: Cost of the round.
        codec: Encoding of ``tensors``, as in the bundle's manifest.
        codec_version: Version of ``codec``.
        tensors: Safetensors bytes.
    """

    run: str
    round: int
    device: str
    nonce: str
    tier: str
    model_version: str
    samples: int
    metrics: dict[str, float]
    profile: ResourceUsage
    codec: str
    codec_version: int
    tensors: bytes


class UpdateChunk(Message, frozen=True, kw_only=True):
    """One chunk of an encoded :class:`Update`. Sent on ``devices/<id>/updates/<round>/<index>``.

    If the task names a shard, the topic is ``devices/<id>/shards/<shard>/<round>/<index>``. A chunk without ``data`` is
    an offer, unless the update is empty. The device then sends the update after an :class:`Ack` that lists its chunks
    as missing.

    Attributes:
        nonce: Nonce of the task.
        sha256: Digest of the encoded update.
        index: Number of this chunk, from 0.
        count: Number of chunks.
        size: Bytes of the encoded update.
        data: Bytes of this chunk.
    """

    nonce: str
    sha256: str
    index: int
    count: int
    size: int
    data: bytes

    @property
    def is_offer(self) -> bool:
        """True if the message offers an update without sending its data."""
        return not self.data and self.size > 0


class Ack(Message, frozen=True, kw_only=True):
    """Answer of the server to an update, or to another message of a device. Sent on ``devices/<id>/acks``.

    Attributes:
        round: Number of the round. 0, with an empty ``nonce``, if it answers a :class:`Hello` or an unreadable message.
        nonce: Nonce of the task.
        status: ``accepted``, ``missing`` (send some chunks again) or ``rejected``.
        missing: Indices of the chunks to send again.
        reason: Short code that explains ``rejected``.
        text: Explanation for people.
        sha256: Digest of the update. A device ignores an ack for another digest.
        later_s: Seconds after which to repeat the hello, for the reason :data:`COME_LATER`.
    """

    round: int
    nonce: str
    status: Literal["accepted", "missing", "rejected"]
    missing: list[int] = []
    reason: str = ""
    text: str = ""
    sha256: str = ""
    later_s: float | msgspec.UnsetType = msgspec.UNSET


COME_LATER = "come-later"
"""Reason for which a hello is rejected: the server has no room. The device repeats it after ``later_s`` seconds."""

NO_CARRY = "no-carry"
"""Reason for a decline: the algorithm requires the carry of the previous exchange, and the device has none."""

NO_FORMAT = "no-format"
"""Reason for a decline: the tier has no bundle in the format of the device's engine."""

NO_MEMORY = "no-memory"
"""Reason for a decline: a graph of the bundle needs more memory than the device offers."""

WRONG_DATA = "wrong-data"
"""Reason for a decline: the local data do not fit the model."""

POLICY = "policy"
"""Reason for a decline: the owner's rules do not allow the round, or not now."""

TOO_MUCH = "too-much-work"
"""Reason for a decline: the round has more steps, or takes more time or disk, than the device allows."""

LARGE_CHUNKS = "large-chunks"
"""Reason for a decline: the chunks of the round's blobs exceed the messages that the device reads."""

CRASHED = "crashed"
"""Reason for a decline: the work on the round crashed the device's process, or its engine's."""

FAILED = "failed: "
"""Prefix of :class:`Progress` ``.stage`` after a failed attempt, followed by a code of :mod:`edgefl.wire.mqtt.reasons`."""

LOST_CHUNK = "no good chunk"
"""Code of a failed attempt: the broker lacks blobs of the round. The server then publishes them again."""


class Decline(Message, frozen=True, kw_only=True):
    """Message of a device that it sends no update for a task. Sent on ``devices/<id>/declines``.

    Reasons are :data:`NO_CARRY`, :data:`NO_FORMAT`, :data:`NO_MEMORY`, :data:`WRONG_DATA`, :data:`POLICY`,
    :data:`TOO_MUCH`, :data:`LARGE_CHUNKS` and :data:`CRASHED`. A server accepts any other reason too.

    Attributes:
        round: Number of the round.
        nonce: Nonce of the task.
        reason: Short code.
        text: Explanation. edgefl's own devices leave it empty.
    """

    round: int
    nonce: str
    reason: str
    text: str = ""


AnyMessage = TypeVar("AnyMessage", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_NO_BYTES = b"\xc4\x00"
_BYTES_MARKS = ((1, b"\xc4"), (2, b"\xc5"), (4, b"\xc6"))
"""Number of length bytes and first byte of msgpack's binary types bin 8, bin 16 and bin 32."""
_version = msgspec.msgpack.Decoder(Message)
_page = msgspec.msgpack.Decoder(Page)
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}
_VERSIONS: dict[type[Message], tuple[int, ...]] = {Round: (VERSION, ELSEWHERE)}
"""Accepted versions by message type. Other types accept only :data:`VERSION`."""


def encode(message: Message) -> bytes:
    """Return the msgpack bytes of a message."""
    return _encoder.encode(message)


def update_pieces(update: Update, tensors: Sequence[Piece]) -> list[Piece]:
    """Return the msgpack bytes of an update in pieces, without copying its tensors.

    Args:
        update: Update. Its own ``tensors`` are ignored.
        tensors: Safetensors bytes in pieces (:func:`edgefl.wire.tensors.pieces`).
    """
    head = encode(msgspec.structs.replace(update, tensors=b""))
    return [with_last_bytes(head, sum(map(len, tensors))), *tensors]


def with_last_bytes(encoded: bytes, size: int) -> bytes:
    """Return a msgpack map up to the data of its last value, to which the caller appends that data.

    Args:
        encoded: Map whose last value is empty bytes.
        size: Number of bytes that will be appended.
    """
    width, mark = next((width, mark) for width, mark in _BYTES_MARKS if size < 1 << 8 * width)
    return encoded.removesuffix(_NO_BYTES) + mark + size.to_bytes(width, "big")


def version_of(kind: type[Message], payload: Piece) -> int:
    """Return the protocol version of a message, which may be one that this release cannot decode.

    Args:
        kind: Expected type, for error texts.
        payload: Encoded message.

    Raises:
        ProtocolError: The message is malformed.
    """
    try:
        return _version.decode(payload).v
    except MALFORMED as error:
        raise ProtocolError(f"{kind.__name__} message is malformed: {error}") from error


def decode(kind: type[AnyMessage], payload: Piece) -> AnyMessage:
    """Return the message of type ``kind`` in ``payload``.

    Raises:
        ProtocolError: The message is malformed, contradicts itself, or has a version that this release does not read.
    """
    try:
        version = _version.decode(payload).v
        known = _VERSIONS.get(kind, (VERSION,))
        if version not in known:
            raise ProtocolError(
                f"{kind.__name__} has protocol version {version}, this side speaks {' and '.join(map(str, known))}: "
                "install the edgefl release that the other side runs",
                version=version,
            )
        if kind not in _decoders:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
        message: AnyMessage = _decoders[kind].decode(payload)
        if isinstance(message, Round):
            _check_round(message)
        return message
    except MALFORMED as error:
        raise ProtocolError(f"{kind.__name__} message is malformed: {error}") from error


def _check_round(message: Round) -> None:
    """Raise ProtocolError if fields of the announcement contradict each other."""
    elsewhere = message.pages is not None or message.mirrors_only
    if elsewhere and message.v != ELSEWHERE:
        raise ProtocolError(
            f"a Round of version {message.v} has no pages and no mirrors_only, found them: it is refused"
        )
    if message.pages is not None and (message.offers or message.units):
        raise ProtocolError(
            "a Round with pages has its offers and units there, found some beside them: it is refused"
        )


Nonce = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8,64}\Z")]
"""Identifier of a profile request. It is part of topics, so it has hexadecimal digits only."""
MOST_REPEATS = 1000
Repeat = Annotated[int, msgspec.Meta(ge=1, le=MOST_REPEATS)]
Wait = Annotated[float, msgspec.Meta(gt=0, le=86_400)]

BUSY = "busy"
NO_BUNDLE = "no-bundle"
SIGNATURE = "signature"
LATE = "late"
TOO_LARGE = "too-large"
PROFILE_FAILED = "failed"


class ProfileOffer(Message, frozen=True, kw_only=True):
    """Blobs of a profile request, which are published below ``profiles/<nonce>/blobs``. Retained on
    ``profiles/<nonce>/offer``.

    Attributes:
        until: Time in seconds since 1970 after which the next requester removes the blobs, because their owner crashed.
        blobs: References of the blobs.
    """

    until: float
    blobs: tuple[BlobRef, ...]


class ProfileRequest(Message, frozen=True, kw_only=True):
    """Request that a device measures a bundle. Sent on ``devices/<id>/profile-requests``, possibly several times.

    Attributes:
        nonce: Identifier of the request.
        bundles: Blob of the bundle's manifest, by format. The device measures the one for its engine.
        within_s: Seconds within which the device must answer.
        repeat: Number of measured runs of each graph.
        signatures: Signature of each bundle, by format.
    """

    nonce: Nonce
    bundles: dict[str, BlobRef]
    within_s: Wait
    repeat: Repeat = 20
    signatures: dict[str, bytes] = msgspec.field(default_factory=dict)


class ProfileAnswer(Message, frozen=True, kw_only=True):
    """Answer of a device to a profile request. Sent on ``devices/<id>/profiles``.

    Attributes:
        nonce: Identifier of the request.
        state: ``taken`` (another answer follows), ``done`` or ``declined``.
        reason: Short code if ``state`` is ``declined``.
        text: Explanation. edgefl's own devices leave it empty.
        profile: Encoded :class:`edgefl.wire.bundle.profiles.BundleProfile` if ``state`` is ``done``.
    """

    nonce: str
    state: Literal["taken", "done", "declined"]
    reason: str = ""
    text: str = ""
    profile: bytes = b""


def decline_profile(nonce: str, reason: str) -> ProfileAnswer:
    """Return the answer that declines a profile request.

    Args:
        nonce: Identifier of the request.
        reason: Short code.
    """
    return ProfileAnswer(nonce=nonce, state="declined", reason=reason)
