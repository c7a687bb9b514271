"""A simulation task for the engines of other projects: its models, arrays in a folder, and the rows of each client.

Their environments have numpy and torch, and none of edgefl's requirements.
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
import torch
from torch import nn

Array = npt.NDArray[Any]
_JOB = "job.json"


@dataclass(frozen=True)
class SimulationJob:
    """Settings of a task: ``per_round`` of ``clients`` clients per round, with ``steps`` steps of ``batch`` rows each.

    Samples become floats as ``x * scale + shift``.
    """

    model: str
    clients: int
    per_round: int
    rounds: int
    steps: int
    batch: int
    lr: float
    scale: float
    shift: float


class JobFolder:
    """Folder with a job and its arrays, which are memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.job = SimulationJob(**json.loads((folder / _JOB).read_text()))
        self._x, self._y, self._rows, self._ends, self.test_x, self.test_y = (
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("x", "y", "rows", "ends", "test_x", "test_y")
        )

    @staticmethod
    def write(
        folder: Path,
        job: SimulationJob,
        train: tuple[Array, Array],
        test: tuple[Array, Array],
        parts: Sequence[Array],
    ) -> None:
        """Write a job. ``train`` and ``test`` are x and y; ``parts`` the rows of each client."""
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
        """Draw x (float32) and y (int64) for all steps of a client's round: its rows shuffled, repeated if too few."""
        own = self._rows[self._ends[number] : self._ends[number + 1]]
        wanted = self.job.steps * self.job.batch
        rows = np.take(draw.permutation(own), np.arange(wanted), mode="wrap")
        return self.floats(self._x[rows]), self._y[rows]

    def examples(self, number: int) -> int:
        """Return the number of a client's rows."""
        return int(self._ends[number + 1] - self._ends[number])

    def floats(self, x: Array) -> Array:
        """Return samples as a model's float32 input."""
        made = x.astype(np.float32)
        made *= np.float32(self.job.scale)
        made += np.float32(self.job.shift)
        return made

    def accuracy(self, classes: Callable[[Array], Array], batch: int = 500) -> float:
        """Return the accuracy on all test samples.

        Args:
            classes: returns the predicted classes of some samples.
            batch: samples of one call.
        """
        right = sum(
            int((classes(self.floats(self.test_x[at : at + batch])) == self.test_y[at : at + batch]).sum())
            for at in range(0, len(self.test_y), batch)
        )
        return right / len(self.test_y)


def run_result(moments: Sequence[float], accuracy: float, version: str) -> dict[str, Any]:
    """Return the result of an engine's run. ``moments``: times in seconds at which its rounds ended."""
    seconds, rounds = moments[-1] - moments[0], len(moments) - 1
    return {"seconds": seconds, "rounds": rounds, "accuracy": accuracy, "version": version}


def print_result(moments: Sequence[float], accuracy: float, version: str) -> None:
    """Print the result of this process as the last line of its output."""
    sys.stdout.write("\n" + json.dumps(run_result(moments, accuracy, version)) + "\n")
    sys.stdout.flush()


_SEED = 0


def pfl_cnn() -> nn.Module:
    """Return ``simple_cnn`` of pfl-research's benchmarks for images (3, 32, 32) of 10 classes; 1,626,442 weights.

    Two convolutions of 3 x 3 with 32 and 64 channels, a pool, a dense layer of 128, dropout of 0.25 and 0.5.
    """
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(14 * 14 * 64, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
    return model


def logistic() -> nn.Module:
    """Return logistic regression on images (1, 28, 28) of 10 classes; 7,850 weights."""
    return _dense(28 * 28)


def small() -> nn.Module:
    """Return logistic regression on images (1, 8, 8)."""
    return _dense(8 * 8)


def _dense(inputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 10))


MODELS = {"pfl_cnn": pfl_cnn, "logistic": logistic, "small": small}
