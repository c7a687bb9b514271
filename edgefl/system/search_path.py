"""Protection against files of the user with names of modules that edgefl imports. Imports nothing that these could
replace.
"""

from __future__ import annotations

import os
import sys


def user_folders() -> list[str]:
    """Return the entries of ``sys.path`` that Python itself added: the folder of the script, or the working folder ("")."""
    chosen = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    try:
        here = os.getcwd()
    except OSError:  # a folder that was deleted holds no files
        return []
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = os.path.dirname(os.path.realpath(file)) if file else here
    first = [each for each in sys.path[:1] if each in (script, here) and not sys.flags.safe_path]
    return [
        each for each in dict.fromkeys(("", *first)) if each in sys.path and (not each or each not in chosen)
    ]


def prefer_installed_modules() -> None:
    """Move a folder of :func:`user_folders` to the end of ``sys.path`` if one of its files has the name of an installed
    module.

    Every library would otherwise import a ``random.py`` or ``numpy.py`` beside a script.
    """
    for folder in user_folders():
        try:
            with os.scandir(folder or ".") as entries:
                names = {entry.name.removesuffix(".py") for entry in entries if entry.name.endswith(".py")}
        except OSError:
            continue
        if names & sys.stdlib_module_names or _requires(names, folder):
            sys.path.remove(folder)
            sys.path.append(folder)


def _requires(names: set[str], folder: str) -> bool:
    """Return True if one of ``names`` is a module of a package that edgefl needs, directly or not. ``folder`` is not
    searched.
    """
    # Imported here: a standard module among the names would be imported from the folder.
    from importlib.machinery import PathFinder

    others = [each for each in sys.path if each not in ("", folder)]
    modules = filter(str.isidentifier, names)
    installed = {name: spec for name in modules if (spec := PathFinder.find_spec(name, others))}
    if not installed:
        return False
    import re
    from importlib import metadata

    from edgefl.system.distribution import NAME

    listed = re.compile(rf"^({'|'.join(map(re.escape, installed))})(/|\.py,)", re.MULTILINE)
    waiting, seen = [NAME], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if len(seen) == 1:  # without metadata of our own, every installed module counts
                return any(spec.origin for spec in installed.values())
            continue
        if len(seen) > 1 and listed.search(distribution.read_text("RECORD") or ""):
            return True
        requirements = [
            each for each in distribution.requires or () if len(seen) == 1 or "extra ==" not in each
        ]
        waiting += [re.split(r"[^\w.-]", each, maxsplit=1)[0].lower() for each in requirements]
    return False
