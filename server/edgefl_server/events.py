"""What the server tells people and programs while it runs; the CLI prints each as one JSON object."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Base of all events; ``event`` in the JSON is the class's name in lower case."""


class EventListener(Protocol):
    """Receiver of events."""

    def emit(self, event: Event) -> None: ...


class Started(Event, frozen=True, kw_only=True):
    """The server is up. ``resumed``: it carries on a run that an earlier process left."""

    federation: str
    run: str
    rounds: int
    next_round: int
    resumed: bool
    model_version: str
    device: str
    server_key: str = ""


class Exporting(Event, frozen=True, kw_only=True):
    """A tier's graphs are being made; this takes a while, once per configuration."""

    tier: str
    text: str


class Compiled(Event, frozen=True, kw_only=True):
    """All bundles are there: ``compiled`` now, ``reused`` out of the folder ``cache``, whose files take ``cache_bytes``."""

    compiled: int
    reused: int
    cache: str
    cache_bytes: int


class Warned(Event, frozen=True, kw_only=True):
    """Something about a tier that a person should know; the run goes on."""

    tier: str
    text: str


class Noted(Event, frozen=True, kw_only=True):
    """What a run does that its file does not say in so many words; nothing is wrong."""

    text: str


class Waiting(Event, frozen=True, kw_only=True):
    """No round is open: ``known`` of the ``needed`` devices are there, ``missing`` are not (where their names are known).

    ``reason`` says why so many are needed, where that is not what the federation file says, and who does not count.
    """

    next_round: int
    known: int
    needed: int
    missing: tuple[str, ...] = ()
    reason: str = ""


class Offline(Event, frozen=True, kw_only=True):
    """The broker is away; the server tries again in ``retry_s`` seconds."""

    text: str
    retry_s: float


class Online(Event, frozen=True, kw_only=True):
    """The broker is there again, after :class:`Offline`."""

    broker: str


class DeviceJoined(Event, frozen=True, kw_only=True):
    """A device is there, for the first time or again, and rounds may select it."""

    device: str
    tier: str


class DeviceLost(Event, frozen=True, kw_only=True):
    """A device went offline: it was stopped or killed, or its link broke.

    Round ``round`` still wants its update and gives it until ``until`` (epoch seconds) to come back; both are 0 where none
    does.
    """

    device: str
    tier: str
    round: int = 0
    until: float = 0.0


class DeviceFitness(Event, frozen=True, kw_only=True):
    """A device that is there says that it is in other conditions, so that rounds may select it again (``unfit`` is empty),
    or no longer, and why."""

    device: str
    tier: str
    unfit: str


class DeviceFailed(Event, frozen=True, kw_only=True):
    """A device's attempt at a round failed, in its own words; it tries again while the round is open."""

    device: str
    round: int
    text: str


class AwaitedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that a round waits for, with the last step that it reported in this round.

    Attributes:
        stage: empty while the device fetches, loads and prepares: it reports steps alone.
        since: the time of that report, or when the device went offline; 0 without a report.
    """

    device: str
    online: bool
    stage: str
    since: float


class Awaiting(Event, frozen=True, kw_only=True):
    """No update came for a while: the round waits for these devices, at the longest until ``until`` (epoch seconds)."""

    round: int
    devices: tuple[AwaitedDevice, ...]
    until: float


class RoundOpened(Event, frozen=True, kw_only=True):
    """A round began: ``goal`` updates are wanted from ``devices``."""

    round: int
    goal: int
    devices: tuple[str, ...]
    deadline: float


REPORTED = "reported"
"""The stage of a device whose update was accepted."""


class DeviceSeen(Event, frozen=True, kw_only=True):
    """A device says where it stands. Times in milliseconds, sizes in bytes, as in :class:`RoundClosed`.

    ``variants``: the form of each graph that was tried there, ``dropped``: those that cannot run there, and why, as in
    :class:`edgefl.wire.mqtt.messages.Profile`.
    """

    device: str
    tier: str
    round: int
    stage: str
    step: int = 0
    steps: int = 0
    loss: float = float("nan")
    step_ms: float = 0.0
    peak_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    down_wire_bytes: int = 0
    up_wire_bytes: int = 0
    idle_bytes: int = 0
    forward_ms: float = 0.0
    variants: dict[str, str] = {}
    dropped: dict[str, str] = {}


class UpdateAccepted(Event, frozen=True, kw_only=True):
    """An update is in the journal, and counts ``weight`` in its round. ``sha256`` is that of the update as it came."""

    device: str
    tier: str
    round: int
    nonce: str
    sha256: str
    weight: int


class Rejected(Event, frozen=True, kw_only=True):
    """Something a device sent was refused. ``reason`` is a short code."""

    device: str
    round: int
    reason: str
    text: str


class Declined(Event, frozen=True, kw_only=True):
    """A device will not take part in a round. ``reason`` is a short code, ``text`` is the device's own."""

    device: str
    round: int
    reason: str
    text: str


class Limited(Event, frozen=True, kw_only=True):
    """Messages that were not read since the server started, by reason (:mod:`edgefl_server.updates.rate_limit`)."""

    counts: dict[str, int]


class Vitals(Event, frozen=True, kw_only=True):
    """How the server itself fares, now and then. ``inbox`` messages wait; one that came now would be looked at
    ``server_lag_s`` later. ``broker_lag_s``: what the broker took to confirm the last message that was timed, -1 before
    there was one. ``cpu_s`` is the processor time of the process so far, ``rss_bytes`` what it holds of memory, 0 if
    unknown."""

    inbox: int
    server_lag_s: float
    broker_lag_s: float = -1.0
    cpu_s: float = 0.0
    rss_bytes: int = 0


class Ordered(Event, frozen=True, kw_only=True):
    """What became of an operator's order. ``by`` is where it came from; ``text`` is why it was not ``done``, or what it did.
    ``version``: the round whose model it made the run's again, -1 where it did not."""

    order: str
    by: str
    done: bool
    text: str = ""
    version: int = -1


class Refused(Event, frozen=True, kw_only=True):
    """The run ends unfinished: its algorithm needs a device that is missing. The process exits with an error."""

    text: str


class RoundEnded(Event, frozen=True, kw_only=True):
    """A round takes no more updates; its evaluation follows in :class:`RoundClosed`, when the next round may have begun.

    ``missing``: its devices whose updates are not in it, and why.
    """

    round: int
    outcome: str
    reports: int
    missing: dict[str, str]
    seconds: float
    text: str = ""


class RolloutStarted(Event, frozen=True, kw_only=True):
    """The trial of a candidate began: in round ``round`` so many ``devices`` of each tier train with it."""

    round: int
    devices: dict[str, int]


class RolloutJudged(Event, frozen=True, kw_only=True):
    """The trial of a candidate is over: from the next round on all devices of its tiers train with it (``promoted``), or
    none does. ``text`` has the figures."""

    round: int
    promoted: bool
    text: str


class RolledBack(Event, frozen=True, kw_only=True):
    """A round's updates made the model worse than the federation's rule allows: it is undone, and the model is the one that
    the round began with. Metrics, as in :class:`RoundClosed`, are those of the model that was thrown away."""

    round: int
    text: str
    accuracy: float | None
    loss: float | None
    metrics: dict[str, float] = {}


class RoundClosed(Event, frozen=True, kw_only=True):
    """A round is evaluated. ``accuracy`` and ``loss`` are the global model's on the test set, None if it is not its turn.

    ``metrics`` are all that tell how good the model is, by name, without the loss; ``metric`` is the one of them that
    people are shown first, or ``loss`` where there are none. Accuracy is None where the task has none.

    ``down_bytes`` and ``up_bytes`` add up, over the devices that reported, the payloads of the MQTT messages that
    brought them blobs (by their own count) and of those that brought their updates here, second copies included (one
    that comes after its round counts in the device's next report); with ``wire`` the headers of these PUBLISH packets
    are in (:mod:`edgefl.wire.mqtt.topics`). ``up_float32_bytes`` is what ``up_bytes`` would be if the same messages
    held the updates as float32 tensors. ``server_down_bytes`` is what the server itself published. ``weights_sha256``
    is the digest of the round's checkpoint file. ``staleness``: versions between what an update began from and what it was
    counted in, the mean over those that were. ``fairness``: Jain's index of how often each device has reported so far, 1
    if all did as often; None before any did.
    """

    round: int
    outcome: str
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    seconds: float
    reports: int
    rejected: int
    weights_sha256: str
    down_bytes: int
    up_bytes: int
    server_down_bytes: int
    down_wire_bytes: int = 0
    up_wire_bytes: int = 0
    up_float32_bytes: int = 0
    staleness: float = 0.0
    text: str = ""
    metric: str = "accuracy"
    metrics: dict[str, float] = {}
    fairness: float | None = None


class Stopped(Event, frozen=True, kw_only=True):
    """The server was asked to stop; started again on the same folder it goes on with round ``next_round`` of ``rounds``:
    one more than these where only an evaluation was left."""

    next_round: int
    rounds: int


class Finished(Event, frozen=True, kw_only=True):
    """All rounds are over; ``model`` is the file of the trained model. Metrics as in :class:`RoundClosed`.

    ``text`` is why the metrics are not to be relied on, or "".
    """

    rounds: int
    model: str
    weights_sha256: str
    accuracy: float | None
    loss: float | None
    metric: str = "accuracy"
    metrics: dict[str, float] = {}
    text: str = ""
