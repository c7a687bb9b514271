"""Events of a running server, for people and programs. The command line prints each as one JSON object."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Base of all events. In JSON, the field ``event`` has the tag: by default the class's name in lower case."""


class EventListener(Protocol):
    """Receiver of the server's events."""

    def emit(self, event: Event) -> None:
        """Handle an event. Called on any thread."""


class Started(Event, frozen=True, kw_only=True):
    """Event: the server has started.

    Attributes:
        federation: Name of the federation.
        run: Identifier of the run.
        rounds: Number of rounds.
        next_round: Number of the next or open round.
        resumed: True if an earlier process began the run.
        model_version: Version of the current model.
        device: Processor that sums updates: ``cpu`` or ``cuda``.
        server_key: Public key of the server, or empty.
    """

    federation: str
    run: str
    rounds: int
    next_round: int
    resumed: bool
    model_version: str
    device: str
    server_key: str = ""


class Exporting(Event, frozen=True, kw_only=True):
    """Event: the graphs of a tier are being compiled. This takes a while, once per configuration.

    ``text`` names the current step.
    """

    tier: str
    text: str


class Compiled(Event, frozen=True, kw_only=True):
    """Event: all bundles are compiled.

    Attributes:
        compiled: Number of bundles that were compiled now.
        reused: Number of bundles from the cache.
        cache: Folder of the cache.
        cache_bytes: Size of the cache.
    """

    compiled: int
    reused: int
    cache: str
    cache_bytes: int


class Warned(Event, frozen=True, kw_only=True):
    """Event: a warning about a tier, or about the run if ``tier`` is empty. The run continues."""

    tier: str
    text: str


class Noted(Event, frozen=True, kw_only=True):
    """Event: information about the run that is not a warning, such as a default that depends on the machine."""

    text: str


class Waiting(Event, frozen=True, kw_only=True):
    """Event: no round is open, and the next one waits for devices.

    Attributes:
        next_round: Number of the round.
        known: Number of present devices.
        needed: Number of devices that the round needs.
        missing: Names of absent devices, if the algorithm needs particular ones.
        reason: Text that explains why more devices are needed than the federation file requires, or why some devices
            do not count. Empty if there is nothing to explain.
    """

    next_round: int
    known: int
    needed: int
    missing: tuple[str, ...] = ()
    reason: str = ""


class Offline(Event, frozen=True, kw_only=True):
    """Event: the connection to the broker was lost. The server tries again in ``retry_s`` seconds. ``text`` is the
    reason.
    """

    text: str
    retry_s: float


class Online(Event, frozen=True, kw_only=True):
    """Event: the broker is connected again, after :class:`Offline`. ``broker`` is its address."""

    broker: str


class DeviceJoined(Event, frozen=True, kw_only=True):
    """Event: a device with a tier came online, for the first time or again."""

    device: str
    tier: str


class DeviceLost(Event, frozen=True, kw_only=True):
    """Event: a device with a tier went offline. It was stopped or killed, or its link broke.

    Attributes:
        device: Name of the device.
        tier: Its tier.
        round: Number of the round that waits for its update; 0 if none does.
        until: Epoch seconds until which that round waits; 0 if none does.
    """

    device: str
    tier: str
    round: int = 0
    until: float = 0.0


class DeviceFitness(Event, frozen=True, kw_only=True):
    """Event: an online device reported other conditions, so that rounds may select it or not.

    ``unfit`` is the reason why they do not, or empty if they may.
    """

    device: str
    tier: str
    unfit: str


class DeviceFailed(Event, frozen=True, kw_only=True):
    """Event: a device reported that its attempt at a round failed; ``text`` is the reason. It tries again while the
    round is open.
    """

    device: str
    round: int
    text: str


class AwaitedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Device that a round waits for, with the last step that it reported in this round.

    Attributes:
        device: Name of the device.
        online: True if it is connected.
        stage: Last reported stage; empty while the device fetches, loads and prepares, because it reports steps only.
        since: Epoch seconds of that report, or at which the device went offline; 0 without a report.
    """

    device: str
    online: bool
    stage: str
    since: float


class Awaiting(Event, frozen=True, kw_only=True):
    """Event: no update arrived for a while. The round waits for ``devices``, until ``until`` (epoch seconds) at the
    latest.
    """

    round: int
    devices: tuple[AwaitedDevice, ...]
    until: float


class RoundOpened(Event, frozen=True, kw_only=True):
    """Event: a round opened. It closes once ``goal`` updates of ``devices`` are accepted, or at ``deadline`` (epoch
    seconds).

    ``evaluates`` is True if the devices evaluate the model instead of training it, or measure the statistics of batch norm
    for that (``measures``).
    """

    round: int
    goal: int
    devices: tuple[str, ...]
    deadline: float
    evaluates: bool = False
    measures: bool = False


REPORTED = "reported"
"""Stage of a device whose update was accepted."""


class DeviceSeen(Event, frozen=True, kw_only=True):
    """Event: a device reported its progress, or its update was accepted (stage :data:`REPORTED`).

    Times are in milliseconds, sizes in bytes, as in :class:`RoundClosed`.

    Attributes:
        variants: Chosen variant of each graph for which the device tried several; "" is the graph itself.
        dropped: Reason for each ``graph/variant`` that cannot run on the device.
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
    """Event: an update was accepted and journaled.

    ``weight`` is its weight in the round, ``sha256`` the digest of the received bytes.
    """

    device: str
    tier: str
    round: int
    nonce: str
    sha256: str
    weight: int


class Rejected(Event, frozen=True, kw_only=True):
    """Event: an update or another message of a device was refused. ``reason`` is a short code, ``text`` the
    explanation.

    ``round`` is 0 if the message is not about a round.
    """

    device: str
    round: int
    reason: str
    text: str


class ParticipationDeclined(Event, frozen=True, kw_only=True, tag="declined"):
    """Event: a device declined its task. ``reason`` is a short code, ``text`` comes from the device."""

    device: str
    round: int
    reason: str
    text: str


class Limited(Event, frozen=True, kw_only=True):
    """Event: numbers of messages that the server refused unread since its start, by reason
    (:mod:`edgefl_server.updates.rate_limit`).
    """

    counts: dict[str, int]


class Vitals(Event, frozen=True, kw_only=True):
    """Event: load of the server, at intervals.

    Attributes:
        inbox: Number of waiting messages.
        server_lag_s: Seconds that a message waits in the server's inbox before it is handled.
        broker_lag_s: Seconds that the broker took to confirm the last timed message; -1 before the first one.
        cpu_s: Processor time of the process so far.
        rss_bytes: Resident memory of the process; 0 if unknown.
    """

    inbox: int
    server_lag_s: float
    broker_lag_s: float = -1.0
    cpu_s: float = 0.0
    rss_bytes: int = 0


class Ordered(Event, frozen=True, kw_only=True):
    """Event: result of an operator's order.

    Attributes:
        order: Name of the order.
        by: Origin of the order.
        done: True if it was carried out.
        text: Effect of the order, or the reason why it was not carried out.
        version: Number of the round whose model was restored; -1 for other orders.
    """

    order: str
    by: str
    done: bool
    text: str = ""
    version: int = -1


class Refused(Event, frozen=True, kw_only=True):
    """Event: the run ends early, because the algorithm needs a missing device, or training failed. The process exits
    with an error.

    ``text`` is the reason and the remedy.
    """

    text: str


class RoundEnded(Event, frozen=True, kw_only=True):
    """Event: a round accepts no more updates.

    Its evaluation follows in :class:`RoundClosed`, maybe after the next round has opened.

    Attributes:
        round: Number of the round.
        outcome: ``closed`` or ``abandoned``.
        reports: Number of accepted updates.
        missing: Devices of the round without an accepted update, with reasons.
        seconds: Duration of the round.
        text: Reason of an abandoned round, or empty.
        evaluates: True if the devices evaluated the model instead of training it.
    """

    round: int
    outcome: str
    reports: int
    missing: dict[str, str]
    seconds: float
    text: str = ""
    evaluates: bool = False


class RolloutStarted(Event, frozen=True, kw_only=True):
    """Event: the trial of a candidate bundle began with this round.

    ``devices`` is the number of devices that train with the candidate, by tier.
    """

    round: int
    devices: dict[str, int]


class RolloutJudged(Event, frozen=True, kw_only=True):
    """Event: the trial of a candidate bundle is over.

    Attributes:
        round: Last round of the trial.
        promoted: True if all devices of the candidate's tiers use it from the next round on; False if no device does.
        text: Reason of the verdict, with the figures.
    """

    round: int
    promoted: bool
    text: str


class RolledBack(Event, frozen=True, kw_only=True):
    """Event: a round made the model worse than the rollback rule allows. The model is again the one before it.

    The metrics describe the rejected model, as in :class:`RoundClosed`.
    """

    round: int
    text: str
    accuracy: float | None
    loss: float | None
    metrics: dict[str, float] = {}


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of the model on the held-out rows of a group of devices.

    Attributes:
        devices: Number of devices that reported.
        rows: Number of rows, over all devices.
        metrics: Metrics and loss of all rows together, by name.
        median: Median over the devices of each device's own metric, by name.
        worst_decile: Value of each metric that nine of ten devices reach, by name: the 10 % quantile of accuracy, F1 and
            IoU, and the 90 % quantile of the others.
        histogram: Number of devices by the main metric, in ten bins from 0 to 1. Empty if it may be above 1.
    """

    devices: int
    rows: float
    metrics: dict[str, float]
    median: dict[str, float]
    worst_decile: dict[str, float]
    histogram: tuple[int, ...] = ()


class DeviceEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an evaluation round.

    Attributes:
        trained_rounds: Number of training rounds of the evaluated model.
        metric: Main metric.
        devices: Result over all devices. None if fewer reported than the smallest group that is shown.
        tiers: Results by tier.
        sums: Exact integer sums over all devices by name, as Python integers or lists of them; empty with ``devices`` None.
        left_out: Tiers with fewer reports than the smallest group that is shown, and tiers for which no device measured the
            statistics of batch norm.
    """

    trained_rounds: int
    metric: str
    devices: GroupResult | None
    tiers: dict[str, GroupResult]
    sums: dict[str, int | list[int]]
    left_out: tuple[str, ...] = ()


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the data of a group of devices. All counts are exact.

    A field is empty if the server did not ask for it. G is the number of groups of values, such as channels.

    Attributes:
        devices: Number of devices that reported.
        rows: Number of their rows.
        classes: Number of labels by class, int (classes,).
        count: Number of values in the moments by group, int (G,).
        mean: Their mean, float64 (G,); None for a group without values.
        deviation: Their standard deviation, with the divisor ``count``, float64 (G,); None for such a group, too.
        beyond: Number of values left out of the moments, because they are above 2^30 in magnitude, int (G,).
        missing: Number of values that are NaN or infinite, int (G,).
        histogram: Number of values below the first edge, in each bin, and above the last edge, int (G, edges + 1).
            A bin contains its lower edge; the last one its upper edge, too.
        lengths: Number of texts of 1, 2, 3, ... tokens without padding, int (length,).
    """

    devices: int
    rows: int
    classes: tuple[int, ...] = ()
    count: tuple[int, ...] = ()
    mean: tuple[float | None, ...] = ()
    deviation: tuple[float | None, ...] = ()
    beyond: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    histogram: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()


class Normalization(msgspec.Struct, frozen=True, kw_only=True):
    """Normalisation of inputs to mean 0 and deviation 1, of values as devices store them.

    Attributes:
        mean: Mean by group, float64 (G,). 0 for a group without values.
        deviation: Standard deviation by group, float64 (G,); 1 where all values are equal.
        scale: Factor of all values together: a model reads ``x * scale + shift``.
        shift: Summand of all values together.
        by_column: True if a reader of columns normalises each by its own mean and deviation.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    scale: float
    shift: float
    by_column: bool

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines of text with these values, for people to copy.

        For a reader of columns they belong into the federation file, otherwise into the call of
        :class:`edgefl.data.Dataset`.
        """
        if self.by_column:
            return ("[data.reader]", f"mean = {list(self.mean)}", f"deviation = {list(self.deviation)}")
        return (f"scale = {self.scale!r}", f"shift = {self.shift!r}")


class DataStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the devices' data, in the values that a model reads (after scale and shift).

    Attributes:
        kind: Kind of the groups of values: ``channel``, ``feature``, or ``value`` if all values are one group.
        groups: Names of the groups of values.
        class_names: Names of the classes; their numbers if they have none.
        edges: Edges of the histogram's bins.
        devices: Statistics over all devices. None if fewer reported than the smallest group that is shown.
        tiers: Statistics by tier.
        sums: Exact integer sums over all devices by name, as Python integers or nested lists of them; empty with
            ``devices`` None.
        announced_rows: Number of rows that the reporting devices announced when they connected; 0 with ``devices`` None. It
            exceeds ``devices.rows`` by the rows that devices left out because they are bad.
        left_out: Tiers with fewer reports than the smallest group that is shown.
        normalization: Normalisation of inputs by the moments over all devices; None without them.
    """

    kind: str
    groups: tuple[str, ...]
    class_names: tuple[str, ...]
    edges: tuple[float, ...]
    devices: GroupStatistics | None
    tiers: dict[str, GroupStatistics]
    sums: dict[str, Any]
    announced_rows: int = 0
    left_out: tuple[str, ...] = ()
    normalization: Normalization | None = None


class TierResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one tier in a round. Bytes and times count accepted updates only.

    Attributes:
        selected: Number of its tasks.
        reports: Number of accepted updates.
        rejected: Number of refused updates.
        declined: Number of tasks that devices declined.
        train_loss: Mean loss over the devices that reported one, else None.
        train_ms: Mean time of all local steps of a device, by its own clock; None if no device reported one.
        down_bytes: Bytes that these devices downloaded, by their own count.
        up_bytes: Bytes of their updates, including copies.
    """

    selected: int = 0
    reports: int = 0
    rejected: int = 0
    declined: int = 0
    train_loss: float | None = None
    train_ms: float | None = None
    down_bytes: int = 0
    up_bytes: int = 0


class RoundClosed(Event, frozen=True, kw_only=True):
    """Event: a round was evaluated.

    Bytes are payloads of MQTT messages; with ``wire`` the headers of their PUBLISH packets are included
    (:func:`edgefl.wire.mqtt.topics.publish_bytes`). Bytes that arrive after the end of a round are counted in the device's
    next round.

    Attributes:
        accuracy: Accuracy of the global model on the test set. None if the round is not evaluated, or the task has
            none.
        loss: Loss on the test set, or None.
        metrics: All metrics by name, without the loss.
        metric: Name of the metric to show first, or ``loss`` if there are none.
        down_bytes: Bytes that the reporting devices downloaded, by their own count.
        up_bytes: Bytes of their updates, including copies.
        up_float32_bytes: Size of the same messages if they held the updates as float32 tensors.
        server_down_bytes: Bytes that the server itself published.
        weights_sha256: Digest of the round's checkpoint file.
        staleness: Mean number of rounds between the begin of an update and the round that counts it.
        fairness: Jain's index of the devices' reports so far: 1 if all have as many; None before the first.
        measures: True if devices measured the statistics of batch norm.
        evaluation: Results of a round in which devices evaluated the model on their held-out rows; None for a training
            round.
        statistics: Statistics of a round in which devices summed up their data; None for other rounds.
        tiers: Figures of the round by tier; empty for rounds of an earlier release.
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
    measures: bool = False
    evaluation: DeviceEvaluation | None = None
    statistics: DataStatistics | None = None
    tiers: dict[str, TierResult] = {}


class Stopped(Event, frozen=True, kw_only=True):
    """Event: the server was stopped. A server on the same folder continues with round ``next_round`` of ``rounds``.

    If only the server's own evaluation is left, ``next_round`` is ``rounds + 1``.
    """

    next_round: int
    rounds: int


class Finished(Event, frozen=True, kw_only=True):
    """Event: all rounds are over.

    Attributes:
        rounds: Number of rounds.
        model: Path of the trained model; empty if none was trained.
        weights_sha256: Digest of that file, or empty.
        accuracy: Accuracy of the model, as in :class:`RoundClosed`.
        loss: Loss of the model, or None.
        metric: Name of the metric to show first.
        metrics: All metrics by name, without the loss.
        text: Reason why the metrics are not reliable, or empty.
    """

    rounds: int
    model: str
    weights_sha256: str
    accuracy: float | None
    loss: float | None
    metric: str = "accuracy"
    metrics: dict[str, float] = {}
    text: str = ""
