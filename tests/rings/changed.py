"""The slow tests that a change asks for: of the rooms that changed since all tests last passed, within a time budget.

``python -m tests.rings.changed --seconds 360`` prints the files to run, one a line, and names on standard error what the
budget leaves out. Seconds are of one core, as :mod:`tests.rings.record` has them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable

from tests.rings.record import ROOT, FullRun, load

# What else of the slow ring looks at a room, beside the folder that mirrors it. Longest path first.
LOOKED_AT_BY = {
    "agents": ("tests/agents",),
    "edgefl/analysis": ("tests/analysis",),
    "edgefl/bench": ("tests/bench",),
    "edgefl/cli": ("tests/cli",),
    "edgefl/codecs": ("tests/parity",),
    "edgefl/config": ("tests/e2e",),
    "edgefl/contract": ("tests/parity",),
    "edgefl/lab": ("tests/e2e",),
    "edgefl/models": ("tests/parity", "tests/web"),
    "edgefl/objective": ("tests/parity", "tests/invariants"),
    "edgefl/optimizers": ("tests/parity", "tests/invariants"),
    "edgefl/algorithms": ("tests/parity", "tests/invariants"),
    "edgefl/setup": ("tests/e2e",),
    "edgefl/submodels": ("tests/parity", "tests/invariants"),
    "edgefl/system": ("tests/e2e",),
    "edgefl/web": ("tests/agents",),
    "edgefl/wire": ("tests/e2e",),
    "device_runtime": ("tests/parity", "tests/e2e"),
    "exporters": ("tests/parity", "tests/web"),
    "reproduce": ("tests/papers", "tests/invariants"),
    "server": ("tests/e2e",),
}


def changed_rooms(paths: Iterable[str]) -> list[str]:
    """The test folders that look at these changed paths, each once."""
    folders: dict[str, None] = {}
    for path in paths:
        top, _, below = path.partition("/")
        if path == "pyproject.toml" or (top == "tests" and "/" not in below and below.endswith(".py")):
            return ["tests"]  # what all tests share
        if (top == "tests" and "/" in below) or (top == "edgefl" and "/" in below):
            folders[f"tests/{below.partition('/')[0]}"] = None
        elif top in ("device_runtime", "exporters", "server"):
            folders[f"tests/{top}"] = None
        for room, folder in LOOKED_AT_BY.items():
            if path.startswith(f"{room}/"):
                folders.update(dict.fromkeys(folder))
    return list(folders)


def chosen(run: FullRun, folders: Iterable[str], budget: float) -> tuple[list[str], list[str]]:
    """(files to run, files left out) of the slow ring: the quickest of these folders first, while they fit the budget."""
    inside = tuple(f"{folder}/" for folder in folders)
    slow = sorted((each.slow_seconds, name) for name, each in run.files.items() if each.slow_tests)
    taken: list[str] = []
    left_out: list[str] = []
    for seconds, name in slow:
        if not name.startswith(inside) or not (ROOT / name).exists():
            continue
        fits = seconds <= budget
        budget -= seconds if fits else 0.0
        (taken if fits else left_out).append(name)
    return taken, left_out


def _changed_since(commit: str) -> list[str] | None:
    """Paths that differ from ``commit``; None if this clone does not have it."""
    ran = subprocess.run(
        ["git", "diff", "--name-only", commit, "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return ran.stdout.split() if ran.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, required=True, help="seconds of one core that slow tests may take"
    )
    budget = parser.parse_args().seconds
    run = load()
    if run is None:
        print("no full run is recorded: no slow test is chosen; run `make test-all`", file=sys.stderr)
        return
    paths = _changed_since(run.commit)
    folders = changed_rooms(paths) if paths is not None else ["tests"]
    taken, left_out = chosen(run, folders, budget)
    print(f"all tests last passed on {run.commit[:12]} ({run.date}, {run.machine})", file=sys.stderr)
    print(f"changed since: {', '.join(folders) or 'nothing that slow tests look at'}", file=sys.stderr)
    for name in left_out:
        print(f"left out by the budget: {name} ({run.files[name].slow_seconds:.0f} s)", file=sys.stderr)
    print("\n".join(taken))


if __name__ == "__main__":
    main()
