"""Folders of this user that outlive a process."""

from __future__ import annotations

import os
from pathlib import Path

from edgefl.errors import ConfigError


def home(what: str, remedy: str) -> Path:
    """Return the home folder of the current user.

    Args:
        what: Thing that needs a folder, for the error text.
        remedy: Alternative to setting HOME, for the error text.

    Raises:
        ConfigError: The user has no home, as in a container whose user has no entry and no HOME.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            f"there is no folder for {what}: this user has no home. Set HOME, or {remedy}"
        ) from error


def cache(what: str, remedy: str = "XDG_CACHE_HOME") -> Path:
    """Return the ``edgefl`` folder in the user's folder for caches. Raises ConfigError as :func:`home` does."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else home(what, remedy) / ".cache") / "edgefl"


def server_key(federation: str) -> Path:
    """Return the key file of this user's server for a federation.

    The key lies outside of the server's own folder, so that devices still trust the server after that folder moves. The
    environment variable EDGEFL_KEYS names another folder for keys. Raises ConfigError as :func:`home` does.
    """
    named = os.environ.get("EDGEFL_KEYS")
    folder = (
        Path(named) if named else home("the server's key", "name a file by `sign_key`") / ".edgefl" / ".keys"
    )
    return folder / f"{federation}.key"


def store(federation: str, device: str) -> Path:
    """Return the folder of a device's store, one for each federation.

    The stores are separate, because a pending update must never reach the server of another federation. Raises ConfigError
    as :func:`home` does.
    """
    return home("what a device keeps", "name a folder") / ".edgefl" / federation / device
