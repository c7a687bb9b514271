"""Runs of a dozen scripted devices, with workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgefl.wire.limits import Limits
from server.shards.crew import Hand, Hire
from server.shards.hiring import Workers
from server.shards.process import ProcessHand
from server.shards.words import News, Order, Told
from tests.server.fleet import RunningServer, plan_for
from tests.server.service.served import MakeDevice

NAMES = tuple(f"strong-{number}" for number in range(8)) + tuple(f"weak-{number}" for number in range(4))
DIGESTS = "all workers end with these bits"

StartFleet = Callable[..., RunningServer]


class Known:
    """Hires workers as processes, and keeps them in hand by their numbers."""

    def __init__(self, hire: Hire = ProcessHand) -> None:
        self._hire = hire
        self.hands: dict[int, list[ProcessHand]] = {}
        self.orders: list[Order] = []

    def __call__(self, told: Told, deliver: Callable[[News], None]) -> Hand:
        hand = self._hire(told, deliver)
        assert isinstance(hand, ProcessHand)
        self.hands.setdefault(told.worker, []).append(hand)
        return hand

    def pid(self, worker: int) -> int:
        """Of the newest with that number."""
        return self.hands[worker][-1].pid


def started(
    federation: str,
    address: Any,
    out: Path,
    limits: Limits,
    *,
    workers: int = 0,
    hire: Hire = ProcessHand,
    updates: str = "",
    database: str = "",
    **rules: Any,
) -> RunningServer:
    """A server with so many workers for all of :data:`NAMES`."""
    plan = plan_for(federation, limits, **{"min_devices": len(NAMES), "deadline_s": 60.0, **rules})
    crew = Workers(workers, hire, updates)
    return RunningServer.start(plan, address, out, crew=crew, database=database)


def model_of(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def all_of(device: MakeDevice, answer: Any = None) -> dict[str, Any]:
    return {name: device(name, answer) for name in NAMES}
