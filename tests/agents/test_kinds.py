"""`edgefl run --agents`: programs of other kinds are started as devices, each with a way to the broker that it can take.

The programs here hand what they are given on to Python's agent: what is tested is the run's side of it. That of the agents
themselves stands in their own folders.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edgefl.lab.agents import CPP_VARIABLE, WEB_VARIABLE
from tests.e2e.runs import TINY, run_to_the_end

CONFIG = TINY.replace('"e2e"', '"kinds"\nrounds = 2') + "[tiers.strong]\n[tiers.weak]\ncut = 1\n"
IN_SHELL = """#!/bin/sh
echo "$EDGEFL_BROKER" > {told}
exec {python} -m edgefl device "$@"
"""
IN_NODE = """
import {{ writeFileSync }} from "node:fs";
import {{ spawn }} from "node:child_process";
writeFileSync({told}, process.env.EDGEFL_BROKER);
const env = {{ ...process.env, EDGEFL_PARENT: String(process.pid) }};
const child = spawn({python}, ["-m", "edgefl", "device", ...process.argv.slice(2)], {{ stdio: "inherit", env }});
process.on("SIGTERM", () => child.kill());
child.on("exit", (code) => process.exit(code ?? 1));
"""


@pytest.mark.slow
@pytest.mark.needs("node", "chromium")
def test_devices_of_three_kinds_train_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {kind: tmp_path / f"{kind}.txt" for kind in ("cpp", "web")}
    cpp, web = tmp_path / "agent", tmp_path / "agent.mjs"
    cpp.write_text(IN_SHELL.format(told=told["cpp"], python=sys.executable))
    cpp.chmod(0o755)
    web.write_text(IN_NODE.format(told=json.dumps(str(told["web"])), python=json.dumps(sys.executable)))
    monkeypatch.setenv(CPP_VARIABLE, str(cpp))
    monkeypatch.setenv(WEB_VARIABLE, str(web))

    mixed = run_to_the_end(tmp_path / "mixed", ["--agents", "python:1,cpp:1,web:1", "--seed", "3"], CONFIG)
    alone = run_to_the_end(tmp_path / "alone", ["--agents", "python:3", "--seed", "3"], CONFIG)

    assert [row["reports"] for row in mixed] == [3, 3]
    assert mixed[-1]["weights_sha256"] == alone[-1]["weights_sha256"], (
        "these are Python's agents, one way or another"
    )
    assert told["cpp"].read_text().startswith("mqtt://127.0.0.1:")
    assert told["web"].read_text().startswith("ws://127.0.0.1:") and "/mqtt" in told["web"].read_text()
