"""Folders in which edgefl stores keys, caches and device state of the current user."""

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
        ConfigError: The user has no home folder, as in a container without HOME and without an entry for the user.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            f"there is no folder for {what}: this user has no home. Set HOME, or {remedy}"
        ) from error


def cache(what: str, remedy: str = "XDG_CACHE_HOME") -> Path:
    """Return edgefl's folder below the user's cache folder (XDG_CACHE_HOME, else ``~/.cache``). Does not create it.

    Args:
        what: Thing that is cached, for the error text.
        remedy: Alternative to setting HOME, for the error text.

    Raises:
        ConfigError: The user has no home folder.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else home(what, remedy) / ".cache") / "edgefl"


def server_key(federation: str) -> Path:
    """Return the path of the server's key file for a federation: in EDGEFL_KEYS if set, else in ``~/.edgefl/.keys``.

    The file lies outside of the server's own folder, so that devices still trust the server after that folder moves.

    Raises:
        ConfigError: The user has no home folder.
    """
    named = os.environ.get("EDGEFL_KEYS")
    folder = (
        Path(named) if named else home("the server's key", "name a file by `sign_key`") / ".edgefl" / ".keys"
    )
    return folder / f"{federation}.key"


def store(federation: str, device: str) -> Path:
    """Return the folder in which a device stores its state for a federation. Does not create it.

    Each federation has its own folder, because a pending update must never reach the server of another federation.

    Raises:
        ConfigError: The user has no home folder.
    """
    return home("what a device keeps", "name a folder") / ".edgefl" / federation / device
