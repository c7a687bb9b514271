"""The server's journal on disk: what has to survive ``kill -9`` at any instant.

SQLite in write-ahead mode by default; any SQLAlchemy URL works. Every method is one transaction: it happened or it
did not. Updates are journaled before they are acknowledged. Their bytes lie in a place of their own
(:mod:`edgefl_server.storage.update_storage`), are durable before the journal names them, and go when the round is over.
Workers (:mod:`edgefl_server.shards`) write to the same journal: a round takes an update, or it is closed and does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.errors import StoreError
from edgefl.wire.mqtt.topics import NO_SHARD
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.record import Participation
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.states import OpenRound, State
from edgefl_server.storage import device_table, round_table, tables, update_table
from edgefl_server.storage.update_storage import UpdateLocation, UpdateStore
from edgefl_server.storage.update_table import AcceptedUpdate, ShardOf

_Given = ParamSpec("_Given")
_Read = TypeVar("_Read")

MOST_ROWS = 20_000
"""Tasks, and updates, that are kept of rounds that are over: about twenty rounds of a thousand devices, a thousand of
twenty."""


@dataclass(frozen=True)
class RunRecord:
    """One training run. ``number`` is its next (or open) round, which starts from checkpoint ``number - 1``."""

    run: str
    digest: str
    number: int


@dataclass(frozen=True)
class StoredUpdate:
    """An accepted update as it came, with its weight, and the share of its change that counts."""

    device: str
    sha256: str
    weight: int
    share: float
    data: bytes


def _in_transaction(
    rows: Callable[Concatenate[Connection, _Given], _Read],
) -> Callable[Concatenate[Journal, _Given], _Read]:
    """Return a method of the journal that calls ``rows`` in a transaction of its own."""

    @wraps(rows)
    def method(journal: Journal, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Read:
        with journal._transaction() as connection:
            return rows(connection, *args, **kwargs)

    return method


class Journal:
    """The journal of one federation; ``files`` hold the bytes of updates. StoreError if the database cannot be opened.

    ``most_rows``: how many tasks of rounds that are over it remembers. ``keep``: all of them, and the bytes of all updates.
    ``versions``: rounds before the last one whose devices may still be at work. ``shard_of`` names the shard of a device,
    where a worker writes.
    """

    def __init__(
        self,
        url: str,
        federation: str,
        files: UpdateStore,
        *,
        most_rows: int = MOST_ROWS,
        keep: bool = False,
        versions: int = 1,
        shard_of: ShardOf = lambda _: NO_SHARD,
    ) -> None:
        self._federation = federation
        self._files = files
        self._most_rows = most_rows
        self._keep = keep
        self._versions = versions
        self._shard_of = shard_of
        self._engine = tables.engine(url)
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
            here = self._engine.dialect.name == "sqlite"
            remedy = (
                "free some space or choose another folder"
                if here
                else "start that database again, or mend the link"
            )
            raise StoreError(
                f"the journal at {self._engine.url!s} failed: {' '.join(str(reason).split())}; {remedy}",
                url=str(self._engine.url),
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._guard(), self._engine.begin() as connection:
            yield connection

    # -- runs ------------------------------------------------------------------------------------------------

    def latest_run(self) -> RunRecord | None:
        """Return the federation's run, or None if none was begun."""
        query = sa.select(tables.runs).where(tables.runs.c.federation == self._federation)
        with self._transaction() as connection:
            row = connection.execute(query).mappings().first()
        return RunRecord(row["run"], row["digest"], row["number"]) if row else None

    def begin_run(self, run: RunRecord) -> None:
        with self._transaction() as connection:
            connection.execute(tables.runs.insert().values(**vars(run), federation=self._federation))

    # -- devices ---------------------------------------------------------------------------------------------

    def save_devices(self, devices: Iterable[tuple[RosterEntry, bytes | None]]) -> None:
        """Remember devices, each with the hello that it sent, if it sent one anew: all in one step."""
        with self._transaction() as connection:
            device_table.save(connection, self._federation, devices)

    def devices(self) -> dict[str, RosterEntry]:
        with self._transaction() as connection:
            return device_table.devices(connection, self._federation)

    def count_devices(self) -> int:
        """Return the number of devices with a tier."""
        with self._transaction() as connection:
            return device_table.count(connection, self._federation)

    # -- rounds ----------------------------------------------------------------------------------------------

    ended_round = _in_transaction(round_table.ended_round)
    open_tasks = _in_transaction(round_table.open_tasks)
    task_status = _in_transaction(round_table.status)
    versions = _in_transaction(round_table.versions)
    current_round = _in_transaction(round_table.open_round)
    progress = _in_transaction(round_table.progress)
    stop_taking = _in_transaction(round_table.close)
    take_again = _in_transaction(round_table.open_again)
    record = _in_transaction(round_table.read_participations)
    trial = _in_transaction(round_table.trial)
    reports = _in_transaction(round_table.reports)
    undo = _in_transaction(round_table.undo)

    def open_round(
        self, run: str, opened: OpenRound, units: bytes, outcome: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a round. ``units`` is opaque: what was published for it, so that it can be cleared later. ``outcome``: what
        of it is known already."""
        with self._transaction() as connection:
            connection.execute(
                tables.rounds.insert().values(
                    run=run,
                    round=opened.number,
                    state="open",
                    units=units,
                    outcome=dict(outcome or {}),
                    **{name: getattr(opened, name) for name in round_table.COLUMNS},
                )
            )
            round_table.insert_tasks(connection, run, opened.began)

    def reassign(self, run: str, over: Sequence[Assignment], tasks: Sequence[Assignment]) -> None:
        """Store tasks that ended without an answer, with their status, and new ones."""
        with self._transaction() as connection:
            round_table.answer(connection, run, over)
            round_table.insert_tasks(connection, run, tasks)

    def begin_again(self, run: str, number: int) -> None:
        """Mark an open round: once it has ended, the method begins again. Before then the mark says nothing."""
        key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            connection.execute(tables.rounds.update().where(key).values(restart=True))

    def decline(self, run: str, task: Assignment, reason: str) -> None:
        """Store that a device sends no update for a task."""
        with self._transaction() as connection:
            round_table.answer(connection, run, [replace(task, status="declined", reason=reason)])

    def published_units(self, run: str) -> list[bytes]:
        """Return the units of the last two rounds, or of those that are open, the newest first."""
        query = (
            sa.select(tables.rounds.c.units)
            .where(tables.rounds.c.run == run)
            .order_by(tables.rounds.c.round.desc())
        )
        with self._transaction() as connection:
            return [row[0] for row in connection.execute(query.limit(self._versions + 1))]

    def end_round(
        self,
        run: str,
        number: int,
        *,
        state: str,
        outcome: Mapping[str, Any],
        took_part: Mapping[str, Participation] | None = None,
    ) -> None:
        """Close (or abandon) a round: the run moves on to the next one, the bytes of its updates go, and old rows,
        unless they are kept.

        ``took_part``: its devices' rows from now on.
        """
        with self._transaction() as connection:
            connection.execute(
                tables.rounds.update()
                .where((tables.rounds.c.run == run) & (tables.rounds.c.round == number))
                .values(state=state, outcome=dict(outcome))
            )
            connection.execute(tables.runs.update().where(tables.runs.c.run == run).values(number=number + 1))
            before = (tables.rounds.c.run == run) & (tables.rounds.c.round < number - self._versions)
            connection.execute(
                tables.rounds.update().where(before & (tables.rounds.c.units != b"")).values(units=b"")
            )
            round_table.keep_participations(connection, run, took_part or {})
            if not self._keep:
                update_table.prune(connection, run, number, self._most_rows, self._versions)
        if not self._keep:
            self._files.drop()

    def add_to_outcome(self, run: str, number: int, more: Mapping[str, Any]) -> None:
        """Add to an ended round's outcome, for example an evaluation."""
        key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            known = connection.execute(sa.select(tables.rounds.c.outcome).where(key)).scalar_one()
            connection.execute(tables.rounds.update().where(key).values(outcome={**known, **more}))

    def outcome(self, run: str, number: int) -> tuple[str, dict[str, Any]]:
        """Return (state, outcome) of one round."""
        which = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            row = connection.execute(
                sa.select(tables.rounds.c.state, tables.rounds.c.outcome).where(which)
            ).one()
        return row[0], row[1]

    def outcomes(self, run: str) -> list[tuple[int, str, dict[str, Any]]]:
        """Return (round, state, outcome) of every round so far, in order."""
        query = sa.select(tables.rounds.c.round, tables.rounds.c.state, tables.rounds.c.outcome).where(
            tables.rounds.c.run == run
        )
        with self._transaction() as connection:
            return [
                (row[0], row[1], row[2]) for row in connection.execute(query.order_by(tables.rounds.c.round))
            ]

    # -- updates ---------------------------------------------------------------------------------------------

    add_traffic = _in_transaction(update_table.add_traffic)
    tally = _in_transaction(update_table.tally)

    def accept(self, run: str, number: int, updates: Sequence[AcceptedUpdate]) -> None:
        """Keep accepted updates and mark their assignments, all or none; after this they may be acknowledged."""
        places = self._files.append(number, [update.data for update in updates])
        with self._transaction() as connection:
            update_table.accept(connection, run, number, updates, places, self._shard_of)

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
        step: int,
        final: Assignment | None,
    ) -> bool:
        """Journal a refused update; False if it was known, or the device has had MOST_REJECTED in that round.

        ``step``: the round that it came in; ``final``: the task that ends with it.
        """
        key = {"run": run, "round": number, "device": device, "nonce": nonce, "sha256": sha256}
        with self._transaction() as connection:
            if final is not None:
                round_table.answer(connection, run, [replace(final, status="rejected")])
            return update_table.reject(connection, key, step, reason, text)

    def accepted_sha256(self, run: str, number: int, device: str, nonce: str) -> str:
        """Return the digest of a device's accepted update for a task, in any round that has its rows; empty if there is
        none.
        """
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

    def accepted(
        self, run: str, number: int, shards: Collection[int] | None = None
    ) -> Iterator[StoredUpdate]:
        """Yield the accepted updates of a round (of these ``shards`` only) in the order of their arrival.

        Holds one in memory at a time. StoreError if their bytes are missing.
        """
        columns = tables.updates.c
        names = ("device", "sha256", "weight", "share", "file", "offset", "size")
        query = sa.select(*(columns[name] for name in names))
        which = update_table.of_step(run, number) & (columns.reason == "")
        if shards is not None:
            which &= columns.shard.in_(sorted(shards))
        with self._transaction() as connection:
            rows = connection.execute(query.where(which).order_by(columns.file, columns.offset)).all()
        for device, sha256, weight, share, *place in rows:
            yield StoredUpdate(device, sha256, weight, share, self._files.read(UpdateLocation(*place)))


_TOGETHER_S = 1.0
"""News of devices waits that long for more, while messages come one after the other."""


class DeviceWriteBuffer:
    """Devices without a tier take part in nothing, and have no rows: anybody may be one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._new: dict[str, tuple[RosterEntry, bytes | None]] = {}
        self._since = 0.0

    def take(self, before: State, after: State, name: str, hello: bytes | None) -> None:
        """Buffer a device that changed, with its ``hello`` if it sent one."""
        device = after.devices.get(name)
        if device is None or not device.tier or device is before.devices.get(name):
            return
        if not self._new:
            self._since = time.monotonic()
        known = self._new.get(name)
        self._new[name] = (device, hello if hello is not None else known[1] if known else None)

    def wait(self) -> float | None:
        """Return the seconds until something is to be written; None if nothing is."""
        return max(0.0, self._since + _TOGETHER_S - time.monotonic()) if self._new else None

    def write(self, *, quiet: bool) -> None:
        """Journal what is new, if it is ``quiet`` or has waited long enough. StoreError if it cannot be written; it is tried
        again later."""
        if self._new and (quiet or self.wait() == 0.0):
            self._since = time.monotonic()
            self._journal.save_devices(list(self._new.values()))
            self._new.clear()
