"""Folder of a simulation: its configuration, rounds, models and state."""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic.main import IncEx

from edgefl.config import Federation, load
from edgefl.config.text import changes, dump
from edgefl.errors import ConfigError
from edgefl.setup.runs import code_of
from edgefl.simulator.carries import CarryStore
from edgefl.simulator.results import FinishedRound, RoundRow, SimulationState
from edgefl.system.files import PARTIAL, write_text
from edgefl.system.structs import digest_of
from edgefl.wire import tensors
from edgefl.wire.tensors import Arrays
from edgefl_server.device_evaluation import flat_evaluation
from edgefl_server.run_spec import RunSpec
from edgefl_server.storage.checkpoints import Checkpoints, store

CONFIG_NAME = "config.toml"
ROUNDS_NAME = "rounds.jsonl"
TABLE_NAME = "rounds.csv"
MODEL_NAME = "model.safetensors"
KEPT_NAME = "models"
_STATE_NAME = "state.sqlite"
_LEFT = (
    "checkpoints",
    KEPT_NAME,
    "published",
    _STATE_NAME + "*",
    MODEL_NAME,
    ROUNDS_NAME,
    TABLE_NAME,
    f"{CONFIG_NAME}*",
    "*.svg",
    "tensorboard",
    "mlflow.json",
)
_SAVE_EVERY_S = 5.0
"""Seconds between two saves. A killed simulation loses at most this much, and a slow disk does not delay each round."""

_FREE: Mapping[str, IncEx | bool] = {
    "broker": True,
    "export": True,
    "data": {"dir", "download"},
    "aggregate": {"threads"},
    "round": {"keep_updates"},
    "simulation": {"workers", "ray"},
    "tracking": True,
}
"""Keys of the configuration that do not affect the weights of a simulation."""


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``state.sqlite``: the simulation's state ``standing``, and the digest of its ``code``."""

    standing: SimulationState
    code: str


def rows_of(folder: Path) -> tuple[RoundRow, ...]:
    """Return the rows of all rounds in ``rounds.jsonl`` of a simulation's folder, in order; empty if the file is
    missing.

    A line that a killed process left incomplete is ignored.
    """
    path = folder / ROUNDS_NAME
    rows: list[RoundRow] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(msgspec.json.decode(line, type=RoundRow))
    return tuple(rows)


def kept_path(folder: Path, number: int) -> Path:
    """Return the file for the model after round ``number``, one of those that the option ``simulation.keep_every``
    stores.
    """
    return folder / KEPT_NAME / f"round-{number:04d}.safetensors"


def kept_models(folder: Path) -> dict[int, Path]:
    """Return the paths of the models stored by ``simulation.keep_every``, by round number, in order."""
    found = {
        path.stem.removeprefix("round-"): path for path in (folder / KEPT_NAME).glob("round-*.safetensors")
    }
    return {
        number: path
        for number, path in sorted((int(text), path) for text, path in found.items() if text.isdigit())
    }


def discard(folder: Path) -> None:
    """Delete the files of an earlier simulation. Other files stay.

    Raises:
        ConfigError: If the folder has other contents and is not that of a simulation.
    """
    refuse_foreign(folder)
    for name in _LEFT:
        for path in folder.glob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def refuse_foreign(folder: Path) -> None:
    """Raise ConfigError if the folder has contents other than locks and is not that of a simulation."""
    if not folder.exists() or (folder / CONFIG_NAME).is_file():
        return
    # A process that was killed at once may have left half of its configuration.
    begun = (f"{CONFIG_NAME}{PARTIAL}",)
    if any(child.suffix != ".lock" and child.name not in begun for child in folder.iterdir()):
        raise ConfigError(
            f"{folder} is not the folder of a simulation (no {CONFIG_NAME}); it is left alone, use another `out`",
            path=str(folder),
            missing=CONFIG_NAME,
        )


def refuse_held(path: Path) -> None:
    """Raise ConfigError if the folder holds a simulation."""
    if (path / CONFIG_NAME).exists():
        raise ConfigError(
            f"{path} holds a simulation: `resume` continues it, `fresh` discards it, or use another `out`",
            path=str(path),
        )


def check(path: Path, federation: Federation, *, resume: bool) -> None:
    """Check that a new or resumed simulation may use the folder ``path``. Nothing is written.

    Args:
        path: Folder; it need not exist.
        federation: Configuration of the simulation.
        resume: True to continue the simulation in the folder, if it has one.

    Raises:
        ConfigError: If the folder has other contents or a simulation of another configuration. Also if it has a
            simulation and ``resume`` is False.
    """
    refuse_foreign(path)
    config = path / CONFIG_NAME
    if not resume:
        refuse_held(path)
    if config.exists() and (differ := changes(load(config), federation, but=_FREE)):
        raise ConfigError(
            f"{path} holds a simulation with another configuration ({'; '.join(differ)}): restore that, use `fresh`, "
            "or another `out`",
            path=str(path),
            changes=differ,
        )


@dataclass
class SimulationFolder:
    """Open folder of a simulation.

    Attributes:
        path: The folder.
        federation: Configuration of the simulation.
        carries: Store of the clients' carries, the state that the algorithm keeps on them between rounds.
        standing: Last saved state; the initial state for a new simulation.
        resumed: True if an earlier process began the simulation.
    """

    path: Path
    federation: Federation
    carries: CarryStore
    standing: SimulationState
    resumed: bool

    @classmethod
    def open(cls, path: Path, federation: Federation, *, resume: bool) -> SimulationFolder:
        """Open the folder of a new or resumed simulation, and write its configuration if it is new.

        Args:
            path: Folder; it is created if it is missing.
            federation: Configuration of the simulation.
            resume: True to continue the simulation in the folder, if it has one.

        Raises:
            ConfigError: If the folder has other contents, or a simulation of another configuration or of other code.
                Also if it has a simulation and ``resume`` is False.
            StoreError: If ``state.sqlite`` is damaged.
        """
        check(path, federation, resume=resume)
        if not (path / CONFIG_NAME).exists():  # before anything else: it says whose folder this is
            write_text(path / CONFIG_NAME, dump(federation))
        carries = CarryStore(path / _STATE_NAME)
        saved = carries.standing
        if saved is None:
            return cls(path, federation, carries, SimulationState(), resumed=False)
        known = msgspec.json.decode(saved, type=_Saved)
        if known.code != digest_of(code_of(federation)):
            carries.close()
            raise ConfigError(
                f"{path} holds a simulation by other code: edgefl's version, or the file of the model or of the "
                f"algorithm, is "
                "another one; restore it, use `fresh`, or another `out`",
                path=str(path),
            )
        return cls(path, federation, carries, known.standing, resumed=True)

    @property
    def rows(self) -> tuple[RoundRow, ...]:
        """Rows of the rounds up to the saved state. Rounds that a killed process ran but did not save are run again."""
        return tuple(row for row in rows_of(self.path) if row.round <= self.standing.number)

    def weights(self, spec: RunSpec) -> Arrays:
        """Return the model, with the server's state, from which this process continues: the last checkpoint, or the
        initial model of ``spec``.
        """
        return Checkpoints(self.path).load(self.standing.number) if self.resumed else dict(spec.initial)

    def write(self, spec: RunSpec, rounds: Iterable[FinishedRound]) -> Iterator[RoundRow]:
        """Write each of ``rounds`` to the folder as it finishes, and yield its row.

        Rows of unsaved rounds are removed first. The state is saved at intervals and after the last round. Then the
        final model and the table ``rounds.csv`` are written too.
        """
        checkpoints, last = Checkpoints(self.path), time.monotonic()
        code = digest_of(code_of(self.federation))
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in self.rows)
        (self.path / ROUNDS_NAME).write_bytes(lines)
        # A patch of int8 is made from the models before, of which the disk keeps one.
        every = 0.0 if spec.downlink.encoding == "int8" else _SAVE_EVERY_S
        ended: FinishedRound | None = None
        with (self.path / ROUNDS_NAME).open("ab") as file:
            for ended in rounds:
                file.write(msgspec.json.encode(ended.row) + b"\n")
                file.flush()
                self._keep(spec, ended)
                if time.monotonic() - last >= every:
                    self._save(checkpoints, ended.weights, ended.standing, code)
                    last = time.monotonic()
                yield ended.row
        weights = ended.weights if ended is not None else self.weights(spec)
        standing = ended.standing if ended is not None else self.standing
        self._save(checkpoints, weights, standing, code)
        checkpoints.finish(spec.model_of(weights))
        self._tabulate()

    def _save(self, checkpoints: Checkpoints, weights: Arrays, standing: SimulationState, code: str) -> None:
        """Save the model, then the state, which names the model. ``code``: digest of the simulation's code."""
        checkpoints.save(standing.number, weights)
        self.carries.commit(msgspec.json.encode(_Saved(standing=standing, code=code)))
        checkpoints.prune(standing.number)

    def _keep(self, spec: RunSpec, ended: FinishedRound) -> None:
        every, number = self.federation.simulation.keep_every, ended.row.round
        if every and number % every == 0:
            path = kept_path(self.path, number)
            path.parent.mkdir(exist_ok=True)
            store(path, tensors.dump(spec.model_of(ended.weights)))

    def _tabulate(self) -> None:
        rows = rows_of(self.path)
        flat = [row.metrics | (flat_evaluation(row.evaluation) if row.evaluation else {}) for row in rows]
        measured = dict.fromkeys(name for each in flat for name in each if name != "accuracy")
        fields = [
            name for name in RoundRow.__struct_fields__ if name not in ("metrics", "metric", "evaluation")
        ]
        with (self.path / TABLE_NAME).open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow([*fields, *measured])
            for row, numbers in zip(rows, flat, strict=True):
                values = [getattr(row, name) for name in fields]
                table.writerow([*values, *(numbers.get(name) for name in measured)])
