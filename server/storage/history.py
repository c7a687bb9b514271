"""The rounds of a run as JSON lines, for whoever looks at it later: ``history.jsonl`` in the run's folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from server.events import Event, RoundClosed

NAME = "history.jsonl"


class History:
    """Appends each round that ended. A round that a killed server tells twice is in the file twice."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def take(self, event: Event) -> None:
        """Write a closed round down; other events are not for it."""
        if isinstance(event, RoundClosed):
            with self._path.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode(event) + b"\n")  # begins anew behind half a line


def rounds_of(folder: Path) -> tuple[RoundClosed, ...]:
    """The rounds of the run in ``folder``, in their order, each as it was told first.

    A line that a killed server left half written is passed over: when it goes on, it tells that round again.
    """
    path = folder / NAME
    rounds: dict[int, RoundClosed] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            row = msgspec.json.decode(line, type=RoundClosed)
            rounds.setdefault(row.round, row)
    return tuple(rounds[number] for number in sorted(rounds))
