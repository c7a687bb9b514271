"""Folder of a run: its lock, absolute paths in its configuration, and the digest of its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic.main import IncEx

from edgefl.config import Federation
from edgefl.errors import StoreError
from edgefl.models.user_factory import absolute, source_of
from edgefl.system.distribution import series, version
from edgefl.system.files import FolderHeld, FolderLock, make_folder
from edgefl.system.structs import digest_of

UNDECIDING: Mapping[str, IncEx | bool] = {
    "broker": True,
    "server": True,
    "simulation": True,
    "tracking": True,
    "limits": True,
    "data": {"dir", "download"},
    "downlink": {"compression", "mirrors", "mirrors_only", "mirror_folder"},
    "aggregate": {"threads"},
    "evaluate": {"devices", "least_group"},
    "round": {"keep_updates"},
    "tiers": {"__all__": {"count"}},
}
"""Keys that have no say in the trained weights, as pydantic leaves them out."""


def run_digest(federation: Federation) -> str:
    """Return a digest of all settings that affect the trained weights. A run can be resumed only with the same digest.

    Keys with default values are left out, so that a release with more keys resumes the runs of this one.
    """
    tables = federation.model_dump(mode="json", exclude_defaults=True, exclude=UNDECIDING)
    settings = {name: table for name, table in tables.items() if table}
    return digest_of({**settings, "code": code_of(federation)})


def imports_code(federation: Federation) -> bool:
    """Return True if :func:`run_digest` imports a module of the user, which runs its code. Factories in files are only
    read.
    """
    names = (federation.model.name, federation.algorithm.name, federation.loss.name)
    return any(":" in name and not name.rpartition(":")[0].endswith(".py") for name in names)


def code_of(federation: Federation) -> list[str]:
    """Return texts that identify the code of a run: edgefl's release without its patch, and SHA-256 digests of the
    user's files.

    These are the files of the model, the algorithm and the loss. Modules that they import are not included.
    """
    own = {
        "model": federation.model.name,
        "algorithm": federation.algorithm.name,
        "loss": federation.loss.name,
    }
    return [
        series(version()),
        *(hashlib.sha256(source_of(name, what)).hexdigest() for what, name in own.items() if ":" in name),
    ]


_STOPPING_S = 5.0
"""How long a process that is being stopped may keep the folder from the next one."""
_BROKER_FILES = ("ca_file", "cert_file", "key_file", "password_file")


def held(folder: Path, name: str, what: str) -> FolderLock:
    """Create ``folder`` if needed, lock it for this process, and return the lock. Waits some seconds for a process that
    stops.

    Args:
        folder: the folder of a run.
        name: file name of the lock.
        what: word for the holder in the error, such as "simulation".

    Raises:
        StoreError: if another process holds the lock; the text names it.
    """
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


def with_absolute_paths(federation: Federation) -> Federation:
    """Return the federation with absolute paths of files, for processes with other working folders."""
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
