"""What is known of a run and its fleet: plain data, changed by :mod:`edgefl_server.dashboard.known.fold`, shown by
:mod:`edgefl_server.dashboard.shown.rows`. Times are epoch seconds, sizes bytes, ``*_ms`` milliseconds.

Every thing that changes is stamped with the fleet's ``tick``, so that a page that has seen everything up to one tick can be
told of what changed since.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

MOST_PARTS = 400_000
"""Parts of devices in rounds that are kept one by one; of older rounds the sums stay."""
_Kept = TypeVar("_Kept")

MOST_LOG, MOST_DEVICE_LOG, MOST_VITALS = 500, 60, 720


class Part(msgspec.Struct, kw_only=True, gc=False):
    """A device in a round. ``status``: open, accepted, rejected, declined, or missing once the round is over without it.

    ``seconds``: from the round's opening until its update was here; ``staleness``: versions that its update was behind.
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
        """Measured memory over the idle process; 0 where the device did not say."""
        return max(0, self.peak_bytes - self.idle_bytes) if self.peak_bytes and self.idle_bytes else 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log."""

    n: int
    at: float
    kind: str
    text: str
    device: str = ""
    round: int = 0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a device said of itself when it came."""

    agent: str = ""
    memory_bytes: int = 0
    cores: int = 0
    samples: int = 0
    engines: dict[str, str] = {}


class Device(msgspec.Struct, kw_only=True):
    """A device, and where it stands in its newest round."""

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
    facts: Facts | None = None
    dropped: dict[str, str] = {}
    log: list[Entry] = []
    parts: dict[int, Part] = {}
    changed: int = 0

    @property
    def at_work(self) -> Part | None:
        """Its newest part, if it is open: where versions wait for nobody, the round of that may be over."""
        newest = next(reversed(self.parts.values()), None)
        return newest if newest is not None and newest.status == "open" else None


class Sum(msgspec.Struct, kw_only=True):
    """What the parts of a tier in a round come to. ``seconds``, ``step_ms`` and ``used_bytes`` are medians over the devices
    that reported; ``reasons`` counts why others did not."""

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


class Round(msgspec.Struct, kw_only=True):
    """A round, and the parts of its devices by name. ``late``: updates that came when it was over, or was not yet, by why
    they were refused. ``sums``: what is left, by tier, of the parts of a round that is long over."""

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
    parts: dict[str, Part] = {}
    sums: dict[str, Sum] = {}
    changed: int = 0


class Tier(msgspec.Struct, kw_only=True):
    """What the exporter planned that a round of this tier takes of memory; 0 where its bundle is not here."""

    name: str
    planned_bytes: int = 0


class Vital(msgspec.Struct, frozen=True, kw_only=True):
    """How the server fared at a time (:class:`edgefl_server.events.Vitals`). ``cpu_share`` of one core since the time
    before."""

    n: int
    at: float
    inbox: int
    server_lag_s: float
    broker_lag_s: float
    cpu_s: float
    cpu_share: float
    rss_bytes: int


class Fleet(msgspec.Struct, kw_only=True):
    """All of it. ``phase``: starting, waiting, open, done, stopped or refused. ``edition`` counts the times that all of it
    became another run's."""

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
    devices: dict[str, Device] = {}
    rounds: dict[int, Round] = {}
    tiers: dict[str, Tier] = {}
    log: list[Entry] = []
    vitals: list[Vital] = []
    told: float = 0.0
    problem: str = ""
    checkpoints: tuple[int, ...] = ()
    count: int = 0
    tick: int = 1
    kept: int = 0
    edition: int = 0

    def device(self, name: str, tier: str = "") -> Device:
        """The device of that name, changed now; made where there is none."""
        found = self.devices.get(name)
        if found is None:
            found = self.devices[name] = Device(name=name)
        if tier:
            found.tier = tier
        found.changed = self.tick
        return found

    def round(self, number: int) -> Round:
        """The round of that number, changed now; made where there is none."""
        found = self.rounds.get(number)
        if found is None:
            found = self.rounds[number] = Round(number=number)
        found.changed = self.tick
        return found

    def part(self, number: int, name: str, tier: str = "") -> Part:
        """The part of a device in a round, both of which are changed now."""
        round_, device = self.round(number), self.device(name, tier)
        found = round_.parts.get(name)
        if found is None:
            # One and the same text for all of a device's parts.
            found = Part(device=device.name, round=number, tier=device.tier)
            round_.parts[device.name] = device.parts[number] = found
            self.kept += 1
        elif tier:
            found.tier = device.tier
        return found

    def entry(self, at: float, kind: str, text: str, *, device: str = "", number: int = 0) -> None:
        """A line more in the log, and in that of the device."""
        self.count += 1
        made = Entry(n=self.count, at=at, kind=kind, text=text, device=device, round=number)
        keep(self.log, made, MOST_LOG)
        if device in self.devices:
            keep(self.devices[device].log, made, MOST_DEVICE_LOG)
            self.devices[device].changed = self.tick

    def clear(self) -> None:
        """Another run begins: nothing is known of it but what its bundles plan."""
        fresh = Fleet(tick=self.tick, count=self.count, tiers=self.tiers, edition=self.edition + 1)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))


def keep(entries: list[_Kept], new: _Kept, most: int) -> None:
    """``new`` behind the last ``most`` of ``entries``, or a few more of them."""
    entries.append(new)
    if len(entries) > most + most // 4:
        del entries[:-most]
