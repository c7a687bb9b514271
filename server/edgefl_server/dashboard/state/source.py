"""Sources of the dashboard's data: the folder of a run, or another dashboard."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.errors import ConfigError, EdgeflError, ProtocolError
from edgefl.wire.bundle.archive import read_manifest
from edgefl.wire.mqtt.messages import Hello, decode
from edgefl.wire.text import printable
from edgefl_server import events
from edgefl_server.coordinator.states import MEASURING
from edgefl_server.dashboard.state import fold
from edgefl_server.dashboard.state.fleet import DeviceFacts, DeviceRound, Fleet, TierPlan
from edgefl_server.memory_plans import read_raised
from edgefl_server.storage import tables
from edgefl_server.storage.audit import rounds_of
from edgefl_server.storage.feed import NAME, FeedReader, decode_event
from edgefl_server.storage.round_table import CLOSING, EVALUATES

# Rounds and devices from the journal, read in short transactions of a connection that may not write.

_MOST_NAME = 64
_MOST_ENGINES = 8


class JournalReader:
    """Reader of the run's journal (its database), by default ``journal.sqlite`` in ``folder``, else at the URL
    ``url``.

    It never writes. A missing journal, or one of another layout, is treated as empty.

    Raises:
        StoreError: If ``url`` is invalid.
    """

    def __init__(self, folder: Path, url: str = "") -> None:
        self._file = None if url else folder / "journal.sqlite"
        self._path = (folder / "journal.sqlite").resolve()
        self._engine = tables.engine(url) if url else None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def load(self, fleet: Fleet) -> None:
        """Load rounds, tasks and devices from the journal into ``fleet``, for its run; for the newest run if it has
        none yet.

        If the journal cannot be read, the reason becomes the fleet's ``problem``.
        """
        if self._file is not None and not self._file.exists():
            return
        try:
            run = self._run(fleet)
            if run:
                self._rounds(fleet, run)
                self.load_devices(fleet)
            fleet.problem = ""
        except sa.exc.SQLAlchemyError as error:
            reason = getattr(error, "orig", None) or error
            fleet.problem = f"the journal cannot be read ({reason}): what is shown comes from events alone"

    def load_devices(self, fleet: Fleet) -> None:
        """Load the devices of the fleet's federation, with the properties from their hello messages.

        Raises:
            SQLAlchemyError: If the journal cannot be read.
        """
        if self._file is not None and not self._file.exists():
            return
        table = tables.devices
        with self._reading() as connection:
            rows = connection.execute(
                sa.select(table).where(table.c.federation == fleet.federation)
            ).mappings().all()  # fmt: skip
        for row in rows:
            device = fleet.devices.get(row["device"])
            if device is None:
                device = fleet.device(row["device"], row["tier"])
                device.online, device.seen = bool(row["online"]), row["last_seen"]
            if device.facts is None or device.facts.samples != row["samples"]:
                device.facts = _facts(row["hello"], row["samples"])
                device.changed = fleet.tick

    def _run(self, fleet: Fleet) -> str:
        table = tables.runs
        with self._reading() as connection:
            if connection.execute(sa.select(tables.layout.c.number)).scalar() != tables.LAYOUT:
                return ""
            rows = connection.execute(sa.select(table)).mappings().all()
        row = next((row for row in rows if row["run"] == fleet.run), rows[-1] if rows else None)
        if row is None or (fleet.run and row["run"] != fleet.run):
            return ""
        fleet.run, fleet.federation, fleet.next_round = row["run"], row["federation"], row["number"]
        return fleet.run

    def _rounds(self, fleet: Fleet, run: str) -> None:
        table = tables.rounds
        names = ("round", "state", "opened", "deadline", "goal", "outcome", "weight_cap")
        columns = [table.c[name] for name in names]
        with self._reading() as connection:
            query = sa.select(*columns).where(table.c.run == run).order_by(table.c.round)
            rows = connection.execute(query).mappings().all()
        for row in rows:
            known = fleet.round(row["round"])
            known.opened = row["opened"]
            known.state = "open" if row["state"] == CLOSING else row["state"]
            known.deadline, known.goal = row["deadline"], row["goal"]
            outcome: dict[str, Any] = row["outcome"]
            for name in (
                "seconds",
                "accuracy",
                "loss",
                "train_loss",
                "metrics",
                "reports",
                "text",
                "down_bytes",
                "up_bytes",
            ):
                if outcome.get(name) is not None:
                    setattr(known, name, outcome[name])
            known.evaluates = bool(outcome.get(EVALUATES))
            known.measures = outcome.get(EVALUATES) == -MEASURING
            if (found := outcome.get("evaluation")) is not None:
                known.evaluation = msgspec.convert(found, events.DeviceEvaluation)
            self._parts(fleet, run, row["round"], waits=not row["weight_cap"])
            if known.state == "open":
                fleet.phase, fleet.current = "open", row["round"]

    def _parts(self, fleet: Fleet, run: str, number: int, *, waits: bool) -> None:
        """Load the states of the devices of round ``number``.

        ``waits`` is True in synchronous rounds, where a device without an update at the round's end counts as missing.
        """
        with self._reading() as connection:
            for device, tier, status, reason in _read_tasks(connection, run, number):
                part = fleet.part(number, device, tier)
                silent = waits and status == "open" and fleet.rounds[number].state != "open"
                ended = silent or status in ("expired", "stale")
                part.status = "missing" if ended else status
                part.reason = reason or (
                    "" if not ended else "no update in time" if silent else f"its task is {status}"
                )
                fleet.devices[device].missed += ended
                fleet.devices[device].round = max(number, fleet.devices[device].round)
            for row in _updates(connection, run, number):
                if (known := fleet.rounds[number].parts.get(row.device)) is not None:
                    _add(fleet, known, row)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        if self._engine is None:
            file = f"file:{quote(str(self._path))}"
            self._engine = sa.create_engine(
                sa.URL.create("sqlite", database=file, query={"mode": "ro", "uri": "true"})
            )
        with self._engine.connect() as connection:
            yield connection


def _read_tasks(connection: Connection, run: str, number: int) -> Iterator[tuple[str, str, str, str]]:
    table = tables.assignments
    query = sa.select(table.c.device, table.c.tier, table.c.status, table.c.reason)
    for row in connection.execute(query.where((table.c.run == run) & (table.c.round == number))):
        yield row[0], row[1], row[2], row[3]


def _updates(connection: Connection, run: str, number: int) -> list[Any]:
    table = tables.updates
    names = ("device", "weight", "metrics", "down_bytes", "up_bytes")
    query = sa.select(*(table.c[name] for name in names))
    which = (table.c.run == run) & (table.c.round == number) & (table.c.reason == "")
    return list(connection.execute(query.where(which)))


def _add(fleet: Fleet, part: DeviceRound, row: Any) -> None:
    if part.weight == 0:
        fleet.devices[part.device].reports += 1
    part.weight, part.loss = row.weight, row.metrics.get("loss")
    part.down_bytes, part.up_bytes = row.down_bytes, row.up_bytes


def _facts(hello: bytes, samples: int) -> DeviceFacts:
    try:
        message = decode(Hello, hello)
    except ProtocolError:
        return DeviceFacts(samples=samples)
    engines = {
        printable(name, _MOST_NAME): printable(message.engines[name], _MOST_NAME)
        for name in sorted(message.engines)[:_MOST_ENGINES]
    }
    return DeviceFacts(
        agent=printable(message.agent, _MOST_NAME),
        memory_bytes=message.memory_bytes,
        cores=message.cores,
        samples=samples,
        engines=engines,
    )


SIGNS = ("run.toml", NAME, "journal.sqlite", "history.jsonl", "devices.sqlite")
"""Files by which the folder of a run is recognized."""
_LOOK_S = 5.0
_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")


class EventObserver(Protocol):
    """Receiver of each new event, with its time in epoch seconds."""

    def take(self, at: float, event: events.Event) -> None:
        """Handle a new event, which happened at the epoch second ``at``."""


class Source(Protocol):
    """Source of the dashboard's data. ``begin`` runs once, in another thread; ``poll`` runs several times a second."""

    def begin(self) -> Fleet:
        """Load the stored state and return it. Blocks until it is complete."""

    def poll(self, fleet: Fleet, lines: list[bytes]) -> bool:
        """Apply new events to ``fleet`` and append their encoded lines to ``lines``. Return True if anything changed.

        Does not wait for events.
        """

    def close(self) -> None:
        """Release files and connections."""


class FolderSource:
    """Source that reads the folder of a run.

    Args:
        folder: Folder of the run.
        database: SQLAlchemy URL of the journal; empty for that in the folder.
        observer: Receives each new event, or None.

    Raises:
        ConfigError: If the folder is not that of a run.
    """

    def __init__(self, folder: Path, database: str = "", observer: EventObserver | None = None) -> None:
        if not any((folder / name).exists() for name in SIGNS):
            raise ConfigError(
                f"{folder} is not the folder of a run (it contains none of {', '.join(SIGNS)}); name what `out` was",
                path=str(folder),
            )
        self.folder = folder
        self._journal = JournalReader(folder, database)
        self._tail = FeedReader(folder)
        self._observer = observer
        self._loaded_at = 0.0

    def begin(self) -> Fleet:
        """Load the journal, the history and the events of the newest run in the folder, and return its state."""
        fleet = Fleet()
        runs = _runs(self.folder)
        fleet.run = runs[-1] if runs else ""
        self._journal.load(fleet)
        for row in rounds_of(self.folder):
            fold.record_result(fleet, row)
        foreign = bool(runs) and runs[0] != fleet.run  # skip events of an earlier run
        for each in map(decode_event, self._tail.lines()):
            if each is None:
                continue
            if isinstance(each.event, events.Started):
                foreign = bool(runs) and each.event.run != runs[-1]
            if not foreign:
                fold.apply(fleet, each.at, each.event)
        self.load_details(fleet)
        return fleet

    def poll(self, fleet: Fleet, lines: list[bytes]) -> bool:
        changed = False
        for each in self._tail.lines():
            if (new := decode_event(each)) is not None:
                lines.append(each)
                fold.apply(fleet, new.at, new.event)
                if self._observer is not None:
                    self._observer.take(new.at, new.event)
                changed = True
        if changed and time.monotonic() > self._loaded_at + _LOOK_S:
            self.load_details(fleet)
        return changed

    def close(self) -> None:
        self._tail.close()
        self._journal.close()

    def load_details(self, fleet: Fleet) -> None:
        """Load into ``fleet`` the data that events do not contain: planned memory of bundles, stored checkpoints, and
        device properties.
        """
        self._loaded_at = time.monotonic()
        fleet.checkpoints = checkpoints(self.folder)
        if not fleet.tiers:
            fleet.tiers = read_planned(self.folder)
        for name, count in read_raised(self.folder).items():
            if name in fleet.tiers:
                fleet.tiers[name].planned_bytes = max(fleet.tiers[name].planned_bytes, count)
        if fleet.federation and any(device.facts is None for device in fleet.devices.values()):
            try:
                self._journal.load_devices(fleet)
            except sa.exc.SQLAlchemyError:  # the next look may be luckier
                return


def _runs(folder: Path) -> list[str]:
    """Return the run identifiers in the feed of a folder, one for each start of a server, the oldest first."""
    tail = FeedReader(folder)
    starts = (decode_event(line) for line in tail.lines() if b'"event":"started"' in line)
    found = [each.event.run for each in starts if each is not None and isinstance(each.event, events.Started)]
    tail.close()
    return found


def checkpoints(folder: Path) -> tuple[int, ...]:
    """Return the numbers of the rounds whose models are stored, sorted. A run can be rolled back to each."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in (folder / "checkpoints").glob("round-*"))
    return tuple(sorted(int(name[1]) for name in names if name))


def read_planned(folder: Path) -> dict[str, TierPlan]:
    """Return the memory that the exporter planned for the largest graph of each tier, by tier.

    It reads the bundles in the folder of a run, and skips invalid ones.
    """
    found: dict[str, TierPlan] = {}
    for path in sorted((folder / "bundles").glob("*.efl")):
        try:
            manifest = read_manifest(path)
        except EdgeflError:
            continue
        most = manifest.planned_bytes
        tier = found.setdefault(manifest.tier, TierPlan(name=manifest.tier))
        tier.planned_bytes = max(tier.planned_bytes, most)
    return found
