"""State of a run and its fleet: plain data, changed by :mod:`edgefl_server.dashboard.state.fold`, shown by
:mod:`edgefl_server.dashboard.views.summary`. Times are epoch seconds, sizes bytes, ``*_ms`` milliseconds.

Each change stamps its object with the fleet's ``tick``. A page that has seen everything up to one tick receives only the
later changes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from edgefl_server.events import DeviceEvaluation

MOST_PARTS = 400_000
"""Limit of stored :class:`DeviceRound`; older rounds keep only their sums."""
_Kept = TypeVar("_Kept")

MOST_LOG, MOST_DEVICE_LOG, MOST_VITALS = 500, 60, 720


class DeviceRound(msgspec.Struct, kw_only=True, gc=False):
    """State of one device in one round: its task's status, and the figures of its training.

    ``status`` is open, accepted, rejected or declined, or missing if the round ended without its update. ``seconds``
    is the time from the round's opening to the arrival of its update. ``staleness`` is the number of model versions
    since the one from which its training began.
    """

    device: str
    round: int
    tier: str = ""
    status: str = "open"
    reason: str = ""
    seconds: float | None = None
    loss: float | None = None
    weight: int = 0
    steps: int = 0
    step_ms: float = 0.0
    forward_ms: float = 0.0
    peak_bytes: int = 0
    idle_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    staleness: int = 0

    @property
    def used_bytes(self) -> int:
        """Peak memory of the training minus that of the idle process, in bytes; 0 if the device did not report both."""
        return max(0, self.peak_bytes - self.idle_bytes) if self.peak_bytes and self.idle_bytes else 0


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Line of the log of the run or of a device. ``n`` counts all lines of a fleet; ``at`` is in epoch seconds."""

    n: int
    at: float
    kind: str
    text: str
    device: str = ""
    round: int = 0


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a device, from its hello message."""

    agent: str = ""
    memory_bytes: int = 0
    cores: int = 0
    samples: int = 0
    engines: dict[str, str] = {}


class DeviceRecord(msgspec.Struct, kw_only=True):
    """State of a device: presence, progress in its newest round (``stage``, ``step``), counts, and its rounds
    (``parts``).

    ``missed`` counts rounds that ended without its update. ``dropped`` has the reasons why it cannot run a graph, by
    graph.
    """

    name: str
    tier: str = ""
    online: bool = False
    seen: float = 0.0
    round: int = 0
    stage: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    step_ms: float = 0.0
    reports: int = 0
    missed: int = 0
    facts: DeviceFacts | None = None
    dropped: dict[str, str] = {}
    log: list[LogEntry] = []
    parts: dict[int, DeviceRound] = {}
    changed: int = 0

    @property
    def at_work(self) -> DeviceRound | None:
        """State of the device in its newest round if its task in that round is open, else None.

        In asynchronous runs that round may have ended already.
        """
        newest = next(reversed(self.parts.values()), None)
        return newest if newest is not None and newest.status == "open" else None


class TierTotals(msgspec.Struct, kw_only=True):
    """Totals over the devices of a tier in a round.

    ``seconds``, ``step_ms`` and ``used_bytes`` are medians over the devices whose update was accepted. ``reasons``
    counts the devices without an accepted update by reason. ``staleness`` is the largest.
    """

    selected: int = 0
    arrived: int = 0
    rejected: int = 0
    declined: int = 0
    missing: int = 0
    seconds: float | None = None
    step_ms: float | None = None
    used_bytes: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    staleness: int = 0
    reasons: dict[str, int] = {}


class RoundRecord(msgspec.Struct, kw_only=True):
    """State of a round, with the state of each of its devices by name (``parts``).

    ``late`` counts updates that arrived after the round's end, by the reason of their refusal. In old rounds ``parts``
    is empty and ``sums`` has the totals by tier instead. ``evaluates`` is True if devices evaluate the model in this
    round, or measure statistics for that (``measures``), and ``evaluation`` has their results.
    """

    number: int
    state: str = "open"
    opened: float = 0.0
    deadline: float = 0.0
    goal: int = 0
    seconds: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    train_loss: float | None = None
    metric: str = ""
    metrics: dict[str, float] = {}
    down_bytes: int = 0
    up_bytes: int = 0
    server_down_bytes: int = 0
    reports: int = 0
    weights_sha256: str = ""
    text: str = ""
    late: dict[str, int] = {}
    parts: dict[str, DeviceRound] = {}
    sums: dict[str, TierTotals] = {}
    evaluates: bool = False
    measures: bool = False
    evaluation: DeviceEvaluation | None = None
    changed: int = 0


class TierPlan(msgspec.Struct, kw_only=True):
    """Memory that the exporter planned for a round of a tier; 0 if its bundle is missing."""

    name: str
    planned_bytes: int = 0


class VitalSample(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the server at one time (:class:`edgefl_server.events.Vitals`).

    ``n`` numbers the sample. ``cpu_share`` is the processor time since the sample before, as a share of one core.
    """

    n: int
    at: float
    inbox: int
    server_lag_s: float
    broker_lag_s: float
    cpu_s: float
    cpu_share: float
    rss_bytes: int


class Fleet(msgspec.Struct, kw_only=True):
    """State of a run and all its devices, as the dashboard shows it.

    ``phase`` is starting, waiting, open, done, stopped or refused. ``tick`` grows with each batch of changes, and
    changed objects are marked with it. ``edition`` grows when the folder's run is replaced by another.
    """

    federation: str = ""
    run: str = ""
    total: int = 0
    phase: str = "starting"
    text: str = ""
    current: int = 0
    next_round: int = 1
    paused: bool = False
    broker: str = ""
    offline: bool = False
    processor: str = ""
    model_version: str = ""
    turned_away: dict[str, int] = {}
    devices: dict[str, DeviceRecord] = {}
    rounds: dict[int, RoundRecord] = {}
    tiers: dict[str, TierPlan] = {}
    log: list[LogEntry] = []
    vitals: list[VitalSample] = []
    told: float = 0.0
    problem: str = ""
    checkpoints: tuple[int, ...] = ()
    count: int = 0
    tick: int = 1
    kept: int = 0
    edition: int = 0

    def device(self, name: str, tier: str = "") -> DeviceRecord:
        """Return the record of device ``name``, created if missing, and mark it as changed.

        ``tier`` becomes the device's tier unless it is empty.
        """
        found = self.devices.get(name)
        if found is None:
            found = self.devices[name] = DeviceRecord(name=name)
        if tier:
            found.tier = tier
        found.changed = self.tick
        return found

    def round(self, number: int) -> RoundRecord:
        """Return the record of round ``number``, created if missing, and mark it as changed."""
        found = self.rounds.get(number)
        if found is None:
            found = self.rounds[number] = RoundRecord(number=number)
        found.changed = self.tick
        return found

    def part(self, number: int, name: str, tier: str = "") -> DeviceRound:
        """Return the state of device ``name`` in round ``number``, created if missing, and mark both as changed.

        ``tier`` becomes the tier of both unless it is empty.
        """
        round_, device = self.round(number), self.device(name, tier)
        found = round_.parts.get(name)
        if found is None:
            # All entries of a device share one string, which saves memory.
            found = DeviceRound(device=device.name, round=number, tier=device.tier)
            round_.parts[device.name] = device.parts[number] = found
            self.kept += 1
        elif tier:
            found.tier = device.tier
        return found

    def entry(self, at: float, kind: str, text: str, *, device: str = "", number: int = 0) -> None:
        """Append a line to the log of the fleet, and to that of ``device`` if it is known.

        Args:
            at: Epoch seconds.
            kind: Short word for the source or the kind, such as ``round`` or ``warning``.
            text: The line, for people.
            device: Device that it is about, or empty.
            number: Round that it is about, or 0.
        """
        self.count += 1
        made = LogEntry(n=self.count, at=at, kind=kind, text=text, device=device, round=number)
        keep(self.log, made, MOST_LOG)
        if device in self.devices:
            keep(self.devices[device].log, made, MOST_DEVICE_LOG)
            self.devices[device].changed = self.tick

    def clear(self) -> None:
        """Reset the state for another run. The memory plans of the tiers stay, and ``edition`` grows."""
        fresh = Fleet(tick=self.tick, count=self.count, tiers=self.tiers, edition=self.edition + 1)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))


def keep(entries: list[_Kept], new: _Kept, most: int) -> None:
    """Append ``new`` to ``entries``. If they are over a quarter more than ``most``, drop all but the last ``most``."""
    entries.append(new)
    if len(entries) > most + most // 4:
        del entries[:-most]
