"""Runs of a dozen scripted devices, with workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgefl.wire.limits import Limits
from edgefl_server.shards.crew import Hand, Hire
from edgefl_server.shards.hiring import Workers
from edgefl_server.shards.messages import News, Told
from edgefl_server.shards.process import ProcessHand
from tests.server.fleet import RunningServer, plan_for
from tests.server.forked import forked_hand

NAMES = tuple(f"strong-{number}" for number in range(8)) + tuple(f"weak-{number}" for number in range(4))


class Known:
    """Hires workers as processes, and keeps them in hand by their numbers. The first of each number is killed, and not
    heard, as it says something of the kind that ``silencing`` has for its number. ``hand``: how they begin."""

    def __init__(
        self,
        silencing: Mapping[int, type[News]] | None = None,
        hand: Callable[..., ProcessHand] = forked_hand,
    ) -> None:
        self._silencing = silencing or {}
        self._hand = hand
        self.hands: dict[int, list[ProcessHand]] = {}
        self.silenced: set[int] = set()

    def __call__(self, told: Told, deliver: Callable[[News], None]) -> Hand:
        hands = self.hands.setdefault(told.worker, [])
        first = not hands

        def heard(news: News) -> None:
            kind = self._silencing.get(told.worker)
            if first and kind is not None and isinstance(news, kind):
                self.silenced.add(told.worker)
                os.kill(hands[0].pid, signal.SIGKILL)
            else:
                deliver(news)

        hands.append(self._hand(told, heard))
        return hands[-1]

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
    hire: Hire = forked_hand,
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
