"""Queries on the journal's table of updates. They run in a transaction of :mod:`edgefl_server.storage.journal`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.wire.mqtt.topics import NO_SHARD, PublishTraffic
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.events import TierResult
from edgefl_server.storage import round_table, tables
from edgefl_server.storage.update_storage import UpdateLocation

MOST_REJECTED = 16
"""Largest number of refused updates that are stored per device and round, so that nobody can fill the disk."""

_updates = tables.updates.c


@dataclass(frozen=True, slots=True)
class AcceptedUpdate:
    """Row of an accepted update, and its bytes.

    Attributes:
        assignment: Task that it answers.
        sha256: Digest of ``data``.
        weight: Its weight in the mean.
        share: Factor of its change, below 1 for stale updates.
        metrics: Metrics that the device reported.
        down: Messages that the device received for the round so far.
        up: Messages that it sent for the round so far.
        up_float32_bytes: Size of the sent messages if the update were float32.
        data: Bytes as received.
        train_ms: Reported time of all its local steps.
    """

    assignment: Assignment
    sha256: str
    weight: int
    share: float
    metrics: Mapping[str, float]
    down: PublishTraffic
    up: PublishTraffic
    up_float32_bytes: int
    data: bytes
    train_ms: float = 0.0


@dataclass(frozen=True)
class Tally:
    """Figures of the updates that one round counted.

    Bytes count accepted updates only: message payloads, and in the fields with ``wire`` also message headers.
    ``train_loss`` is the mean over the devices that reported one, else None. ``staleness`` is the mean number of
    rounds between the round in which an update began and this one. ``tiers`` are the figures by tier.
    """

    reports: int
    rejected: int
    train_loss: float | None
    down_bytes: int
    up_bytes: int
    down_wire_bytes: int
    up_wire_bytes: int
    up_float32_bytes: int
    staleness: float = 0.0
    tiers: Mapping[str, TierResult] = field(default_factory=dict)


def of_step(run: str, number: int) -> sa.ColumnElement[bool]:
    """Return the SQL condition for updates that round ``number`` counted, including those of tasks from earlier rounds."""
    return (_updates.run == run) & (_updates.step == number)


_INSERT = tables.updates.insert()

ShardOf = Callable[[str], int]
"""Function from the name of a device to its shard, if workers receive its updates."""


def accept(
    connection: Connection,
    run: str,
    number: int,
    updates: Sequence[AcceptedUpdate],
    places: Sequence[UpdateLocation],
    shard_of: ShardOf,
) -> None:
    """Insert rows of updates and mark their tasks as accepted.

    Args:
        connection: Connection in a transaction.
        run: Identifier of the run.
        number: Round that counts the updates.
        updates: The updates.
        places: Locations of their bytes.
        shard_of: Function that returns the shard of a device.

    Raises:
        RoundOver: If the round is closed or one of the tasks is not open. The transaction must be rolled back.
    """
    tasks = [replace(update.assignment, status="accepted") for update in updates]
    answered = round_table.answer(connection, run, tasks)
    # After the first write, which other writers wait for: no writer closes the round between this check and the commit.
    round_table.check_open(connection, run, number, answered, len(tasks))
    connection.execute(
        _INSERT,
        [
            {
                "run": run,
                "round": update.assignment.round,
                "step": number,
                "device": update.assignment.device,
                "nonce": update.assignment.nonce,
                "sha256": update.sha256,
                "reason": "",
                "text": "",
                "weight": update.weight,
                "share": update.share,
                "metrics": dict(update.metrics),
                "train_ms": update.train_ms,
                "down_bytes": update.down.payload,
                "up_bytes": update.up.payload,
                "down_wire_bytes": update.down.wire,
                "up_wire_bytes": update.up.wire,
                "up_float32_bytes": update.up_float32_bytes,
                "shard": shard_of(update.assignment.device),
                "file": place.file,
                "offset": place.offset,
                "size": place.size,
            }
            for update, place in zip(updates, places, strict=True)
        ],
    )


def reject(connection: Connection, key: Mapping[str, object], step: int, reason: str, text: str) -> bool:
    """Insert a row of a refused update.

    Args:
        connection: Connection in a transaction.
        key: Values of the columns run, round, device, nonce and sha256.
        step: Round in which it arrived.
        reason: Reason code.
        text: Reason for people.

    Returns:
        False, without a row, if ``key`` is in the table or the device has reached the limit of refusals in that round.
    """
    same = sa.and_(*(_updates[name] == value for name, value in key.items()))
    if connection.execute(sa.select(_updates.reason).where(same)).first() is not None:
        return False
    of_device = sa.and_(*(_updates[name] == key[name] for name in ("run", "round", "device")))
    query = sa.select(sa.func.count()).where(of_device & (_updates.reason != ""))
    if connection.execute(query).scalar_one() >= MOST_REJECTED:
        return False
    empty: dict[str, object] = {
        "weight": 0,
        "metrics": {},
        "train_ms": 0.0,
        "shard": NO_SHARD,
        "file": "",
        "offset": 0,
        "size": 0,
    }
    empty |= dict.fromkeys(tables.SIZES, 0)
    connection.execute(tables.updates.insert().values(**key, **empty, step=step, reason=reason, text=text))
    return True


def add_traffic(connection: Connection, run: str, number: int, came: Mapping[str, PublishTraffic]) -> None:
    """Add the traffic in ``came`` to the rows of the devices' accepted updates in round ``number``.

    ``came`` counts, by device, the messages that arrived after the device's update was accepted.
    """
    key = of_step(run, number) & (_updates.reason == "") & (_updates.device == sa.bindparam("name"))
    more = {"up_bytes": "payload", "up_wire_bytes": "wire", "up_float32_bytes": "payload"}
    values = {column: _updates[column] + sa.bindparam(part) for column, part in more.items()}
    rows = [
        {"name": device, "payload": traffic.payload, "wire": traffic.wire} for device, traffic in came.items()
    ]
    if rows:
        connection.execute(tables.updates.update().where(key).values(values), rows)


def tally(connection: Connection, run: str, number: int) -> Tally:
    """Return the figures of the updates that round ``number`` counted, accepted and refused, and its tasks by tier."""
    tasks = tables.assignments.c
    same = [tasks[name] == _updates[name] for name in ("run", "round", "device", "nonce")]
    columns = (_updates.reason, _updates.metrics, _updates.round, _updates.train_ms, tasks.tier)
    query = sa.select(*columns, *(_updates[name] for name in tables.SIZES)).select_from(
        tables.updates.outerjoin(tables.assignments, sa.and_(*same))
    )
    rows = connection.execute(query.where(of_step(run, number)).order_by(_updates.device)).all()
    accepted = [row for row in rows if not row.reason]
    counts = (
        sa.select(tasks.tier, tasks.status, sa.func.count())
        .where((tasks.run == run) & (tasks.round == number))
        .group_by(tasks.tier, tasks.status)
    )
    by_status: dict[str, dict[str, int]] = {}
    for tier, status, count in connection.execute(counts):
        by_status.setdefault(tier, {})[status] = count
    tiers = {*by_status, *(row.tier for row in rows if row.tier)}
    return Tally(
        reports=len(accepted),
        rejected=len(rows) - len(accepted),
        train_loss=_mean([row.metrics["loss"] for row in accepted if "loss" in row.metrics]),
        **{name: sum(getattr(row, name) for row in accepted) for name in tables.SIZES},
        staleness=sum(number - row.round for row in accepted) / max(1, len(accepted)),
        tiers={
            tier: _tier_result([row for row in rows if row.tier == tier], by_status.get(tier, {}))
            for tier in sorted(tiers)
        },
    )


def _tier_result(rows: Sequence[sa.Row[Any]], tasks: Mapping[str, int]) -> TierResult:
    """Return the figures of a tier from the ``rows`` of its updates and the number of its tasks by status."""
    accepted = [row for row in rows if not row.reason]
    return TierResult(
        selected=sum(tasks.values()),
        reports=len(accepted),
        rejected=len(rows) - len(accepted),
        declined=tasks.get("declined", 0),
        train_loss=_mean([row.metrics["loss"] for row in accepted if "loss" in row.metrics]),
        train_ms=_mean([row.train_ms for row in accepted if row.train_ms > 0]),
        down_bytes=sum(row.down_bytes for row in accepted),
        up_bytes=sum(row.up_bytes for row in accepted),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def prune(connection: Connection, run: str, number: int, most: int, versions: int) -> None:
    """Delete tasks and updates of the oldest rounds, so that about ``most`` rows of each are left.

    Rows of round ``number`` and of ``versions`` rounds before it stay. The outcome of a round is in its own row and
    stays too.
    """
    tasks = tables.assignments.c
    query = (
        sa.select(tasks.round, sa.func.count())
        .where(tasks.run == run)
        .group_by(tasks.round)
        .order_by(tasks.round.desc())
    )
    total = 0
    for each, count in connection.execute(query):
        total += count
        if total > most and each < number - versions:
            for table in (tables.assignments, tables.updates):
                old = (table.c.run == run) & (table.c.round <= each)
                connection.execute(table.delete().where(old))
            return
