"""The rounds of a run as JSON lines, for whoever looks at it later: ``history.jsonl`` in the run's folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from edgefl_server.events import Event, RoundClosed, Warned

NAME = "history.jsonl"


class History:
    """Appends each round that ended. A round that a killed server tells twice is in the file twice."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def take(self, event: Event) -> Warned | None:
        """Write a closed round down; other events are not for it. What cannot be written is told."""
        if not isinstance(event, RoundClosed):
            return None
        try:
            with self._path.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode(event) + b"\n")  # begins anew behind half a line
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            text = (
                f"round {event.round} is missing in {self._path} ({error.strerror or error}): free some space"
            )
            return Warned(tier="", text=text)
        return None


def rounds_of(folder: Path) -> tuple[RoundClosed, ...]:
    """The rounds of the run in ``folder``, in their order, each as it was told first.

    A line that a killed server left half written is passed over: when it goes on, it tells that round again.
    """
    path = folder / NAME
    rounds: dict[int, RoundClosed] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            row = msgspec.json.decode(line, type=RoundClosed)
            rounds.setdefault(row.round, row)
    return tuple(rounds[number] for number in sorted(rounds))
