"""What the journal has of rounds and devices, read in short transactions of a connection that may not write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.wire.errors import ProtocolError
from edgefl.wire.mqtt.messages import Hello, decode
from edgefl.wire.printable import printable
from server.dashboard.known.fleet import Facts, Fleet, Part
from server.storage import tables
from server.storage.round_rows import CLOSING

_MOST_NAME = 64
_MOST_ENGINES = 8


class Past:
    """The journal at ``url``, by default that of ``folder``. One that is not there, or of another layout, has nothing.

    StoreError for a ``url`` that cannot be one."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self._file = None if url else folder / "journal.sqlite"
        self._path = (folder / "journal.sqlite").resolve()
        self._engine = tables.engine(url) if url else None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def tell(self, fleet: Fleet) -> None:
        """Know what the journal has of the fleet's run, or of its only one. Sets the fleet's ``problem`` where it cannot be
        read."""
        if self._file is not None and not self._file.exists():
            return
        try:
            run = self._run(fleet)
            if run:
                self._rounds(fleet, run)
                self.look(fleet)
            fleet.problem = ""
        except sa.exc.SQLAlchemyError as error:
            reason = getattr(error, "orig", None) or error
            fleet.problem = f"the journal cannot be read ({reason}): what is shown comes from events alone"

    def look(self, fleet: Fleet) -> None:
        """Know what devices said of themselves when they came. SQLAlchemyError where the journal cannot be read."""
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
            self._parts(fleet, run, row["round"], waits=not row["weight_cap"])
            if known.state == "open":
                fleet.phase, fleet.current = "open", row["round"]

    def _parts(self, fleet: Fleet, run: str, number: int, *, waits: bool) -> None:
        """The devices of one round, in a transaction of their own. ``waits``: those that have not answered when it ends
        never will."""
        with self._reading() as connection:
            for device, tier, status, reason in _assigned(connection, run, number):
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


def _assigned(connection: Connection, run: str, number: int) -> Iterator[tuple[str, str, str, str]]:
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


def _add(fleet: Fleet, part: Part, row: Any) -> None:
    if part.weight == 0:
        fleet.devices[part.device].reports += 1
    part.weight, part.loss = row.weight, row.metrics.get("loss")
    part.down_bytes, part.up_bytes = row.down_bytes, row.up_bytes


def _facts(hello: bytes, samples: int) -> Facts:
    try:
        told = decode(Hello, hello)
    except ProtocolError:
        return Facts(samples=samples)
    engines = {
        printable(name, _MOST_NAME): printable(told.engines[name], _MOST_NAME)
        for name in sorted(told.engines)[:_MOST_ENGINES]
    }
    return Facts(
        agent=printable(told.agent, _MOST_NAME),
        memory_bytes=told.memory_bytes,
        cores=told.cores,
        samples=samples,
        engines=engines,
    )
