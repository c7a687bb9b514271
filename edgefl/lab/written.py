"""The configuration that a run leaves in its folder, and the variables that hold what must not stand there."""

from __future__ import annotations

from pathlib import Path

from edgefl.config import Federation
from edgefl.wire.errors import ConfigError

CONFIG_NAME = "run.toml"
"""The configuration as it was run; not a name that people give their own files."""

BROKER, PASSWORD = "EDGEFL_BROKER", "EDGEFL_BROKER_PASSWORD"


def without_password(federation: Federation) -> Federation:
    """As it is written into the folder of a run, which people pass on: without the broker's password."""
    broker = federation.broker.model_copy(update={"password": ""})
    return federation.model_copy(update={"broker": broker})


def config_of(folder: Path) -> Path:
    """Return the configuration in the folder of a run; ConfigError if there is none."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}: name the federation that the run was made with (`federation`)",
            path=str(path),
        )
    return path


def journal_of(folder: Path) -> Path:
    """Return the journal in the folder of a run; ConfigError if there is none."""
    path = folder / "journal.sqlite"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no {path.name}; where the journal lies in another database, name "
            "that (`database`)",
            path=str(folder),
        )
    return path
