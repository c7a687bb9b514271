"""The configuration that a run leaves in its folder, and the variables that hold what must not stand there."""

from __future__ import annotations

from edgefl.config import Federation

CONFIG_NAME = "run.toml"
"""The configuration as it was run; not a name that people give their own files."""

BROKER, PASSWORD = "EDGEFL_BROKER", "EDGEFL_BROKER_PASSWORD"


def without_password(federation: Federation) -> Federation:
    """As it is written into the folder of a run, which people pass on: without the broker's password."""
    broker = federation.broker.model_copy(update={"password": ""})
    return federation.model_copy(update={"broker": broker})
