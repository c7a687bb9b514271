"""Where a page has its news from: the folder of a run, or another page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from edgefl.wire.bundle.archive import read_manifest
from edgefl.wire.errors import ConfigError, EdgeflError
from server import events
from server.dashboard.known import fold
from server.dashboard.known.fleet import Fleet, Tier
from server.dashboard.known.past import Past
from server.dashboard.known.tail import Tail, told
from server.storage.feed import NAME
from server.storage.history import rounds_of

SIGNS = ("run.toml", NAME, "journal.sqlite", "history.jsonl", "devices.sqlite")
"""A folder with one of these is that of a run."""
_LOOK_S = 5.0
_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")

Watch = Callable[[float, events.Event], None]


class Source(Protocol):
    """``begin`` may take a while and is called once, on another thread; ``poll`` is called several times a second."""

    def begin(self) -> Fleet: ...

    def poll(self, fleet: Fleet, line: Callable[[bytes], None]) -> bool:
        """Know what is new, and hand its lines on; whether anything is."""

    def close(self) -> None: ...


class Folder:
    """The folder of a run, which is only read. ConfigError if it is none. ``database``: SQLAlchemy URL of its journal.
    ``watch`` is told each event that is new."""

    def __init__(self, folder: Path, database: str = "", watch: Watch | None = None) -> None:
        if not any((folder / name).exists() for name in SIGNS):
            raise ConfigError(
                f"{folder} is not the folder of a run (none of {', '.join(SIGNS)} is there); name what `out` was",
                path=str(folder),
            )
        self.folder = folder
        self._past = Past(folder, database)
        self._tail = Tail(folder)
        self._watch = watch
        self._looked = 0.0

    def begin(self) -> Fleet:
        """The journal, the history and all events that are kept."""
        fleet = Fleet()
        runs = _runs(self.folder)
        fleet.run = runs[-1] if runs else ""
        self._past.tell(fleet)
        for row in rounds_of(self.folder):
            fold.known(fleet, row)
        foreign = bool(runs) and runs[0] != fleet.run  # what an earlier run left is passed over
        for each in map(told, self._tail.lines()):
            if each is None:
                continue
            if isinstance(each.event, events.Started):
                foreign = bool(runs) and each.event.run != runs[-1]
            if not foreign:
                fold.apply(fleet, each.at, each.event)
        self._look(fleet)
        return fleet

    def poll(self, fleet: Fleet, line: Callable[[bytes], None]) -> bool:
        changed = False
        for each in self._tail.lines():
            if (new := told(each)) is not None:
                line(each)
                fold.apply(fleet, new.at, new.event)
                if self._watch is not None:
                    self._watch(new.at, new.event)
                changed = True
        if changed and time.monotonic() > self._looked + _LOOK_S:
            self._look(fleet)
        return changed

    def close(self) -> None:
        self._tail.close()
        self._past.close()

    def _look(self, fleet: Fleet) -> None:
        """What is no event: the bundles, the checkpoints, and what devices said when they came."""
        self._looked = time.monotonic()
        fleet.checkpoints = checkpoints(self.folder)
        if not fleet.tiers:
            fleet.tiers = planned(self.folder)
        if fleet.federation and any(device.facts is None for device in fleet.devices.values()):
            try:
                self._past.look(fleet)
            except sa.exc.SQLAlchemyError:  # the next look may be luckier
                return


def _runs(folder: Path) -> list[str]:
    """The runs that the feed tells of, one for each start of a server."""
    tail = Tail(folder)
    starts = (told(line) for line in tail.lines() if b'"event":"started"' in line)
    found = [each.event.run for each in starts if each is not None and isinstance(each.event, events.Started)]
    tail.close()
    return found


def checkpoints(folder: Path) -> tuple[int, ...]:
    """The rounds whose models are kept: a run can be taken back to these."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in (folder / "checkpoints").glob("round-*"))
    return tuple(sorted(int(name[1]) for name in names if name))


def planned(folder: Path) -> dict[str, Tier]:
    """By tier, what the exporter knows that its largest graph takes of memory."""
    found: dict[str, Tier] = {}
    for path in sorted((folder / "bundles").glob("*.efl")):
        try:
            manifest = read_manifest(path)
        except EdgeflError:
            continue
        most = max((graph.planned_bytes for graph in manifest.of_round), default=0)
        tier = found.setdefault(manifest.tier, Tier(name=manifest.tier))
        tier.planned_bytes = max(tier.planned_bytes, most)
    return found
