"""Messages of protocol version 1, as msgpack maps. Version 2 signs them (:mod:`edgefl.wire.mqtt.envelope`).

Readers ignore unknown fields, so a field may be added. A different ``v`` is refused with an error that names both versions.
The byte vectors of every message are in conformance/edgefl_conformance/data/golden.

The messages of ``edgefl profile --fleet`` (``Profile...``) are independent of training runs: a device that does not know
them stays silent.
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
"""Known values, those of heat in ascending order. ``charging``: power that does not run out, with or without a battery;
``hot``: the processor is throttled, or soon will be.
"""


class Conditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Power, link, temperature and availability of a device, part of :class:`Hello`. Unknown values are empty, or None.

    A device reports them itself, so only its selection depends on them.
    """

    power: str = ""
    link: str = ""
    thermal: str = ""
    available: bool | None = None


UNKNOWN_CONDITIONS = Conditions()


def known_conditions(conditions: Conditions) -> Conditions:
    """Return the conditions with unknown values emptied, as another release or a hostile device may send any text.

    Equal conditions are the same object, because a fleet has few different ones.
    """
    return _shared(
        conditions.power if conditions.power in POWER else "",
        conditions.link if conditions.link in LINK else "",
        conditions.thermal if conditions.thermal in THERMAL else "",
        conditions.available,
    )


@cache
def _shared(power: str, link: str, thermal: str, available: bool | None) -> Conditions:
    return Conditions(power=power, link=link, thermal=thermal, available=available)


VERSION = 1
ELSEWHERE = 3
"""``v`` of a :class:`Round` that version 1 cannot read: its offers are in a blob, or its blobs are not at the broker."""
ENVELOPE_BYTES = 512
"""Upper bound of an UpdateChunk's size besides its data, so that the payload fits within ``chunk_bytes``."""

MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""Errors of decoding hostile bytes. msgspec reports deep nesting and broken UTF-8 as Python's own errors."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: the schema version."""

    v: int = VERSION


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Bundles of one format: by tier its manifest blob and, if the server has a key, its Ed25519 signature."""

    bundles: dict[str, BlobRef]
    signatures: dict[str, bytes] = {}


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier round that still accepts updates. The fields equal the ones of :class:`Round`."""

    model_version: str
    units: dict[str, tuple[BlobRef, ...]]
    hyper: dict[str, float]


class Round(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``rounds/current``, retained: the open round, or the last closed one.

    Attributes:
        run: Name of one training run of the federation. A device drops everything of another run.
        offers: Bundles of the tiers by the format of their graphs.
        units: Blobs of each unit's weights in ``model_version``: a keyframe, and the patches from there to
            ``model_version``, in order (:mod:`edgefl.wire.patches`).
        base: Last round whose updates are in the model, 0 before the first. The carry of a later round is void, because that
            round was abandoned.
        deadline: Seconds since the epoch.
        live: Earlier rounds that accept updates too, by number. Devices with a task of one of these continue.
        mirrors: Mirrors of the blobs (:mod:`edgefl.wire.mirrors`). With ``mirrors_only`` the broker does not have them.
        pages: Blob (:class:`Page`) that contains ``offers`` and all ``units``, which are empty then.
    """

    v: int = msgspec.field(
        default_factory=lambda: VERSION
    )  # so that it is written, as all but the last four are
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
    live: dict[int, Live] = {}

    def at(self, number: int) -> Round | None:
        """Return the announcement of round ``number``, or None if it accepts no updates."""
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
        """Numbers of the rounds that accept updates."""
        return (*sorted(self.live), self.round) if self.state == "open" else ()

    def offer(self, format: str) -> Offer:
        """Return the offer for devices whose engine runs ``format``, which may be empty."""
        return self.offers.get(format, Offer(bundles={}))

    def formats_of(self, tier: str) -> tuple[str, ...]:
        """Return the names of the formats in which a tier is offered."""
        return tuple(sorted(name for name, offer in self.offers.items() if tier in offer.bundles))

    @property
    def page(self) -> bytes:
        """The part that grows with the model, encoded as a :class:`Page`."""
        live = {number: each.units for number, each in self.live.items()}
        return _encoder.encode(Page(offers=self.offers, units=self.units, live=live))

    def paged(self, pages: BlobRef) -> Round:
        """Return the announcement without that part, which is the blob ``pages``."""
        live = {number: msgspec.structs.replace(each, units={}) for number, each in self.live.items()}
        return msgspec.structs.replace(self, v=ELSEWHERE, offers={}, units={}, live=live, pages=pages)

    def whole(self, page: bytes) -> Round:
        """Return the announcement with its page.

        Args:
            page: Verified bytes of the blob ``pages``.

        Raises:
            ProtocolError: The page is malformed.
        """
        try:
            read = _page.decode(page)
        except MALFORMED as error:
            raise ProtocolError(
                f"the page of the announcement of round {self.round} is malformed: {error}"
            ) from error
        live = {
            number: msgspec.structs.replace(each, units=read.live.get(number, {}))
            for number, each in self.live.items()
        }
        return msgspec.structs.replace(self, offers=read.offers, units=read.units, live=live, pages=None)


class Page(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Offers and units of a :class:`Round`, in a blob of its own. ``live`` has the units of earlier rounds."""

    offers: dict[str, Offer]
    units: dict[str, tuple[BlobRef, ...]]
    live: dict[int, dict[str, tuple[BlobRef, ...]]] = {}


class Status(Message, frozen=True, kw_only=True):
    """``devices/<id>/status``, retained; the offline form is the last will."""

    online: bool


class Hello(Message, frozen=True, kw_only=True):
    """``devices/<id>/hello``, retained: description of the device.

    Sent after each connection, and when ``conditions`` change.

    ``token`` names a one-time token of `edgefl enroll token`, and ``proof`` proves that the device has it
    (:mod:`edgefl.wire.enrolment`). ``again``: only the conditions changed since the last hello on the same connection, so
    the device has its task.
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
    """``devices/<id>/tasks``: take part in ``round`` as ``tier``.

    Attributes:
        seed: Decides batches and noise.
        nonce: Identifies the answer, together with round and device.
        samples: Most local rows to use. 0: all of them.
        ask: Offer an update of several chunks before sending it (:class:`UpdateChunk`).
        progress_s: Least seconds between two messages of progress.
        shard: Number in the update's topics (:meth:`edgefl.wire.mqtt.topics.DeviceTopics.update`).
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
    """``devices/<id>/progress``, QoS 0: for displays only.

    ``stage`` is ``forward <k>``, ``train``, or :data:`FAILED` and a code.
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


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cost of a round on the device. Times in milliseconds (medians), anonymous memory in bytes.

    Attributes:
        down_bytes: Payload bytes of the blob messages since the last update.
        down_wire_bytes: The same with their headers (:mod:`edgefl.wire.mqtt.topics`).
        variants: Variant in use of each graph that has several and was measured, "" for the graph itself.
        dropped: Reason for each "graph/variant" that cannot run on this device.
        mirror_bytes: Bytes of blobs from mirrors, which the other two do not count.
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
    """Fields of an :class:`Update` that its device stores. Decoding these alone does not copy the update."""

    tier: str
    metrics: dict[str, float]
    profile: Profile


class Update(Message, frozen=True, kw_only=True):
    """Answer to a task, carried in :class:`UpdateChunk` messages. ``tensors`` is safetensors bytes.

    ``codec`` and ``codec_version`` name their meaning, as in the bundle's manifest.
    """

    run: str
    round: int
    device: str
    nonce: str
    tier: str
    model_version: str
    samples: int
    metrics: dict[str, float]
    profile: Profile
    codec: str
    codec_version: int
    tensors: bytes


class UpdateChunk(Message, frozen=True, kw_only=True):
    """``devices/<id>/updates/<round>/<index>``: chunk ``index`` of ``count`` of the update named ``sha256``.

    The topic is ``devices/<id>/shards/<shard>/<round>/<index>`` if the task names a shard. A message without ``data``, of an
    update that has some, is an offer: the device sends the update when the server asks for it by an :class:`Ack` that lists
    the chunks as missing.
    """

    nonce: str
    sha256: str
    index: int
    count: int
    size: int
    data: bytes

    @property
    def is_offer(self) -> bool:
        return not self.data and self.size > 0


class Ack(Message, frozen=True, kw_only=True):
    """``devices/<id>/acks``: the server's answer to an update or a hello.

    Attributes:
        sha256: Digest of the update. An ack with another digest is ignored.
        missing: Indices of chunks to send again.
        reason: Short code for ``rejected``; ``text`` explains it.
        round: 0, with an empty ``nonce``, in an answer to a :class:`Hello`: the device has no tier, or another than
            requested, or must say hello again in ``later_s`` seconds (:data:`COME_LATER`).
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
"""Reason for rejecting a hello: the server has no room. The device repeats it after ``later_s``."""

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
"""Prefix of a :class:`Progress`'s ``stage`` after a failed attempt. A code of :mod:`edgefl.wire.mqtt.reasons` follows."""

LOST_CHUNK = "no good chunk"
"""Code of a failed attempt: the broker lacks blobs of the round. The server publishes them again."""


class Decline(Message, frozen=True, kw_only=True):
    """``devices/<id>/declines``: the device sends no update for this task. ``reason`` is a short code; ``text`` stays empty.

    Reasons are :data:`NO_CARRY`, :data:`NO_FORMAT`, :data:`NO_MEMORY`, :data:`WRONG_DATA`, :data:`POLICY`, :data:`TOO_MUCH`,
    :data:`LARGE_CHUNKS` and :data:`CRASHED`; a server takes others as they are.
    """

    round: int
    nonce: str
    reason: str
    text: str = ""


AnyMessage = TypeVar("AnyMessage", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_NO_BYTES = b"\xc4\x00"
_BYTES_MARKS = ((1, b"\xc4"), (2, b"\xc5"), (4, b"\xc6"))
"""Bytes of the length and mark of binary values: bin 8, 16 and 32 of the msgpack specification."""
_version = msgspec.msgpack.Decoder(Message)
_page = msgspec.msgpack.Decoder(Page)
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}
_VERSIONS: dict[type[Message], tuple[int, ...]] = {Round: (VERSION, ELSEWHERE)}
"""Accepted versions of messages other than :data:`VERSION` alone."""


def encode(message: Message) -> bytes:
    """Return the msgpack bytes of a message."""
    return _encoder.encode(message)


def update_pieces(update: Update, tensors: Sequence[Piece]) -> list[Piece]:
    """Return the msgpack bytes of ``update`` in pieces, with other tensors that are not copied."""
    head = encode(msgspec.structs.replace(update, tensors=b""))
    return [with_last_bytes(head, sum(map(len, tensors))), *tensors]


def with_last_bytes(encoded: bytes, size: int) -> bytes:
    """Return the head of a msgpack map whose last value has ``size`` bytes, which follow.

    Args:
        encoded: Map whose last value is empty bytes.
        size: Length of the value that replaces it.
    """
    width, mark = next((width, mark) for width, mark in _BYTES_MARKS if size < 1 << 8 * width)
    return encoded.removesuffix(_NO_BYTES) + mark + size.to_bytes(width, "big")


def version_of(kind: type[Message], payload: Piece) -> int:
    """Return ``v`` of a message of ``kind`` in any version. Raises ProtocolError if it is malformed."""
    try:
        return _version.decode(payload).v
    except MALFORMED as error:
        raise ProtocolError(f"{kind.__name__} message is malformed: {error}") from error


def decode(kind: type[AnyMessage], payload: Piece) -> AnyMessage:
    """Return the message in ``payload``. Raises ProtocolError if it is malformed or of another version."""
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
    """Raise ProtocolError for an announcement that contradicts itself."""
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
"""Name of a request. It is part of topics, so it contains hexadecimal digits only."""
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
    """``profiles/<nonce>/offer``, retained: the blobs below ``profiles/<nonce>/blobs`` of a request.

    After ``until`` (seconds since 1970) the next requester removes them, because their owner crashed.
    """

    until: float
    blobs: tuple[BlobRef, ...]


class ProfileRequest(Message, frozen=True, kw_only=True):
    """``devices/<id>/profile-requests``: measure the bundle of your engine's format, and answer within ``within_s`` seconds.

    ``bundles`` and ``signatures`` are by format. Each graph is run ``repeat`` times. The same request may arrive several
    times.
    """

    nonce: Nonce
    bundles: dict[str, BlobRef]
    within_s: Wait
    repeat: Repeat = 20
    signatures: dict[str, bytes] = msgspec.field(default_factory=dict)


class ProfileAnswer(Message, frozen=True, kw_only=True):
    """``devices/<id>/profiles``: the device's answer. ``done`` and ``declined`` are final.

    ``profile`` holds an encoded :class:`edgefl.wire.bundle.profiles.BundleProfile` if ``state`` is ``done``. ``reason`` is a
    short code if it is ``declined``; ``text`` stays empty.
    """

    nonce: str
    state: Literal["taken", "done", "declined"]
    reason: str = ""
    text: str = ""
    profile: bytes = b""


def declined(nonce: str, reason: str) -> ProfileAnswer:
    """Return an answer without a profile."""
    return ProfileAnswer(nonce=nonce, state="declined", reason=reason)
