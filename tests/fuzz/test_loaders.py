"""Damaged graphs and programs: refused by an error of ours, or run; never the end of the agent's process."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import run_python


@pytest.mark.parametrize(
    ("engine", "count"), [("onnx", 400), pytest.param("executorch", 40, marks=pytest.mark.slow)]
)
def test_what_is_damaged_is_refused_or_runs(engine: str, count: int) -> None:
    """ExecuTorch checks little of an program, so it has a process of its own, which dies of some of them."""
    ended = run_python("-m", "tests.fuzz.loaders", "3", count, engine)

    assert ended.returncode == 0, ended.stderr[-2000:]
    outcomes = json.loads(ended.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == count and outcomes["refused"] > count / 2
