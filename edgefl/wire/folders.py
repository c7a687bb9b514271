"""Folders of this user that outlive a process."""

from __future__ import annotations

import os
from pathlib import Path

from edgefl.wire.errors import ConfigError


def home(what: str, remedy: str) -> Path:
    """The user's home. ConfigError where there is none, as in a container whose user has no entry and no HOME: it names
    ``what`` needs a folder, and the ``remedy``."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            f"there is no folder for {what}: this user has no home. Set HOME, or {remedy}"
        ) from error


def cache(what: str, remedy: str = "XDG_CACHE_HOME") -> Path:
    """``edgefl`` in the user's folder for caches; ConfigError as :func:`home`."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else home(what, remedy) / ".cache") / "edgefl"


def server_key(federation: str) -> Path:
    """The key of this user's server of a federation: devices that trust it go on when its folder is another one. The
    environment variable EDGEFL_KEYS names another folder for keys; ConfigError as :func:`home`."""
    named = os.environ.get("EDGEFL_KEYS")
    folder = (
        Path(named) if named else home("the server's key", "name a file by `sign_key`") / ".edgefl" / ".keys"
    )
    return folder / f"{federation}.key"


def store(federation: str, device: str) -> Path:
    """What a device keeps, for each federation on its own: an update that waits must never go to another one's server.
    ConfigError as :func:`home`."""
    return home("what a device keeps", "name a folder") / ".edgefl" / federation / device
