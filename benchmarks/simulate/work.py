"""A task as the engines of others read it: arrays in a folder, and which rows are whose.

It is imported in environments that have numpy and torch, and none of what edgefl needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_JOB = "job.json"


@dataclass(frozen=True)
class Job:
    """Training job: ``rounds`` rounds of ``per_round`` of ``clients`` clients, who make ``steps`` steps of ``batch``
    rows. Samples become floats as ``x * scale + shift``."""

    model: str
    clients: int
    per_round: int
    rounds: int
    steps: int
    batch: int
    lr: float
    scale: float
    shift: float


class Work:
    """A folder with a job. Arrays are read from disk as they are needed."""

    def __init__(self, folder: Path) -> None:
        self.job = Job(**json.loads((folder / _JOB).read_text()))
        self._x, self._y, self._rows, self._ends, self.test_x, self.test_y = (
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("x", "y", "rows", "ends", "test_x", "test_y")
        )

    @staticmethod
    def write(
        folder: Path, job: Job, train: tuple[Array, Array], test: tuple[Array, Array], parts: Sequence[Array]
    ) -> None:
        """``train`` and ``test`` are x and y; ``parts`` the rows of each client."""
        (folder / _JOB).write_text(json.dumps(asdict(job)))
        arrays = {
            "x": train[0],
            "y": train[1],
            "test_x": test[0],
            "test_y": test[1],
            "rows": np.concatenate(parts),
            "ends": np.cumsum([0, *map(len, parts)]),
        }
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", np.ascontiguousarray(array))

    def client(self, number: int, draw: np.random.Generator) -> tuple[Array, Array]:
        """Rows for all steps of a client's round: shuffled, and begun again where it has fewer. float32 and int64."""
        own = self._rows[self._ends[number] : self._ends[number + 1]]
        wanted = self.job.steps * self.job.batch
        rows = np.take(draw.permutation(own), np.arange(wanted), mode="wrap")
        return self.floats(self._x[rows]), self._y[rows]

    def examples(self, number: int) -> int:
        """Rows that a client holds."""
        return int(self._ends[number + 1] - self._ends[number])

    def floats(self, x: Array) -> Array:
        """Samples as a model reads them."""
        made = x.astype(np.float32)
        made *= np.float32(self.job.scale)
        made += np.float32(self.job.shift)
        return made

    def accuracy(self, classes: Callable[[Array], Array], batch: int = 500) -> float:
        """On all test samples; ``classes`` gives those that a model takes some for."""
        right = sum(
            int((classes(self.floats(self.test_x[at : at + batch])) == self.test_y[at : at + batch]).sum())
            for at in range(0, len(self.test_y), batch)
        )
        return right / len(self.test_y)


def result(moments: Sequence[float], accuracy: float, version: str) -> dict[str, Any]:
    """Return the result of an engine's run; ``moments`` are those at which a round ended, in seconds."""
    seconds, rounds = moments[-1] - moments[0], len(moments) - 1
    return {"seconds": seconds, "rounds": rounds, "accuracy": accuracy, "version": version}


def tell(moments: Sequence[float], accuracy: float, version: str) -> None:
    """Write the result of this process as the last line of its output."""
    sys.stdout.write("\n" + json.dumps(result(moments, accuracy, version)) + "\n")
    sys.stdout.flush()
