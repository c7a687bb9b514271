"""Digest of the settings of a run, which decides whether it can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pydantic.main import IncEx

from edgefl.config import Federation
from edgefl.models.user_factory import source_of
from edgefl.system.distribution import series, version
from edgefl.system.structs import digest_of

UNDECIDING: Mapping[str, IncEx | bool] = {
    "broker": True,
    "server": True,
    "simulation": True,
    "limits": True,
    "data": {"dir", "download"},
    "downlink": {"compression", "mirrors", "mirrors_only", "mirror_folder"},
    "aggregate": {"threads"},
    "round": {"keep_updates"},
    "tiers": {"__all__": {"count"}},
}
"""Keys that have no say in the trained weights, as pydantic leaves them out."""


def run_digest(federation: Federation) -> str:
    """Return the digest of all keys that affect the trained weights. A run is resumed under the same digest only.

    Keys with default values are left out, so that a release with more keys resumes the runs of this one.
    """
    tables = federation.model_dump(mode="json", exclude_defaults=True, exclude=UNDECIDING)
    settings = {name: table for name, table in tables.items() if table}
    return digest_of({**settings, "code": code_of(federation)})


def imports_code(federation: Federation) -> bool:
    """Return True if :func:`run_digest` imports a module of the user. Factories in files are read, not imported."""
    names = (federation.model.name, federation.algorithm.name, federation.loss.name)
    return any(":" in name and not name.rpartition(":")[0].endswith(".py") for name in names)


def code_of(federation: Federation) -> list[str]:
    """The code that a run comes from: edgefl's release without its patch, and the digests of the files of a model's and of a
    algorithm's factory, and of a loss, outside it. What these files import is not among them."""
    own = {
        "model": federation.model.name,
        "algorithm": federation.algorithm.name,
        "loss": federation.loss.name,
    }
    return [
        series(version()),
        *(hashlib.sha256(source_of(name, what)).hexdigest() for what, name in own.items() if ":" in name),
    ]
