"""The server's journal on disk: what has to survive ``kill -9`` at any instant.

SQLite in write-ahead mode by default; any SQLAlchemy URL works. Every method is one transaction: it happened or it
did not. Updates are journaled before they are acknowledged. Their bytes lie in a place of their own
(:mod:`edgefl_server.storage.update_store`), are durable before the journal names them, and go when the round is over.
Workers (:mod:`edgefl_server.shards`) write to the same journal: a round takes an update, or it is closed and does not.
"""

from __future__ import annotations

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
from edgefl_server.coordinator.roster import Device
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.storage import device_rows, participation_rows, round_rows, tables, trial_rows, update_rows
from edgefl_server.storage.update_rows import AcceptedUpdate, ShardOf
from edgefl_server.storage.update_store import UpdateLocation, UpdateStore

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
        """The federation's run, if one was ever begun."""
        query = sa.select(tables.runs).where(tables.runs.c.federation == self._federation)
        with self._transaction() as connection:
            row = connection.execute(query).mappings().first()
        return RunRecord(row["run"], row["digest"], row["number"]) if row else None

    def begin_run(self, run: RunRecord) -> None:
        with self._transaction() as connection:
            connection.execute(tables.runs.insert().values(**vars(run), federation=self._federation))

    # -- devices ---------------------------------------------------------------------------------------------

    def save_devices(self, devices: Iterable[tuple[Device, bytes | None]]) -> None:
        """Remember devices, each with the hello that it sent, if it sent one anew: all in one step."""
        with self._transaction() as connection:
            device_rows.save(connection, self._federation, devices)

    def devices(self) -> dict[str, Device]:
        with self._transaction() as connection:
            return device_rows.devices(connection, self._federation)

    def count_devices(self) -> int:
        """Return the number of devices with a tier."""
        with self._transaction() as connection:
            return device_rows.count(connection, self._federation)

    # -- rounds ----------------------------------------------------------------------------------------------

    ended_round = _in_transaction(round_rows.ended_round)
    open_tasks = _in_transaction(round_rows.open_tasks)
    task_status = _in_transaction(round_rows.status)
    versions = _in_transaction(round_rows.versions)
    current_round = _in_transaction(round_rows.open_round)
    progress = _in_transaction(round_rows.progress)
    stop_taking = _in_transaction(round_rows.close)
    take_again = _in_transaction(round_rows.open_again)
    record = _in_transaction(participation_rows.read)
    trial = _in_transaction(trial_rows.trial)
    reports = _in_transaction(trial_rows.reports)
    undo = _in_transaction(round_rows.undo)

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
                    **{name: getattr(opened, name) for name in round_rows.COLUMNS},
                )
            )
            round_rows.insert_tasks(connection, run, opened.began)

    def reassign(self, run: str, over: Sequence[Assignment], tasks: Sequence[Assignment]) -> None:
        """Tasks that ended without an answer, as their status says, and new ones."""
        with self._transaction() as connection:
            round_rows.answer(connection, run, over)
            round_rows.insert_tasks(connection, run, tasks)

    def begin_again(self, run: str, number: int) -> None:
        """Mark an open round: once it has ended, the method begins again. Before then the mark says nothing."""
        key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
        with self._transaction() as connection:
            connection.execute(tables.rounds.update().where(key).values(restart=True))

    def decline(self, run: str, task: Assignment, reason: str) -> None:
        """A device sends no update for that task."""
        with self._transaction() as connection:
            round_rows.answer(connection, run, [replace(task, status="declined", reason=reason)])

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
            participation_rows.keep(connection, run, took_part or {})
            if not self._keep:
                update_rows.prune(connection, run, number, self._most_rows, self._versions)
        if not self._keep:
            self._files.drop()

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

    add_traffic = _in_transaction(update_rows.add_traffic)
    tally = _in_transaction(update_rows.tally)

    def accept(self, run: str, number: int, updates: Sequence[AcceptedUpdate]) -> None:
        """Keep accepted updates and mark their assignments, all or none; after this they may be acknowledged."""
        places = self._files.append(number, [update.data for update in updates])
        with self._transaction() as connection:
            update_rows.accept(connection, run, number, updates, places, self._shard_of)

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
                round_rows.answer(connection, run, [replace(final, status="rejected")])
            return update_rows.reject(connection, key, step, reason, text)

    def accepted_sha256(self, run: str, number: int, device: str, nonce: str) -> str:
        """The digest of this device's update for a task that was accepted, in any round that has its rows; empty if none
        was."""
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
        """The accepted updates of a round (of these ``shards`` only), in the order in which they came, one at a time: memory
        stays at one update. StoreError if their bytes are gone."""
        columns = tables.updates.c
        names = ("device", "sha256", "weight", "share", "file", "offset", "size")
        query = sa.select(*(columns[name] for name in names))
        which = update_rows.of_step(run, number) & (columns.reason == "")
        if shards is not None:
            which &= columns.shard.in_(sorted(shards))
        with self._transaction() as connection:
            rows = connection.execute(query.where(which).order_by(columns.file, columns.offset)).all()
        for device, sha256, weight, share, *place in rows:
            yield StoredUpdate(device, sha256, weight, share, self._files.read(UpdateLocation(*place)))
