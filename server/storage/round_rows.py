"""Rounds as the journal's tables hold them, read within one transaction of :mod:`server.storage.journal`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.coordinator.fleet import Assignment, Assignments
from server.coordinator.states import OpenRound
from server.storage import tables


@dataclass(frozen=True)
class MethodProgress:
    """Where a method stands (:class:`server.coordinator.states.State`): completed exchanges, last closed round, who
    must take part."""

    position: int = 0
    base: int = 0
    members: tuple[str, ...] = ()


def open_round(connection: Connection, run: str) -> OpenRound | None:
    """The round that is open; None between rounds."""
    which = (tables.rounds.c.run == run) & (tables.rounds.c.state == "open")
    row = connection.execute(sa.select(tables.rounds).where(which)).mappings().first()
    if row is None:
        return None
    query = sa.select(tables.assignments).where(
        (tables.assignments.c.run == run) & (tables.assignments.c.round == row["round"])
    )
    assignments = {each["device"]: _assignment(each) for each in connection.execute(query).mappings()}
    return OpenRound(
        row["round"],
        row["model_version"],
        row["opened"],
        row["deadline"],
        row["goal"],
        Assignments(assignments),
        progress(connection, run).position,
        row["whole"],
    )


def progress(connection: Connection, run: str) -> MethodProgress:
    """Where the run's method stands: what was closed since the last round that ended with the mark ``restart``."""
    columns = tables.rounds.c
    query = sa.select(columns.round, columns.state, columns.whole, columns.restart).where(columns.run == run)
    rows = connection.execute(query.order_by(columns.round)).all()
    if not rows:
        return MethodProgress()
    began = max((row.round for row in rows if row.restart and row.state != "open"), default=0)
    closed = [row.round for row in rows if row.state == "closed"]
    position = sum(1 for number in closed if number > began)
    last = rows[-1]
    members = _devices_of(connection, run, last.round) if last.whole and last.round > began else ()
    return MethodProgress(position, max(closed, default=0), members)


def answer(connection: Connection, run: str, number: int, device: str, status: str, reason: str = "") -> None:
    key = (
        (tables.assignments.c.run == run)
        & (tables.assignments.c.round == number)
        & (tables.assignments.c.device == device)
    )
    connection.execute(tables.assignments.update().where(key).values(status=status, reason=reason))


def answer_all(connection: Connection, run: str, number: int, devices: Sequence[str], status: str) -> None:
    """The same answer of several devices."""
    columns = tables.assignments.c
    key = (columns.run == run) & (columns.round == number) & (columns.device == sa.bindparam("name"))
    connection.execute(
        tables.assignments.update().where(key).values(status=status), [{"name": name} for name in devices]
    )


def undo(connection: Connection, run: str, after: int, more: Mapping[str, Any]) -> None:
    """Rounds behind round ``after`` that were closed are abandoned, with ``more`` in their outcomes."""
    columns = tables.rounds.c
    which = (columns.run == run) & (columns.round > after) & (columns.state == "closed")
    for number, outcome in connection.execute(sa.select(columns.round, columns.outcome).where(which)).all():
        key = (columns.run == run) & (columns.round == number)
        values = {"state": "abandoned", "outcome": {**outcome, **more}}
        connection.execute(tables.rounds.update().where(key).values(**values))


def _devices_of(connection: Connection, run: str, number: int) -> tuple[str, ...]:
    key = (tables.assignments.c.run == run) & (tables.assignments.c.round == number)
    return tuple(
        sorted(connection.execute(sa.select(tables.assignments.c.device).where(key)).scalars().all())
    )


def _assignment(row: Mapping[Any, Any]) -> Assignment:
    return Assignment(
        row["device"],
        row["tier"],
        int(row["seed"]),
        row["nonce"],
        row["weight_limit"],
        row["status"],
        row["reason"],
    )
