"""The rounds of a simulation as event files, which ``tensorboard --logdir`` reads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

from edgefl.config import Federation
from edgefl.config.text import dump
from edgefl.simulator.row import Row, scalars

FOLDER = "tensorboard"


class EventFiles:
    """The folder ``tensorboard`` in a simulation's.

    It is written anew when a simulation is taken up, from the rounds that count: a killed process leaves half an event,
    and rounds that are run again.
    """

    def __init__(self, folder: Path, federation: Federation) -> None:
        self._folder = folder / FOLDER
        self._config = dump(federation)
        self._writer: SummaryWriter | None = None

    def begin(self, rows: Sequence[Row]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._writer = SummaryWriter(str(self._folder))
        self._writer.add_text("config", "".join(f"    {line}\n" for line in self._config.splitlines()))
        for row in rows:
            self._add(self._writer, row)
        self._writer.flush()

    def take(self, row: Row) -> None:
        assert self._writer is not None
        self._add(self._writer, row)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, writer: SummaryWriter, row: Row) -> None:
        for name, value in scalars(row).items():
            writer.add_scalar(name, value, row.round)
