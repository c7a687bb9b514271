"""What a run was made from, as a digest: under the same one it may be taken up again."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from importlib import metadata
from pathlib import Path

from edgefl.config import Federation
from edgefl.programs import user_programs as own
from edgefl.system.digests import digest_of
from edgefl.wire.errors import ModelError


def run_digest(federation: Federation) -> str:
    """Digest of every key that has a say in the trained weights: a run goes on under the same one only.

    Keys that have their defaults are left out, so that a release with more keys takes up the runs of this one.
    """
    tables = federation.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={
            "broker": True,
            "limits": True,
            "data": {"dir", "download"},
            "downlink": {"compression"},
            "aggregate": {"threads"},
        },
    )
    for tier in tables.get("tiers", {}).values():
        tier.pop("count", None)
    settings = {name: table for name, table in tables.items() if table}
    return digest_of({**settings, "code": code_of(federation)})


def code_of(federation: Federation) -> list[str]:
    """The code that a run comes from: edgefl's version, and the digests of the files of a model's and of a program's
    factory outside it. What these files import is not among them."""
    try:
        version = metadata.version("edgefl")
    except metadata.PackageNotFoundError:  # run from a source tree
        version = ""
    module, colon, _ = federation.model.name.partition(":")
    program = federation.program.name
    trained_by = [hashlib.sha256(own.source_of(program)).hexdigest()] if ":" in program else []
    return [version, _source_digest(module) if colon else "", *trained_by]


def _source_digest(module: str) -> str:
    """SHA-256 of a module's source file; ModelError if there is no such module."""
    try:
        file = inspect.getsourcefile(importlib.import_module(module))
        source = Path(file).read_bytes() if file else b""
    except ImportError as error:
        raise ModelError(f"cannot load module {module!r} of the model: {error}", name=module) from error
    except (OSError, TypeError):  # built in, or without a source file
        source = b""
    return hashlib.sha256(source).hexdigest()
