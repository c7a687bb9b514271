"""The messages of protocol version 1, as msgpack maps. Version 2 signs them (:mod:`edgefl.wire.mqtt.envelope`).

Unknown fields are ignored, so a field may be added; a different ``v`` is refused with a message that says so.
Byte vectors of every message stand in conformance/edgefl_conformance/data/golden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from edgefl.wire.blobs import BlobRef
from edgefl.wire.errors import ProtocolError
from edgefl.wire.mqtt.conditions import Conditions
from edgefl.wire.tensors import Piece

VERSION = 1
ELSEWHERE = 3
"""``v`` of a :class:`Round` that means nothing to whoever reads version 1: what it offers stands in a blob, or its blobs are
not at the broker."""
ENVELOPE_BYTES = 512
"""More than any UpdateChunk needs around its data, so that the whole payload stays within ``chunk_bytes``."""

MALFORMED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What decoding hostile bytes raises: msgspec reports deep nesting and broken UTF-8 as Python's own errors."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: the schema version."""

    v: int = VERSION


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Bundles of one format: by tier its manifest blob and, where the server has a key, its Ed25519 signature of it."""

    bundles: dict[str, BlobRef]
    signatures: dict[str, bytes] = {}


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """Of an earlier round whose devices may still be at work: what :class:`Round` says of the one that is open."""

    model_version: str
    units: dict[str, tuple[BlobRef, ...]]
    hyper: dict[str, float]


class Round(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``rounds/current``, retained: the open round, or the closed one while nothing is open.

    ``run`` names one training run of the federation; a device drops what belongs to another run.
    ``offers`` has the tiers' bundles by the format of their graphs. ``units`` maps a unit to what its weights of
    ``model_version`` are put together from: a blob of weights, and the patches that lead from there to
    ``model_version``, in order (:mod:`edgefl.wire.patches`); most often there are none.
    ``base`` is the last round whose updates are in the model, 0 before the first: what a device kept of a later round
    is void, as that round was abandoned. ``deadline`` is seconds since the epoch. ``live``: earlier rounds that take
    updates too, by number; devices whose task is of one of these go on.

    ``mirrors``: where blobs lie beside the broker (:mod:`edgefl.wire.mirrors`); with ``mirrors_only`` nowhere else. Where
    ``pages`` is given, ``offers`` and all ``units`` are empty and stand in that blob (:class:`Page`).
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
        """What is announced of round ``number``; None if it takes no updates."""
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
        """The rounds that take updates."""
        return (*sorted(self.live), self.round) if self.state == "open" else ()

    def offer(self, format: str) -> Offer:
        """What the round offers to devices whose engine runs ``format``; empty if that is nothing."""
        return self.offers.get(format, Offer(bundles={}))

    def formats_of(self, tier: str) -> tuple[str, ...]:
        """The formats in which a tier is offered, by name."""
        return tuple(sorted(name for name, offer in self.offers.items() if tier in offer.bundles))

    @property
    def page(self) -> bytes:
        """The part that grows with the model, as it stands in a blob."""
        live = {number: each.units for number, each in self.live.items()}
        return _encoder.encode(Page(offers=self.offers, units=self.units, live=live))

    def paged(self, pages: BlobRef) -> Round:
        """Without that part, which is the blob ``pages``."""
        live = {number: msgspec.structs.replace(each, units={}) for number, each in self.live.items()}
        return msgspec.structs.replace(self, v=ELSEWHERE, offers={}, units={}, live=live, pages=pages)

    def whole(self, page: bytes) -> Round:
        """With the part that ``pages`` names, whose bytes have been checked; ProtocolError if they are malformed."""
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
    """What a :class:`Round` offers, in a blob of its own; ``live`` are the units of earlier rounds."""

    offers: dict[str, Offer]
    units: dict[str, tuple[BlobRef, ...]]
    live: dict[int, dict[str, tuple[BlobRef, ...]]] = {}


class Status(Message, frozen=True, kw_only=True):
    """``devices/<id>/status``, retained; the offline form is the last will."""

    online: bool


class Hello(Message, frozen=True, kw_only=True):
    """``devices/<id>/hello``, retained: what the device is. Sent after each connection, and when its ``conditions`` change.

    ``token`` names a one-time token of `edgefl enroll token`, and ``proof`` shows that the device has it
    (:mod:`edgefl.wire.enrolment`). ``again``: nothing but the conditions is new since the hello before, on the same
    connection, so the device has its task.
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

    ``seed`` decides batches and noise. ``samples`` bounds the local rows used; 0 means all of them.
    ``nonce`` identifies the answer together with round and device. ``ask``: an update of several chunks is offered before it
    is sent (:class:`UpdateChunk`). ``progress_s``: seconds between two messages of progress, at least. ``shard``: below
    which topics the update goes (:meth:`edgefl.wire.mqtt.topics.DeviceTopics.update`).
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
    """``devices/<id>/progress``, QoS 0: for people who watch; nothing depends on it.

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
    """What a round cost the device. Times in milliseconds (medians), anonymous memory in bytes.

    ``down_bytes``: payloads of the blob messages that it got since its last update; ``down_wire_bytes``: with their
    headers (:mod:`edgefl.wire.mqtt.packets`). ``variants``: the form in use of each graph that has several and was tried, ""
    for its own; ``dropped``: "graph/variant" of those that cannot run on this device, and why. ``mirror_bytes``: of blobs
    that came by mirrors, which the two others do not count.
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
    """The fields of an :class:`Update` that its device remembers: read as these, an update is not copied."""

    tier: str
    metrics: dict[str, float]
    profile: Profile


class Update(Message, frozen=True, kw_only=True):
    """The answer to a task, carried in :class:`UpdateChunk` pieces. ``tensors`` is safetensors bytes.

    ``codec`` and ``codec_version`` say what they mean, in the words of the bundle's manifest.
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
    """``devices/<id>/updates/<round>/<index>`` (``devices/<id>/shards/<shard>/<round>/<index>`` if the task names a shard):
    piece ``index`` of ``count`` of the update named ``sha256``.

    One without ``data``, of an update that has some, is an offer: the device sends the update when the server asks for it,
    by an :class:`Ack` that names the chunks as missing.
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
    """``devices/<id>/acks``: the server's word on an update.

    ``sha256`` is the digest of the update that it is about: one with another digest is not meant. ``missing`` lists chunk
    indices to send again; ``reason`` is a short code for ``rejected``, ``text`` explains. One with
    round 0 and no nonce is about the device's :class:`Hello`: it has no tier, or another than it asked for,
    or is to come again in ``later_s`` seconds (:data:`COME_LATER`).
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
"""Why a device that said hello is not let in: there is no room for it now. It is to say hello again in ``later_s``."""

NO_CARRY = "no-carry"
"""Why a device declines: the algorithm needs what it kept of the exchange before, and it has none."""

NO_FORMAT = "no-format"
"""Why a device declines: its tier has no bundle in the format that its engine runs."""

NO_MEMORY = "no-memory"
"""Why a device declines: a graph of the bundle needs more memory than it offers."""

WRONG_DATA = "wrong-data"
"""Why a device declines: its local data do not fit the model."""

POLICY = "policy"
"""Why a device declines: its owner's rules do not allow the round, or not now."""

TOO_MUCH = "too-much-work"
"""Why a device declines: the round has more steps, takes more time or more of the disk than the device gives."""

LARGE_CHUNKS = "large-chunks"
"""Why a device declines: the chunks of the round's blobs are larger than the messages that it reads."""

CRASHED = "crashed"
"""Why a device declines: the work on the round ended its process, or its engine's."""

FAILED = "failed: "
"""Prefix of a :class:`Progress`'s ``stage`` after a failed attempt. A code of :mod:`edgefl.wire.mqtt.refusals` follows."""

LOST_CHUNK = "no good chunk"
"""Code of an attempt that failed because the broker lacks what the round needs: the server publishes it again."""


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
"""That are read, where it is not :data:`VERSION` alone."""


def encode(message: Message) -> bytes:
    """Msgpack bytes of a message."""
    return _encoder.encode(message)


def update_pieces(update: Update, tensors: Sequence[Piece]) -> list[Piece]:
    """Return the msgpack bytes of ``update`` with other tensors, which are given in pieces and not copied."""
    head = encode(msgspec.structs.replace(update, tensors=b""))
    return [with_last_bytes(head, sum(map(len, tensors))), *tensors]


def with_last_bytes(encoded: bytes, size: int) -> bytes:
    """Return ``encoded``, a msgpack map whose last value is empty bytes, up to where ``size`` bytes follow instead."""
    width, mark = next((width, mark) for width, mark in _BYTES_MARKS if size < 1 << 8 * width)
    return encoded.removesuffix(_NO_BYTES) + mark + size.to_bytes(width, "big")


def version_of(kind: type[Message], payload: Piece) -> int:
    """``v`` of what should be a message of ``kind``, of any version; ProtocolError if there is none to be read."""
    try:
        return _version.decode(payload).v
    except MALFORMED as error:
        raise ProtocolError(f"{kind.__name__} message is malformed: {error}") from error


def decode(kind: type[AnyMessage], payload: Piece) -> AnyMessage:
    """The message in ``payload``; ProtocolError if it is malformed or of another version."""
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
    """ProtocolError for one that says two things."""
    elsewhere = message.pages is not None or message.mirrors_only
    if elsewhere and message.v != ELSEWHERE:
        raise ProtocolError(
            f"a Round of version {message.v} has no pages and no mirrors_only, found them: it is refused"
        )
    if message.pages is not None and (message.offers or message.units):
        raise ProtocolError(
            "a Round with pages has its offers and units there, found some beside them: it is refused"
        )
