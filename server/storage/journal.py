"""The server's journal on disk: what has to survive ``kill -9`` at any instant.

SQLite in write-ahead mode by default; any SQLAlchemy URL works. Every method is one transaction: it happened or it
did not. Updates are journaled before they are acknowledged. Their bytes lie in a place of their own
(:mod:`server.storage.update_store`), are durable before the journal names them, and go when the round is over. Workers
(:mod:`server.shards`) write to the same journal: a round takes an update, or it is closed and does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.wire.errors import StoreError
from edgefl.wire.mqtt.packets import Traffic
from edgefl.wire.mqtt.topics import NO_SHARD
from server.coordinator.fleet import Assignment
from server.coordinator.record import Participation, Record
from server.coordinator.rollout import Reports, Trial
from server.coordinator.roster import Device
from server.coordinator.states import OpenRound, Version
from server.storage import device_rows, participation_rows, round_rows, tables, trial_rows, update_rows
from server.storage.round_rows import MethodProgress
from server.storage.update_rows import AcceptedUpdate, ShardOf, Tally
from server.storage.update_store import Place, UpdateStore

MOST_ROWS = 20_000
"""Tasks, and updates, that are kept of rounds that are over: about twenty rounds of a thousand devices, a thousand of
twenty."""


@dataclass(frozen=True)
class Run:
    """One training run; ``number`` is that of its next (or open) round, which starts from checkpoint ``number - 1``."""

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
        with self._transaction() as connection:
            device_rows.save(connection, self._federation, devices)

    def devices(self) -> dict[str, Device]:
        with self._transaction() as connection:
            return device_rows.devices(connection, self._federation)

    def count_devices(self) -> int:
        """How many devices have a tier."""
        with self._transaction() as connection:
            return device_rows.count(connection, self._federation)

    # -- rounds ----------------------------------------------------------------------------------------------

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
                    model_version=opened.model_version,
                    opened=opened.opened,
                    deadline=opened.deadline,
                    goal=opened.goal,
                    whole=opened.whole,
                    weight_cap=opened.weight_cap,
                    units=units,
                    outcome=dict(outcome or {}),
                )
            )
            round_rows.insert_tasks(connection, run, opened.began)

    def reassign(self, run: str, over: Sequence[Assignment], tasks: Sequence[Assignment]) -> None:
        """Tasks that ended without an answer, as their status says, and new ones."""
        with self._transaction() as connection:
            round_rows.answer(connection, run, over)
            round_rows.insert_tasks(connection, run, tasks)

    def ended_round(self, run: str, number: int) -> OpenRound:
        """A round as it ended; of one that waited for nobody how much it took, and no tasks."""
        with self._transaction() as connection:
            return round_rows.ended_round(connection, run, number)

    def open_tasks(self, run: str) -> dict[str, Assignment]:
        """The tasks of all rounds that wait for an answer, by device."""
        with self._transaction() as connection:
            return round_rows.open_tasks(connection, run)

    def task_status(self, run: str, number: int, device: str, nonce: str) -> str:
        """How the task of a device ended that was given in round ``number``; empty if there was none that is known."""
        with self._transaction() as connection:
            return round_rows.status(connection, run, number, device, nonce)

    def versions(self, run: str) -> dict[int, Version]:
        """The model that each round began from, by its number."""
        with self._transaction() as connection:
            return round_rows.versions(connection, run)

    def current_round(self, run: str) -> OpenRound | None:
        """The round a killed server left open."""
        with self._transaction() as connection:
            return round_rows.open_round(connection, run)

    def progress(self, run: str) -> MethodProgress:
        """Where the run's method stands, from the rounds that ended and the one that is open."""
        with self._transaction() as connection:
            return round_rows.progress(connection, run)

    def stop_taking(self, run: str, number: int) -> dict[str, tuple[int, str]]:
        """Close a round to updates before its end, whoever takes them. (shard, sha256) of those that it has, by device."""
        with self._transaction() as connection:
            return round_rows.close(connection, run, number)

    def take_again(self, run: str) -> None:
        """Open the round again that a killed server was closing."""
        with self._transaction() as connection:
            round_rows.open_again(connection, run)

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
        """What :meth:`open_round` was given for the last two rounds, or those that are worked on, the newest first."""
        query = (
            sa.select(tables.rounds.c.units)
            .where(tables.rounds.c.run == run)
            .order_by(tables.rounds.c.round.desc())
        )
        with self._transaction() as connection:
            return [row[0] for row in connection.execute(query.limit(self._versions + 1))]

    def record(self, run: str) -> Record:
        """What the rounds that ended say of the devices."""
        with self._transaction() as connection:
            return participation_rows.read(connection, run)

    def trial(self, run: str) -> Trial | None:
        """The trial of a candidate as it stands; None if none has begun."""
        with self._transaction() as connection:
            return trial_rows.trial(connection, run)

    def reports(self, run: str, number: int) -> dict[str, Reports]:
        """What the updates of a round that counted say, by the tier of their tasks."""
        with self._transaction() as connection:
            return trial_rows.reports(connection, run, number)

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

    def undo(self, run: str, after: int, text: str, weights_sha256: str) -> None:
        """Between rounds: those behind round ``after`` count no more, as if they had been abandoned for what ``text`` says,
        and had left these weights."""
        with self._transaction() as connection:
            round_rows.undo(connection, run, after, text, weights_sha256)

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

    def add_traffic(self, run: str, number: int, came: Mapping[str, Traffic]) -> None:
        """What more the devices of accepted updates sent for that round."""
        with self._transaction() as connection:
            update_rows.add_traffic(connection, run, number, came)

    def tally(self, run: str, number: int) -> Tally:
        """What the updates of a round come to."""
        with self._transaction() as connection:
            return update_rows.tally(connection, run, number)

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
            yield StoredUpdate(device, sha256, weight, share, self._files.read(Place(*place)))
