"""What each test file took, and the commit on which all tests last passed: ``.ci/full-run.json``.

``python -m tests.rings.record [FILE]`` prints recorded times by folder, as docs/testing.md shows them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / ".ci" / "full-run.json"


class FileTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the tests of one file, setup and teardown included, in either ring."""

    tests: int = 0
    slow_tests: int = 0
    seconds: float = 0.0
    slow_seconds: float = 0.0


class FullRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of all tests that passed: where, when, on which commit, and what each file took."""

    commit: str
    date: str
    machine: str
    wall_seconds: float
    files: dict[str, FileTimes]


def load(path: Path = PATH) -> FullRun | None:
    """The last recorded run of all tests; None where there is none."""
    return msgspec.json.decode(path.read_bytes(), type=FullRun) if path.exists() else None


def longest_first(items: list[pytest.Item], recorded: FullRun | None) -> None:
    """Order whole files by what their tests among ``items`` take, longest first, so that no worker is left with a long one
    at the end."""
    if recorded is None:
        return
    rings: dict[str, set[bool]] = defaultdict(set)
    for item in items:
        rings[_file(item)].add("slow" in item.keywords)

    def seconds(name: str) -> float:
        times = recorded.files.get(name)
        if times is None:
            return float("inf")
        return times.seconds * (False in rings[name]) + times.slow_seconds * (True in rings[name])

    items.sort(key=lambda item: -seconds(_file(item)))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Recorder:
    """A pytest plugin of the controlling process: sums what tests took, and writes ``path`` if all of them passed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = time.monotonic()
        self._seconds: dict[str, dict[bool, float]] = defaultdict(lambda: defaultdict(float))
        self._tests: dict[str, dict[bool, int]] = defaultdict(lambda: defaultdict(int))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, slow = report.nodeid.partition("::")[0], "slow" in report.keywords
        self._seconds[name][slow] += report.duration
        self._tests[name][slow] += report.when == "call"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        commit = _git("rev-parse", "HEAD")
        if exitstatus != 0 or not commit or _git("status", "--porcelain"):
            return  # what failed, or was never committed, says nothing about a commit
        files = {
            name: FileTimes(
                tests=self._tests[name][False],
                slow_tests=self._tests[name][True],
                seconds=round(seconds[False], 1),
                slow_seconds=round(seconds[True], 1),
            )
            for name, seconds in sorted(self._seconds.items())
        }
        run = FullRun(
            commit=commit,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            machine=_machine(),
            wall_seconds=round(time.monotonic() - self._begun, 1),
            files=files,
        )
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def _machine() -> str:
    """Processor and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def by_folder(run: FullRun) -> str:
    """The recorded times as a table of Markdown, one row for each room's folder."""
    folders: dict[str, list[FileTimes]] = defaultdict(list)
    for name, each in run.files.items():
        folders["/".join(name.split("/")[:2])].append(each)
    lines = ["| folder | tests | seconds | slow tests | seconds |", "|---|---|---|---|---|"]
    for folder, rows in sorted(folders.items(), key=lambda pair: -sum(row.seconds for row in pair[1])):
        lines.append(_row(folder, rows))
    lines.append(_row("**all**", list(run.files.values())))
    return "\n".join(lines)


def _row(folder: str, rows: list[FileTimes]) -> str:
    tests, slow_tests = sum(row.tests for row in rows), sum(row.slow_tests for row in rows)
    seconds, slow_seconds = sum(row.seconds for row in rows), sum(row.slow_seconds for row in rows)
    return f"| {folder} | {tests} | {seconds:.0f} | {slow_tests} | {slow_seconds:.0f} |"


if __name__ == "__main__":
    recorded = Path(sys.argv[1]) if sys.argv[1:] else PATH
    last = load(recorded)
    if last is None:
        raise SystemExit(f"{recorded} is missing: `make test-all` on a clean checkout writes {PATH}")
    print(
        f"{last.machine}; {last.date}; commit {last.commit[:12]}; {last.wall_seconds / 60:.1f} minutes of wall time\n"
    )
    print(by_folder(last))
