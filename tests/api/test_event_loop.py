"""Long calls of the API within a running event loop, in a script that has no main guard, beside the user's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import installed
from tests.support.commands import run_python
from tests.system.test_user_files import write_modules

SCRIPT = """
import asyncio

import edgefl

sgd = edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=8, steps=2))
federation = edgefl.federation(
    "mlp", rounds=1, data="digits", tiers={"whole": edgefl.Tier(count=2)}, training=sgd
)


async def main():
CALLS


print("imported")
asyncio.run(main())
"""
TRAINED = {
    'edgefl.compile("mlp", training=sgd).verify().ok': "True",
    'len(edgefl.simulate(federation, "simulated", workers=2).history)': "1",
}
OTHERS = {
    'len(edgefl.run(federation, "ran").history)': "1",
    'edgefl.compile("mlp", training=sgd).profile(repeat=1).tier': "strong",
    'len(edgefl.plan("mlp", kinds=["width"], gammas=[0.25, 1.0], processes=2).offers)': "2",
    'edgefl.check("mlp", engines=["onnx", "onnx"], processes=2).ok': "True",
    'len(edgefl.export(federation, "bundles", processes=2))': "1",
    'len(edgefl.simulate(federation, "run").history)': "1",
    'edgefl.deploy("run").measured().facts["latency_ms"] > 0': "True",
    'len(edgefl.personalize("run", protocols=["train_support"], steps=(0, 1)).reports)': "1",
}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "calls", [TRAINED, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["training", "others"]
)
def test_long_calls_run_in_an_event_loop(calls: dict[str, str], tmp_path: Path) -> None:
    write_modules(tmp_path)
    lines = "\n".join(f"    print({call})" for call in calls)
    (tmp_path / "script.py").write_text(SCRIPT.replace("CALLS", lines))
    environment = installed.clone() | {"EDGEFL_CACHE": str(tmp_path / "cache")}
    ended = run_python("script.py", cwd=tmp_path, env=environment)

    assert ended.returncode == 0, ended.stderr[-3000:]
    # A child that imported the script again would print, too.
    assert ended.stdout.split() == ["imported", *calls.values()]
