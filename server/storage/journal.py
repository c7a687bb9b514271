"""The server's journal on disk: what has to survive ``kill -9`` at any instant.

SQLite in write-ahead mode by default; any SQLAlchemy URL works. Every method is one transaction: it happened or it
did not. An update is journaled before it is acknowledged, and its bytes go when its round is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.wire.errors import StoreError
from edgefl.wire.mqtt.packets import Traffic
from server.coordinator.roster import Device
from server.coordinator.states import Assignment, OpenRound
from server.storage import round_rows, tables
from server.storage.round_rows import MethodProgress

_FEW = 500
"""Names that a statement lists: databases have a limit."""
MOST_REJECTED = 16
"""Rows of refused updates per device and round: nobody may fill the disk with them."""


@dataclass(frozen=True)
class Run:
    """One training run; ``number`` is that of its next (or open) round, which starts from checkpoint ``number - 1``."""

    run: str
    digest: str
    number: int


@dataclass(frozen=True)
class StoredUpdate:
    """An accepted update as it came, with its weight."""

    device: str
    sha256: str
    weight: int
    data: bytes


@dataclass(frozen=True)
class Tally:
    """A round's updates in figures; ``train_loss`` is the mean over the devices that named one.

    Bytes are those of accepted updates: payloads of their messages, and with ``wire`` the messages' headers too;
    ``up_float32_bytes`` is what ``up_bytes`` would be if they were float32 tensors.
    """

    reports: int
    rejected: int
    train_loss: float | None
    down_bytes: int
    up_bytes: int
    down_wire_bytes: int
    up_wire_bytes: int
    up_float32_bytes: int


class Journal:
    """The journal of one federation. StoreError if the database cannot be opened."""

    def __init__(self, url: str, federation: str) -> None:
        self._federation = federation
        self._engine = sa.create_engine(url)
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", tables.use_write_ahead_log)
        with self._guard():
            tables.create(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            # The driver's own words: SQLAlchemy adds the statement and all its values.
            reason = getattr(error, "orig", None) or error
            raise StoreError(
                f"the journal at {self._engine.url!s} failed: {reason}; free some space or choose another folder",
                url=str(self._engine.url),
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._guard(), self._engine.begin() as connection:
            yield connection

    # -- runs ------------------------------------------------------------------------------------------------

    def latest_run(self) -> Run | None:
        """The federation's run, if one was ever begun."""
        query = sa.select(tables.runs).where(tables.runs.c.federation == self._federation)
        with self._transaction() as connection:
            row = connection.execute(query).mappings().first()
        return Run(row["run"], row["digest"], row["number"]) if row else None

    def begin_run(self, run: Run) -> None:
        with self._transaction() as connection:
            connection.execute(tables.runs.insert().values(**vars(run), federation=self._federation))

    # -- devices ---------------------------------------------------------------------------------------------

    def save_devices(self, devices: Iterable[tuple[Device, bytes | None]]) -> None:
        """Remember devices, each with the hello that it sent, if it sent one anew: all in one step."""
        table, new = tables.devices, {device.name: (device, hello) for device, hello in devices}
        ours = table.c.federation == self._federation
        with self._transaction() as connection:
            among = ours & table.c.device.in_(list(new)) if len(new) <= _FEW else ours
            known = set(connection.execute(sa.select(table.c.device).where(among)).scalars())
            rows = [
                {**_device_row(device), "hello": hello or b"", "federation": self._federation, "device": name}
                for name, (device, hello) in new.items()
                if name not in known
            ]
            if rows:
                connection.execute(table.insert(), rows)
            key = ours & (table.c.device == sa.bindparam("name"))
            changes = [(device, hello) for name, (device, hello) in new.items() if name in known]
            for greeted in (True, False):  # one statement for many rows has one set of columns
                many = [
                    {"name": device.name, **_device_row(device), **({"hello": hello} if greeted else {})}
                    for device, hello in changes
                    if (hello is not None) == greeted
                ]
                if many:
                    connection.execute(table.update().where(key), many)

    def devices(self) -> dict[str, Device]:
        query = sa.select(tables.devices).where(tables.devices.c.federation == self._federation)
        with self._transaction() as connection:
            rows = connection.execute(query).mappings().all()
        return {
            row["device"]: Device(row["device"], row["tier"], row["samples"], row["online"], row["last_seen"])
            for row in rows
        }

    # -- rounds ----------------------------------------------------------------------------------------------

    def open_round(self, run: str, opened: OpenRound, units: bytes) -> None:
        """Begin a round. ``units`` is opaque: what was published for it, so that it can be cleared later."""
        with self._transaction() as connection:
            connection.execute(
                tables.rounds.insert().values(
                    run=run,
                    round=opened.number,
                    state="open",
                    model_version=opened.model_version,
                    opened=opened.opened,
                    deadline=opened.deadline,
                    goal=opened.goal,
                    whole=opened.whole,
                    units=units,
                    outcome={},
                )
            )
            rows = [
                {**vars(assignment), "seed": str(assignment.seed), "run": run, "round": opened.number}
                for assignment in opened.assignments.values()
            ]
            connection.execute(tables.assignments.insert(), rows)

    def current_round(self, run: str) -> OpenRound | None:
        """The round a killed server left open."""
        with self._transaction() as connection:
            return round_rows.open_round(connection, run)

    def progress(self, run: str) -> MethodProgress:
        """Where the run's method stands, from the rounds that ended and the one that is open."""
        with self._transaction() as connection:
            return round_rows.progress(connection, run)

    def begin_again(self, run: str, number: int) -> None:
        """Mark an open round: once it has ended, the method begins again. Before then the mark says nothing."""
        key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            connection.execute(tables.rounds.update().where(key).values(restart=True))

    def decline(self, run: str, number: int, device: str, reason: str) -> None:
        """A device sends no update for that round."""
        with self._transaction() as connection:
            round_rows.answer(connection, run, number, device, "declined", reason)

    def published_units(self, run: str) -> list[bytes]:
        """What :meth:`open_round` was given for the last two rounds, the newest first."""
        query = (
            sa.select(tables.rounds.c.units)
            .where(tables.rounds.c.run == run)
            .order_by(tables.rounds.c.round.desc())
        )
        with self._transaction() as connection:
            return [row[0] for row in connection.execute(query.limit(2))]

    def end_round(self, run: str, number: int, *, state: str, outcome: Mapping[str, Any]) -> None:
        """Close (or abandon) a round: the run moves on to the next one, the bytes of its updates go."""
        with self._transaction() as connection:
            connection.execute(
                tables.rounds.update()
                .where((tables.rounds.c.run == run) & (tables.rounds.c.round == number))
                .values(state=state, outcome=dict(outcome))
            )
            connection.execute(
                tables.updates.update()
                .where((tables.updates.c.run == run) & (tables.updates.c.round == number))
                .values(bytes=None)
            )
            connection.execute(tables.runs.update().where(tables.runs.c.run == run).values(number=number + 1))

    def undo(self, run: str, after: int, more: Mapping[str, Any]) -> None:
        """The rounds behind round ``after`` count no more, as if they had been abandoned; ``more`` is in their outcomes."""
        with self._transaction() as connection:
            round_rows.undo(connection, run, after, more)

    def add_to_outcome(self, run: str, number: int, more: Mapping[str, Any]) -> None:
        """Complete an ended round's outcome, with an evaluation for example."""
        key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            known = connection.execute(sa.select(tables.rounds.c.outcome).where(key)).scalar_one()
            connection.execute(tables.rounds.update().where(key).values(outcome={**known, **more}))

    def outcome(self, run: str, number: int) -> tuple[str, dict[str, Any]]:
        """(state, outcome) of one round."""
        which = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            row = connection.execute(
                sa.select(tables.rounds.c.state, tables.rounds.c.outcome).where(which)
            ).one()
        return row[0], row[1]

    def outcomes(self, run: str) -> list[tuple[int, str, dict[str, Any]]]:
        """(round, state, outcome) of every round so far, in order."""
        query = sa.select(tables.rounds.c.round, tables.rounds.c.state, tables.rounds.c.outcome).where(
            tables.rounds.c.run == run
        )
        with self._transaction() as connection:
            return [
                (row[0], row[1], row[2]) for row in connection.execute(query.order_by(tables.rounds.c.round))
            ]

    # -- updates ---------------------------------------------------------------------------------------------

    def accept(
        self,
        run: str,
        number: int,
        assignment: Assignment,
        *,
        sha256: str,
        weight: int,
        metrics: Mapping[str, float],
        down: Traffic,
        up: Traffic,
        up_float32_bytes: int,
        data: bytes,
    ) -> None:
        """Keep an accepted update and mark its assignment; after this it may be acknowledged.

        ``down`` and ``up`` are what the device fetched and sent for the round so far, ``up_float32_bytes`` what it would
        have sent as float32.
        """
        with self._transaction() as connection:
            round_rows.answer(connection, run, number, assignment.device, "accepted")
            connection.execute(
                tables.updates.insert().values(
                    run=run,
                    round=number,
                    device=assignment.device,
                    nonce=assignment.nonce,
                    sha256=sha256,
                    reason="",
                    text="",
                    weight=weight,
                    metrics=dict(metrics),
                    down_bytes=down.payload,
                    up_bytes=up.payload,
                    down_wire_bytes=down.wire,
                    up_wire_bytes=up.wire,
                    up_float32_bytes=up_float32_bytes,
                    bytes=data,
                )
            )

    def reject(
        self,
        run: str,
        number: int,
        device: str,
        nonce: str,
        sha256: str,
        reason: str,
        text: str,
        *,
        final: bool,
    ) -> bool:
        """Journal a refused update; False if it was known, or the device has had MOST_REJECTED in that round.

        ``final`` also ends the device's part in that round.
        """
        key = {"run": run, "round": number, "device": device, "nonce": nonce, "sha256": sha256}
        same = sa.and_(*(tables.updates.c[name] == value for name, value in key.items()))
        empty: dict[str, object] = {
            "weight": 0,
            "metrics": {},
            **dict.fromkeys(tables.SIZES, 0),
            "bytes": None,
        }
        with self._transaction() as connection:
            if final:
                round_rows.answer(connection, run, number, device, "rejected")
            if connection.execute(sa.select(tables.updates.c.reason).where(same)).first() is not None:
                return False
            of_round = sa.and_(*(tables.updates.c[name] == key[name] for name in ("run", "round", "device")))
            query = sa.select(sa.func.count()).where(of_round & (tables.updates.c.reason != ""))
            if connection.execute(query).scalar_one() >= MOST_REJECTED:
                return False
            connection.execute(tables.updates.insert().values(**key, **empty, reason=reason, text=text))
            return True

    def add_traffic(self, run: str, number: int, came: Mapping[str, Traffic]) -> None:
        """What more the devices of accepted updates sent for that round."""
        of_round = (
            (tables.updates.c.run == run)
            & (tables.updates.c.round == number)
            & (tables.updates.c.reason == "")
        )
        with self._transaction() as connection:
            for device, more in came.items():
                values = {
                    "up_bytes": tables.updates.c.up_bytes + more.payload,
                    "up_wire_bytes": tables.updates.c.up_wire_bytes + more.wire,
                    "up_float32_bytes": tables.updates.c.up_float32_bytes + more.payload,
                }
                key = of_round & (tables.updates.c.device == device)
                connection.execute(tables.updates.update().where(key).values(**values))

    def tally(self, run: str, number: int) -> Tally:
        """What the updates of a round come to."""
        query = sa.select(
            tables.updates.c.reason,
            tables.updates.c.metrics,
            *(tables.updates.c[name] for name in tables.SIZES),
        )
        which = (tables.updates.c.run == run) & (tables.updates.c.round == number)
        with self._transaction() as connection:
            rows = connection.execute(query.where(which).order_by(tables.updates.c.device)).all()
        accepted = [row for row in rows if not row[0]]
        losses = [row[1]["loss"] for row in accepted if "loss" in row[1]]
        return Tally(
            reports=len(accepted),
            rejected=len(rows) - len(accepted),
            train_loss=sum(losses) / len(losses) if losses else None,
            **{name: sum(row[at] for row in accepted) for at, name in enumerate(tables.SIZES, 2)},
        )

    def accepted_sha256(self, run: str, number: int, device: str, nonce: str) -> str:
        """The digest of this device's update for a task that was accepted, in any round of the run; empty if none was."""
        query = sa.select(tables.updates.c.sha256).where(
            (tables.updates.c.run == run)
            & (tables.updates.c.round == number)
            & (tables.updates.c.device == device)
            & (tables.updates.c.nonce == nonce)
            & (tables.updates.c.reason == "")
        )
        with self._transaction() as connection:
            row = connection.execute(query).first()
        return str(row[0]) if row is not None else ""

    def accepted(self, run: str, number: int) -> Iterator[StoredUpdate]:
        """The accepted updates of an open round, one at a time: memory stays at one update."""
        query = sa.select(tables.updates.c.device, tables.updates.c.sha256, tables.updates.c.weight).where(
            (tables.updates.c.run == run)
            & (tables.updates.c.round == number)
            & (tables.updates.c.reason == "")
        )
        with self._transaction() as connection:
            heads = connection.execute(query.order_by(tables.updates.c.device)).all()
        for device, sha256, weight in heads:
            which = (
                (tables.updates.c.run == run)
                & (tables.updates.c.round == number)
                & (tables.updates.c.device == device)
            )
            body = sa.select(tables.updates.c.bytes).where(which & (tables.updates.c.sha256 == sha256))
            with self._transaction() as connection:
                yield StoredUpdate(device, sha256, weight, connection.execute(body).scalar_one())


def _device_row(device: Device) -> dict[str, object]:
    return {"tier": device.tier, "samples": device.samples, "online": device.online, "last_seen": device.seen}
