"""Journal of the server: the state that must survive ``kill -9`` at any time.

The default is SQLite in write-ahead mode; any SQLAlchemy URL works. Each method is one transaction. Updates are
journaled before they are acknowledged. Their bytes are stored separately
(:mod:`edgefl_server.storage.update_storage`): they are durable before the journal names them, and deleted when the
round is over. Workers (:mod:`edgefl_server.shards`) write to the same journal, so a round either accepts an update or
is closed for it.
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
"""Number of tasks, and of updates, that are kept of finished rounds: about twenty rounds of a thousand devices."""


@dataclass(frozen=True)
class RunRecord:
    """Row of a training run in the journal.

    Attributes:
        run: Identifier of the run.
        digest: Digest of its settings.
        number: Number of the next or open round, which begins from checkpoint ``number - 1``.
    """

    run: str
    digest: str
    number: int


@dataclass(frozen=True)
class StoredUpdate:
    """Accepted update as stored.

    Attributes:
        device: Name of the device.
        sha256: Digest of ``data``.
        weight: Weight in the mean.
        share: Factor of its values, below 1 for stale updates.
        data: Encoded bytes as received.
    """

    device: str
    sha256: str
    weight: int
    share: float
    data: bytes


def _in_transaction(
    rows: Callable[Concatenate[Connection, _Given], _Read],
) -> Callable[Concatenate[Journal, _Given], _Read]:
    """Return a method of the journal that runs the query ``rows`` in a transaction of its own.

    ``rows`` takes the connection and the arguments of the method.
    """

    @wraps(rows)
    def method(journal: Journal, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Read:
        with journal._transaction() as connection:
            return rows(connection, *args, **kwargs)

    return method


class Journal:
    """Journal of one federation: the database of its run, devices, rounds, tasks and updates.

    Args:
        url: SQLAlchemy URL of the database.
        federation: Name of the federation.
        files: Storage of the updates' bytes.
        most_rows: Number of tasks of finished rounds to keep.
        keep: True to keep all tasks, and the bytes of all updates.
        versions: Number of rounds before the last one whose devices may still work.
        shard_of: Function that returns the shard of a device; only for a worker.

    Raises:
        StoreError: If the database cannot be opened. All methods raise it if the database fails.
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
        """Close all connections to the database."""
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
        """Return the federation's run, or None if none was begun. A journal has one run per federation."""
        query = sa.select(tables.runs).where(tables.runs.c.federation == self._federation)
        with self._transaction() as connection:
            row = connection.execute(query).mappings().first()
        return RunRecord(row["run"], row["digest"], row["number"]) if row else None

    def begin_run(self, run: RunRecord) -> None:
        """Insert the row of a new run."""
        with self._transaction() as connection:
            connection.execute(tables.runs.insert().values(**vars(run), federation=self._federation))

    # -- devices ---------------------------------------------------------------------------------------------

    def save_devices(self, devices: Iterable[tuple[RosterEntry, bytes | None]]) -> None:
        """Insert or update ``devices`` in one transaction: pairs (device, its encoded hello message).

        A hello of None keeps the stored one.
        """
        with self._transaction() as connection:
            device_table.save(connection, self._federation, devices)

    def devices(self) -> dict[str, RosterEntry]:
        """Return the stored devices of the federation by name."""
        with self._transaction() as connection:
            return device_table.devices(connection, self._federation)

    def count_devices(self) -> int:
        """Return the number of the federation's stored devices that have a tier."""
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
        """Insert a round and its tasks.

        Args:
            run: Identifier of the run.
            opened: The round.
            units: Opaque encoding of the published blobs, so that a later process can clear them.
            outcome: Parts of the outcome that are known already.
        """
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
        """Store the new status of the tasks ``over``, which ended without an answer, and insert the new ``tasks``."""
        with self._transaction() as connection:
            round_table.answer(connection, run, over)
            round_table.insert_tasks(connection, run, tasks)

    def begin_again(self, run: str, number: int) -> None:
        """Mark round ``number``: the algorithm begins again after it. The mark has no effect while the round is open."""
        key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            connection.execute(tables.rounds.update().where(key).values(restart=True))

    def decline(self, run: str, task: Assignment, reason: str) -> None:
        """Store that a device declined its ``task``, with the ``reason`` code. Nothing changes if the task is not
        open.
        """
        with self._transaction() as connection:
            round_table.answer(connection, run, [replace(task, status="declined", reason=reason)])

    def published_units(self, run: str) -> list[bytes]:
        """Return the ``units`` that :meth:`open_round` stored for the last round and earlier ones, the newest first.

        It includes as many earlier rounds as devices may still work for.
        """
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
        """Close or abandon round ``number``, and move the run to the next round.

        It stores the outcome, and deletes updates' bytes and old rows that are no longer needed.

        Args:
            run: Identifier of the run.
            number: Number of the round.
            state: ``closed`` or ``abandoned``.
            outcome: Figures of the round.
            took_part: New participation rows of its devices.
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
        """Add the entries of ``more``, such as an evaluation, to the stored outcome of a round. Equal keys are
        replaced.
        """
        key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            known = connection.execute(sa.select(tables.rounds.c.outcome).where(key)).scalar_one()
            connection.execute(tables.rounds.update().where(key).values(outcome={**known, **more}))

    def outcome(self, run: str, number: int) -> tuple[str, dict[str, Any]]:
        """Return (state, outcome) of round ``number``; the outcome has its figures by name.

        Raises:
            StoreError: If there is no such round.
        """
        which = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            row = connection.execute(
                sa.select(tables.rounds.c.state, tables.rounds.c.outcome).where(which)
            ).one()
        return row[0], row[1]

    def outcomes(self, run: str) -> list[tuple[int, str, dict[str, Any]]]:
        """Return (number, state, outcome) of every round of the run, in order; the outcome has its figures by name."""
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
        """Store accepted updates and mark their tasks, all or none. The updates may be acknowledged after this returns.

        Raises:
            RoundOver: If the round is closed, or one of the tasks is not open. Nothing is stored then.
            StoreError: If the bytes or rows cannot be written.
        """
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
        """Store a refused update.

        Args:
            run: Identifier of the run.
            number: Round that the update names.
            device: Name of the device.
            nonce: Nonce of the update.
            sha256: Digest of the update.
            reason: Reason code.
            text: Reason for people.
            step: Round in which the update arrived.
            final: Task that ends with the refusal, or None.

        Returns:
            True if a row was inserted. False if it was known, or the device has reached the limit of refusals in
            that round.
        """
        key = {"run": run, "round": number, "device": device, "nonce": nonce, "sha256": sha256}
        with self._transaction() as connection:
            if final is not None:
                round_table.answer(connection, run, [replace(final, status="rejected")])
            return update_table.reject(connection, key, step, reason, text)

    def accepted_sha256(self, run: str, number: int, device: str, nonce: str) -> str:
        """Return the digest of the update that was accepted for a device's task in round ``number``.

        An empty text if there is none, or if its row was deleted.
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
        """Yield the accepted updates of a round in order of arrival. Their bytes are read one at a time.

        ``shards`` limits them to devices of these shards; None for all.

        Raises:
            StoreError: If the bytes of an update are missing.
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
"""Longest time that changed devices are buffered while messages arrive without a pause."""


class DeviceWriteBuffer:
    """Buffer of changed devices that are journaled together.

    Devices without a tier are not journaled, because anybody can connect as one.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._new: dict[str, tuple[RosterEntry, bytes | None]] = {}
        self._since = 0.0

    def take(self, before: State, after: State, name: str, hello: bytes | None) -> None:
        """Buffer the device ``name`` if it differs between the two states and has a tier.

        ``hello`` is its encoded hello message; None keeps the stored one.
        """
        device = after.devices.get(name)
        if device is None or not device.tier or device is before.devices.get(name):
            return
        if not self._new:
            self._since = time.monotonic()
        known = self._new.get(name)
        self._new[name] = (device, hello if hello is not None else known[1] if known else None)

    def wait(self) -> float | None:
        """Return the seconds after which :meth:`write` should be called; None if the buffer is empty."""
        return max(0.0, self._since + _TOGETHER_S - time.monotonic()) if self._new else None

    def write(self, *, quiet: bool) -> None:
        """Journal the buffered devices if ``quiet`` is True (no messages are waiting) or a second has passed; else do
        nothing.

        Raises:
            StoreError: If the devices cannot be written. They stay buffered.
        """
        if self._new and (quiet or self.wait() == 0.0):
            self._since = time.monotonic()
            self._journal.save_devices(list(self._new.values()))
            self._new.clear()
