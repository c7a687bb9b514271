"""Files in the folder of a run, and the environment variables of its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgefl.config import Federation
from edgefl.errors import ConfigError
from edgefl.wire import tensors
from edgefl.wire.norm_statistics import MEASURED, NORMS
from edgefl.wire.tensors import Arrays

CONFIG_NAME = "run.toml"
"""The configuration as it was run; people's own files have other names."""

SIMULATION_CONFIG = "config.toml"
"""The configuration in the folder of a simulation."""
MODEL_NAME = "model.safetensors"

BROKER, PASSWORD = "EDGEFL_BROKER", "EDGEFL_BROKER_PASSWORD"


@dataclass(frozen=True)
class MeasuredStatistics:
    """Statistics of batch norm that devices measured for a trained model (docs/fleets/evaluation.md).

    Attributes:
        trained_rounds: Number of training rounds of the model.
        by_family: Statistics by their name in the model, for each family of tiers.
    """

    trained_rounds: int
    by_family: Mapping[str, Arrays]


def without_password(federation: Federation) -> Federation:
    """Return the federation without the broker's password, because people share the folder of a run."""
    broker = federation.broker.model_copy(update={"password": ""})
    return federation.model_copy(update={"broker": broker})


def config_of(folder: Path) -> Path:
    """Return the path of the configuration in the folder of a run.

    Raises:
        ConfigError: if it is missing.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}: name the federation that the run was made with (`federation`)",
            path=str(path),
        )
    return path


def journal_of(folder: Path) -> Path:
    """Return the path of the SQLite journal in the folder of a run.

    Raises:
        ConfigError: if it is missing.
    """
    path = folder / "journal.sqlite"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no {path.name}; where the journal lies in another database, name "
            "that (`database`)",
            path=str(folder),
        )
    return path


def is_simulation(folder: Path) -> bool:
    """Return True if the folder contains a simulation, and no run of separate processes."""
    return (folder / SIMULATION_CONFIG).is_file() and not (folder / CONFIG_NAME).is_file()


def weights_of(folder: Path) -> Path:
    """Return the path of the model in the folder of a run or simulation.

    For an unfinished run, it is the newest checkpoint.

    Raises:
        ConfigError: if the folder holds neither a run nor a simulation, or there is no model yet.
    """
    if (folder / MODEL_NAME).is_file() and (is_simulation(folder) or (folder / CONFIG_NAME).is_file()):
        return folder / MODEL_NAME
    if is_simulation(folder):
        raise ConfigError(
            f"the simulation in {folder} is not finished: `resume` continues it", path=str(folder)
        )
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run (no {CONFIG_NAME}); name what `out` was", path=str(folder)
        )
    checkpoints = sorted((folder / "checkpoints").glob("*.safetensors"), key=round_of)
    if not checkpoints:
        raise ConfigError(f"the run in {folder} has no model yet: wait for its first round", path=str(folder))
    return checkpoints[-1]


def measured_statistics(weights: Path, federation: Federation) -> MeasuredStatistics | None:
    """Return the statistics of batch norm that devices measured for the model in the file ``weights``.

    The newest checkpoint beside a final model has them. None: there are none, or they are of another round.
    """
    from edgefl_server.coordinator.states import EvaluationSchedule  # it loads the server

    files = [weights]
    if weights.name == MODEL_NAME:
        files = sorted((weights.parent / "checkpoints").glob("round-*.safetensors"), key=round_of)
    if not files or not federation.evaluate.split:
        return None
    schedule = EvaluationSchedule(federation.evaluate.every, measures=True)
    trained = schedule.trained(round_of(files[-1]), federation.federation.rounds)
    families: dict[str, Arrays] = {}
    for name, array in tensors.load(files[-1].read_bytes()).items():
        state, _, rest = name.partition("/")
        family, _, statistic = rest.partition(".")
        if state == NORMS:
            families.setdefault(family, {})[statistic] = array
    known = {family: own for family, own in families.items() if float(own.pop(MEASURED)) == trained}
    return MeasuredStatistics(trained, known) if known else None


def round_of(checkpoint: Path) -> int:
    """Return the round's number in the file name of a checkpoint; 0 if the name has no digit."""
    return int("".join(filter(str.isdigit, checkpoint.stem)) or 0)


def last_round(folder: Path) -> int | None:
    """Return the number of the last round in the log of a run or simulation; None if the log has no round."""
    path = folder / ("rounds.jsonl" if is_simulation(folder) else "history.jsonl")
    number = None
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):  # half a line, which a killed process left
            number = int(msgspec.json.decode(line)["round"])
    return number
