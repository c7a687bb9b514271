"""The trial of a candidate, as the journal's tables hold it, within one transaction of
:mod:`edgefl_server.storage.journal`."""

from __future__ import annotations

import statistics

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl_server.coordinator.rollout import Reports, Trial
from edgefl_server.storage import tables

ROLLOUT = "rollout"
"""Where a round's outcome has the trial as it stood when it opened, or ended."""


def trial(connection: Connection, run: str) -> Trial | None:
    """Return the current trial, or None if none has begun."""
    rounds = tables.rounds.c
    query = sa.select(rounds.outcome).where(rounds.run == run).order_by(rounds.round.desc()).limit(1)
    outcome = connection.execute(query).scalar()
    return msgspec.convert(outcome[ROLLOUT], Trial) if outcome and ROLLOUT in outcome else None


def reports(connection: Connection, run: str, number: int) -> dict[str, Reports]:
    """Return the reports of a round's accepted updates, by the tier of their tasks."""
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
    return {tier: Reports(_median(losses[tier]), _median(times[tier])) for tier in sorted(losses)}


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
