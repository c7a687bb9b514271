"""Queries on the journal's tables of rounds, tasks, participations and trials. They run in a transaction of the journal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.errors import StoreError
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.record import Participation, ParticipationRecord, Turnout
from edgefl_server.coordinator.rollout import ReportMedians, Trial
from edgefl_server.coordinator.states import OpenRound, Version
from edgefl_server.storage import tables


@dataclass(frozen=True)
class MethodProgress:
    """Progress of a run's algorithm.

    Attributes:
        position: Number of completed exchanges (round trips) since the algorithm began, or began again.
        base: Number of the last closed round; 0 before the first.
        members: Names of the devices that must take part in each round; empty if not all devices are needed.
    """

    position: int = 0
    base: int = 0
    members: tuple[str, ...] = ()


COLUMNS = ("model_version", "opened", "deadline", "goal", "whole", "weight_cap")
"""Columns of a round's row that are attributes of OpenRound with the same name."""

EVALUATES = "evaluates"
"""Key in the outcome of a round in which devices evaluate the model. Such a round completes no exchange."""

CLOSING = "closing"
"""State of a round whose updates are being summed. It accepts no more updates."""

# Statements that every group of updates needs are built once: that costs more than running them.
_tasks = tables.assignments.c
_ANSWER = (
    tables.assignments.update()
    .where(
        _tasks.run == sa.bindparam("of_run"),
        _tasks.round == sa.bindparam("number"),
        _tasks.device == sa.bindparam("name"),
        _tasks.nonce == sa.bindparam("key"),
        _tasks.status == "open",
    )
    .values(status=sa.bindparam("to"), reason=sa.bindparam("why"))
)
_STATE_LOCKED = (
    sa.select(tables.rounds.c.state)
    .where(tables.rounds.c.run == sa.bindparam("of_run"), tables.rounds.c.round == sa.bindparam("number"))
    .with_for_update(read=True)
)


class RoundOver(StoreError):
    """Error: an update cannot be stored, because its round is closed or its device's task is not open."""


def open_round(connection: Connection, run: str) -> OpenRound | None:
    """Return the open or closing round of the run with its tasks, or None between rounds."""
    which = (tables.rounds.c.run == run) & tables.rounds.c.state.in_(("open", CLOSING))
    row = connection.execute(sa.select(tables.rounds).where(which)).mappings().first()
    if row is None:
        return None
    if row["weight_cap"]:
        return _read_buffered(connection, run, row, open_tasks(connection, run))
    tasks = Assignments(_tasks_of(connection, run, row["round"]))
    position = _apart(row["outcome"]) or progress(connection, run).position
    return _round(row, tasks, position)


def _apart(outcome: Mapping[str, Any]) -> int:
    """Return the position of a round that does not train, :data:`EVALUATION` or :data:`MEASURING`, from its stored
    ``outcome``.

    The result is 0 for a training round.
    """
    return -int(outcome.get(EVALUATES, 0))


def _round(row: Mapping[Any, Any], tasks: Assignments, position: int, **more: Any) -> OpenRound:
    known = {name: row[name] for name in COLUMNS}
    return OpenRound(row["round"], assignments=tasks, position=position, **known, **more)


def _tasks_of(connection: Connection, run: str, number: int) -> dict[str, Assignment]:
    """Return the tasks that began from the model of round ``number``, by device."""
    columns = tables.assignments.c
    query = sa.select(tables.assignments).where((columns.run == run) & (columns.round == number))
    return {each["device"]: _assignment(each) for each in connection.execute(query).mappings()}


def _read_buffered(
    connection: Connection, run: str, row: Mapping[Any, Any], tasks: Mapping[str, Assignment]
) -> OpenRound:
    """Return an asynchronous round from its ``row``, with the open ``tasks``. Answered tasks are only counted."""
    number, took = row["round"], tables.updates.c
    taken = (took.run == run) & (took.step == number) & (took.reason == "")
    rounds = list(connection.execute(sa.select(took.round).where(taken)).scalars())
    own = (tables.assignments.c.run == run) & (tables.assignments.c.round == number)
    drawn = connection.execute(
        sa.select(sa.func.count()).select_from(tables.assignments).where(own)
    ).scalar_one()
    began = {*rounds, *(task.round for task in tasks.values())} - {number}
    known = versions(connection, run)
    older = {each: known[each] for each in sorted(began)}
    taken_up = Assignments(tasks, accepted=len(rounds))
    return _round(row, taken_up, known[number].position, older=older, drawn=drawn)


def ended_round(connection: Connection, run: str, number: int) -> OpenRound:
    """Return round ``number`` with its tasks and their answers.

    Of an asynchronous round, the answers are only counted.
    """
    which = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
    row = connection.execute(sa.select(tables.rounds).where(which)).mappings().one()
    if row["weight_cap"]:
        return _read_buffered(connection, run, row, {})
    tasks = Assignments(_tasks_of(connection, run, number))
    return _round(row, tasks, versions(connection, run)[number].position)


def open_tasks(connection: Connection, run: str) -> dict[str, Assignment]:
    """Return the tasks of all rounds of the run that are not answered, by device."""
    columns = tables.assignments.c
    query = sa.select(tables.assignments).where((columns.run == run) & (columns.status == "open"))
    return {each["device"]: _assignment(each) for each in connection.execute(query).mappings()}


def versions(connection: Connection, run: str) -> dict[int, Version]:
    """Return the model from which each round of the run began, by round number.

    Each :class:`Version` also has the number of exchanges (round trips of the algorithm) that were completed before.
    """
    columns = tables.rounds.c
    query = sa.select(columns.round, columns.state, columns.model_version, columns.restart, columns.outcome)
    position, found = 0, {}
    for row in connection.execute(query.where(columns.run == run).order_by(columns.round)):
        if apart := _apart(row.outcome):
            found[row.round] = Version(row.model_version, apart)
            continue
        found[row.round] = Version(row.model_version, position)
        position = 0 if row.restart else position + (row.state == "closed")
    return found


def insert_tasks(connection: Connection, run: str, tasks: Iterable[Assignment]) -> None:
    """Insert rows of new tasks. The end of a task's time is not stored; after a restart it is computed from the present."""
    rows = [{**asdict(task), "seed": str(task.seed), "run": run} for task in tasks]
    for row in rows:
        del row["until"]  # after a restart its time begins anew
    if rows:
        connection.execute(tables.assignments.insert(), rows)


def progress(connection: Connection, run: str) -> MethodProgress:
    """Return the progress of the run's algorithm. A round with the mark ``restart`` sets the position back to 0."""
    columns = tables.rounds.c
    query = sa.select(columns.round, columns.state, columns.whole, columns.restart, columns.outcome)
    found = connection.execute(query.where(columns.run == run).order_by(columns.round)).all()
    rows = [row for row in found if not _apart(row.outcome)]
    if not rows:
        return MethodProgress()
    began = max((row.round for row in rows if row.restart and row.state not in ("open", CLOSING)), default=0)
    closed = [row.round for row in rows if row.state == "closed"]
    position = sum(1 for number in closed if number > began)
    last = rows[-1]
    members = _tasks_of(connection, run, last.round) if last.whole and last.round > began else ()
    return MethodProgress(position, max(closed, default=0), tuple(sorted(members)))


def answer(connection: Connection, run: str, tasks: Sequence[Assignment]) -> int:
    """Store status and reason of those of ``tasks`` that are open in the table. Return the number of changed rows."""
    rows = [
        {
            "of_run": run,
            "number": task.round,
            "name": task.device,
            "key": task.nonce,
            "to": task.status,
            "why": task.reason,
        }
        for task in tasks
    ]
    return int(connection.execute(_ANSWER, rows).rowcount) if rows else 0


def status(connection: Connection, run: str, number: int, device: str, nonce: str) -> str:
    """Return the stored status of the task of ``device`` in round ``number`` with this nonce; empty if there is no
    row.
    """
    columns = tables.assignments.c
    key = (columns.run == run) & (columns.round == number) & (columns.device == device)
    found = connection.execute(sa.select(columns.status).where(key & (columns.nonce == nonce))).scalar()
    return str(found or "")


def check_open(connection: Connection, run: str, number: int, answered: int, tasks: int) -> None:
    """Check that the round is open and that all tasks of a batch were open.

    In databases with row locks, closing the round waits for this transaction.

    Args:
        connection: Connection in a transaction.
        run: Identifier of the run.
        number: Number of the round.
        answered: Number of rows that :func:`answer` changed.
        tasks: Number of tasks that it was called with.

    Raises:
        RoundOver: If the round or one of the tasks is not open.
    """
    state = connection.execute(_STATE_LOCKED, {"of_run": run, "number": number}).scalar()
    if state != "open" or answered != tasks:
        what = (
            f"is {state or 'not there'}"
            if state != "open"
            else f"has {tasks - answered} of these tasks answered"
        )
        raise RoundOver(f"round {number} {what}: its updates are not kept", round=number)


def close(connection: Connection, run: str, number: int) -> dict[str, tuple[int, str]]:
    """Set the state of the round to :data:`CLOSING`, so that it accepts no more updates.

    Return (shard, sha256) of each accepted update, by device.
    """
    key = (tables.rounds.c.run == run) & (tables.rounds.c.round == number)
    connection.execute(tables.rounds.update().where(key).values(state=CLOSING))
    columns = tables.updates.c
    which = (columns.run == run) & (columns.step == number) & (columns.reason == "")
    rows = connection.execute(sa.select(columns.device, columns.shard, columns.sha256).where(which)).all()
    return {device: (shard, sha256) for device, shard, sha256 in rows}


def open_again(connection: Connection, run: str) -> None:
    """Set rounds in the state :data:`CLOSING` back to open. A killed server may have left rounds in that state."""
    which = (tables.rounds.c.run == run) & (tables.rounds.c.state == CLOSING)
    connection.execute(tables.rounds.update().where(which).values(state="open"))


def undo(connection: Connection, run: str, after: int, text: str, weights_sha256: str) -> None:
    """Mark all rounds later than ``after`` as abandoned, and store the digest of the restored weights in each.

    ``text`` is stored as the reason of those that were closed.
    """
    columns = tables.rounds.c
    query = sa.select(columns.round, columns.state, columns.outcome)
    behind = query.where((columns.run == run) & (columns.round > after))
    for number, state, outcome in connection.execute(behind).all():
        key = (columns.run == run) & (columns.round == number)
        now = {**outcome, "weights_sha256": weights_sha256} | ({"text": text} if state == "closed" else {})
        values = {"state": "abandoned", "outcome": now}
        connection.execute(tables.rounds.update().where(key).values(**values))


def _assignment(row: Mapping[Any, Any]) -> Assignment:
    return Assignment(
        row["device"],
        row["tier"],
        int(row["seed"]),
        row["nonce"],
        row["weight_limit"],
        row["status"],
        row["reason"],
        row["round"],
    )


TURNOUT = "turnout"
"""Key of the turnouts by tier in a round's outcome."""


def keep_participations(connection: Connection, run: str, now: Mapping[str, Participation]) -> None:
    """Replace the participation rows of the devices in ``now``, which maps devices to new rows.

    Rows of other devices stay.
    """
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


def read_participations(connection: Connection, run: str) -> ParticipationRecord:
    """Return the record of the devices' participation in the finished rounds of a run."""
    columns = tables.participations.c
    of = {
        row.device: Participation(row.tasks, row.reports, row.last)
        for row in connection.execute(sa.select(tables.participations).where(columns.run == run))
    }
    rounds = tables.rounds.c
    query = sa.select(rounds.outcome).where((rounds.run == run) & (rounds.state != "open"))
    stored = [row[0].get(TURNOUT) for row in connection.execute(query.order_by(rounds.round))]
    turnouts = [msgspec.convert(each, dict[str, Turnout]) for each in stored if each]
    return ParticipationRecord.read(of, tuple(turnouts))


ROLLOUT = "rollout"
"""Key of the trial in a round's outcome, as it was when the round opened or ended."""


def trial(connection: Connection, run: str) -> Trial | None:
    """Return the stored state of the trial of a candidate bundle; None if no trial has begun."""
    rounds = tables.rounds.c
    query = sa.select(rounds.outcome).where(rounds.run == run).order_by(rounds.round.desc()).limit(1)
    outcome = connection.execute(query).scalar()
    return msgspec.convert(outcome[ROLLOUT], Trial) if outcome and ROLLOUT in outcome else None


def reports(connection: Connection, run: str, number: int) -> dict[str, ReportMedians]:
    """Return the medians of loss and training time over the updates accepted for tasks of round ``number``, by tier."""
    tasks, updates = tables.assignments.c, tables.updates.c
    same = (tasks.run == updates.run) & (tasks.round == updates.round) & (tasks.device == updates.device)
    query = sa.select(tasks.tier, updates.metrics, updates.train_ms).where(
        same & (updates.run == run) & (updates.round == number) & (updates.reason == "")
    )
    losses: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for tier, metrics, train_ms in connection.execute(query):
        losses.setdefault(tier, []).extend([metrics["loss"]] if "loss" in metrics else [])
        times.setdefault(tier, []).extend([train_ms] if train_ms > 0 else [])
    return {tier: ReportMedians(_median(losses[tier]), _median(times[tier])) for tier in sorted(losses)}


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
