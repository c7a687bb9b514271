"""The federations that are compared: the same devices, model and data, and three ways to go on without the slow ones."""

from __future__ import annotations

from typing import Any, Literal

from edgefl.bench.faults.federation import broker_kind
from edgefl.config import Federation, parse
from edgefl.setup.tiers import completed

Mode = Literal["synchronous", "over-selected", "buffered"]
"""``synchronous``: a round waits for all that it selected; ``over-selected``: it selects half as many more and ends without
the last ones; ``buffered``: versions wait for nobody."""

MODES: tuple[Mode, ...] = ("synchronous", "over-selected", "buffered")
SLOWER = 10
"""Times that a slow device takes longer."""


def simulated(mode: Mode, *, devices: int, seed: int, rounds: int) -> Federation:
    """A third of ``devices`` is slow; a third of them is at work at a time. Local steps take 20 ms, and sending a while."""
    at_work = max(3, devices // 3)
    own: dict[Mode, dict[str, Any]] = {
        "synchronous": {"fraction": at_work / devices},
        "over-selected": {"fraction": at_work / devices, "over_selection": 1.5},
        "buffered": {"mode": "buffered", "concurrency": at_work, "buffer": max(1, at_work // 3)},
    }
    tables = _tables(seed, rounds, devices, own[mode], steps=10)
    speed = {"step_ms": 20, "up_mbit": 2, "down_mbit": 8, "spread": 0.2}
    slow = {"step_ms": 20 * SLOWER, "up_mbit": 2 / SLOWER, "down_mbit": 8 / SLOWER}
    tables["simulation"] = {**speed, "tiers": {"slow": slow}}
    tables["limits"] = {"round_deadline_s": 600.0}
    return completed(parse(tables, source="the benchmark"))


def real(mode: Mode, *, devices: int, seed: int, rounds: int, broker: str) -> Federation:
    """The same as processes: all devices are at work, except that an over-selected round ends with two thirds of them."""
    own: dict[Mode, dict[str, Any]] = {
        "synchronous": {},
        "over-selected": {"fraction": 2 / 3, "over_selection": 1.5},
        "buffered": {"mode": "buffered", "buffer": max(1, devices // 3), "keep_updates": True},
    }
    tables = _tables(seed, rounds, devices, {"min_devices": devices, **own[mode]}, steps=100)
    tables["broker"] = {"kind": broker_kind(broker)}
    tables["limits"] = {"round_deadline_s": 300.0, "ready_timeout_s": 300.0, "checkpoint_steps": 1000}
    return completed(parse(tables, source="the benchmark"))


def _tables(seed: int, rounds: int, devices: int, of_round: dict[str, Any], *, steps: int) -> dict[str, Any]:
    slow = devices // 3
    return {
        "federation": {"name": "versions", "rounds": rounds, "seed": seed},
        "model": {"name": "mlp", "options": {"hidden": [32]}},
        "program": {"batch": 8, "steps": steps, "lr": 0.05},
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.2},
        "round": of_round,
        "tiers": {"quick": {"count": devices - slow}, "slow": {"count": slow}},
    }
