"""Participation of each device, as the journal's table holds it, within one transaction of
:mod:`edgefl_server.storage.journal`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl_server.coordinator.record import Participation, Record, Turnout
from edgefl_server.storage import tables

TURNOUT = "turnout"
"""Where a round's outcome has what came of its tasks, by tier."""


def keep(connection: Connection, run: str, now: Mapping[str, Participation]) -> None:
    """These devices' rows are ``now`` so."""
    if not now:
        return
    columns = tables.participations.c
    key = (columns.run == run) & (columns.device == sa.bindparam("name"))
    connection.execute(tables.participations.delete().where(key), [{"name": name} for name in now])
    rows = [
        {"run": run, "device": name, "tasks": each.tasks, "reports": each.reports, "last": each.last}
        for name, each in now.items()
    ]
    connection.execute(tables.participations.insert(), rows)


def read(connection: Connection, run: str) -> Record:
    """Return the participation of all devices in the finished rounds of a run."""
    columns = tables.participations.c
    of = {
        row.device: Participation(row.tasks, row.reports, row.last)
        for row in connection.execute(sa.select(tables.participations).where(columns.run == run))
    }
    rounds = tables.rounds.c
    query = sa.select(rounds.outcome).where((rounds.run == run) & (rounds.state != "open"))
    told = [row[0].get(TURNOUT) for row in connection.execute(query.order_by(rounds.round))]
    turnouts = [msgspec.convert(each, dict[str, Turnout]) for each in told if each]
    return Record.read(of, tuple(turnouts))
