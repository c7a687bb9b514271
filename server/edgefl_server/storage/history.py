"""The rounds of a run as JSON lines, for whoever looks at it later: ``history.jsonl`` in the run's folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from edgefl_server.events import Event, RoundClosed, Warned

NAME = "history.jsonl"


class History:
    """Writer of the history of rounds. A round that a killed server reports twice is in the file twice."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def take(self, event: Event) -> Warned | None:
        """Write a closed round; ignore other events. Returns a warning if it cannot write."""
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
    """Return the rounds of the run in ``folder``, in their order, each as first reported.

    Ignores a line that a killed server left incomplete: the resumed server reports that round again.
    """
    path = folder / NAME
    rounds: dict[int, RoundClosed] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            row = msgspec.json.decode(line, type=RoundClosed)
            rounds.setdefault(row.round, row)
    return tuple(rounds[number] for number in sorted(rounds))
