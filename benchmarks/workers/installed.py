"""Sizes of installed packages with their requirements. Runs in any environment: ``PYTHON installed.py NAME...``

A requirement of a name's is followed where its marker holds; one with an extra only if the name has the extra
(``name[extra]``); ``name!`` is counted without what it requires, ``-name`` is left out with what only it requires.
Prints JSON: ``{package: {"version": ..., "bytes": ..., "bytecode_bytes": ...}}``. Bytecode is what Python writes
itself when it first imports a file, and can be kept from doing.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Found = dict[str, dict[str, object]]


def installed(names: list[str]) -> Found:
    """Return sizes by package. Raises PackageNotFoundError if one of ``names`` itself is not installed."""
    left_out = {str(canonicalize_name(name[1:])) for name in names if name.startswith("-")}
    sizes: Found = {}
    for name in names:
        if not name.startswith("-"):
            distribution(Requirement(name.rstrip("!")).name)
            _add(Requirement(name.rstrip("!")), sizes, left_out, follow=not name.endswith("!"))
    return sizes


def _add(wanted: Requirement, found: Found, left_out: set[str], *, follow: bool) -> None:
    name = str(canonicalize_name(wanted.name))
    key = f"{name}[{','.join(sorted(wanted.extras))}]" if wanted.extras else name
    if name in left_out or key in _SEEN:
        return
    try:
        package = distribution(name)
    except PackageNotFoundError:  # an installer may leave out requirements
        return
    _SEEN.add(key)
    found[name] = {"version": package.version, **_sizes(package)}
    for text in package.requires or () if follow else ():
        requirement = Requirement(text)
        if _holds(requirement, wanted.extras):
            _add(requirement, found, left_out, follow=True)


_SEEN: set[str] = set()


def _holds(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""})


def _sizes(package: Distribution) -> dict[str, int]:
    own = bytecode = 0
    for file in package.files or ():
        try:
            size = os.stat(str(package.locate_file(file))).st_size
        except OSError:
            continue
        own, bytecode = (own, bytecode + size) if file.suffix == ".pyc" else (own + size, bytecode)
    return {"bytes": own, "bytecode_bytes": bytecode}


if __name__ == "__main__":
    print(json.dumps(installed(sys.argv[1:])))
