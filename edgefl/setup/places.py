"""Locks of the folders of runs, and paths that do not depend on the working folder."""

from __future__ import annotations

from pathlib import Path

from edgefl.config import Federation
from edgefl.errors import StoreError
from edgefl.models.user_factory import absolute
from edgefl.system.files import FolderHeld, FolderLock, make_folder

_STOPPING_S = 5.0
"""How long a process that is being stopped may keep the folder from the next one."""
_BROKER_FILES = ("ca_file", "cert_file", "key_file", "password_file")


def held(folder: Path, name: str, what: str) -> FolderLock:
    """The folder, made if there is none, for this process alone; StoreError names the one that has it."""
    try:
        make_folder(folder)
        return FolderLock(folder, name, patience_s=_STOPPING_S)
    except FolderHeld as found:
        raise StoreError(
            f"a {what} runs in {folder} already ({found.who}): wait for its end, stop it, or use another `out`",
            folder=str(folder),
            pid=found.pid,
        ) from found
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be used: {error.strerror}; make room, let it be written, or use another `out`",
            folder=str(folder),
        ) from error


def found_from_anywhere(federation: Federation) -> Federation:
    """Return the federation with absolute paths, for processes with other working folders."""
    model, algorithm, data, broker = (
        federation.model,
        federation.algorithm,
        federation.data,
        federation.broker,
    )
    places = {key: _resolved(getattr(data, key)) for key in ("file", "devices_dir", "dir")}
    return federation.model_copy(
        update={
            "model": model.model_copy(update={"name": absolute(model.name)}),
            "algorithm": algorithm.model_copy(update={"name": absolute(algorithm.name)}),
            "data": data.model_copy(update={key: place for key, place in places.items() if place}),
            "broker": broker.model_copy(
                update={key: _resolved(getattr(broker, key)) for key in _BROKER_FILES}
            ),
        }
    )


def _resolved(path: str) -> str:
    return str(Path(path).resolve()) if path else ""
