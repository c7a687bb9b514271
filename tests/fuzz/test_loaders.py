"""Damaged graphs: refused by an error of ours, or run; never the end of the process."""

from __future__ import annotations

import json
import subprocess
import sys

COUNT = 400


def test_a_damaged_graph_is_refused_or_runs() -> None:
    command = [sys.executable, "-m", "tests.fuzz.loaders", "3", str(COUNT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert ended.returncode == 0, ended.stderr[-2000:]
    outcomes = json.loads(ended.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == COUNT and outcomes["refused"] > COUNT / 2
