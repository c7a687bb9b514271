"""Our own agent before the kit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from edgefl_conformance.campaign import Campaign
from edgefl_conformance.command import app
from edgefl_conformance.results import CaseResult
from tests.cli.runner import runner
from tests.conformance.playing import OURS, verdicts
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, refuses

# Of each way to begin an agent, and of each kind of bundle.
QUICK = {
    "onnx": (*("will", "plain-round", "sparse-update", "patched-weights", "killed-in-sending"),),
    "executorch": ("one-bit-update", "frozen-prefix", "bundle-of-a-stranger"),
}


@pytest.fixture(
    scope="module", params=["onnx", pytest.param("executorch", marks=pytest.mark.needs("executorch"))]
)
def ours(request: pytest.FixtureRequest) -> Mapping[str, CaseResult]:
    return verdicts(OURS, QUICK[request.param], request.param)


@pytest.mark.e2e
def test_it_passes(ours: Mapping[str, CaseResult]) -> None:
    assert {name: verdict for name, verdict in ours.items() if verdict.outcome != "passed"} == {}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "engine", ["onnx", pytest.param("executorch", marks=pytest.mark.needs("executorch"))]
)
def test_it_passes_every_case(engine: str) -> None:
    """Optional ones too; skipped is what means nothing for the engine."""
    found = verdicts(OURS, (), engine)

    assert {name: each for name, each in found.items() if each.outcome not in ("passed", "skipped")} == {}
    skipped = {name for name, each in found.items() if each.outcome == "skipped"}
    assert skipped == ({"unsigned-bundle", "bundle-of-a-stranger"} if engine == "onnx" else set())


@pytest.mark.slow
@pytest.mark.e2e
def test_it_passes_through_a_websocket() -> None:
    campaign = Campaign(
        command=OURS, only=("plain-round", "will", "cut-in-sending"), websocket=True, patience=2.0
    )

    assert [verdict.outcome for verdict in campaign.run()] == ["passed"] * 3


@pytest.mark.e2e
def test_an_agent_that_says_nothing_fails_and_the_command_says_so() -> None:
    silent = ["--", sys.executable, "-c", "import sys; sys.exit(3)"]
    command = ["run", "--only", "connects", "--patience", "0.1", "--json", *silent]
    ran = runner().invoke(app, command)
    told = json.loads(ran.stdout)

    assert ran.exit_code == 1
    assert (told["failed"], told["passed"]) == (1, 0)
    (case,) = told["cases"]
    assert case["outcome"] == "failed"
    assert case["expected"] == "a Hello on devices/agent-1/hello"
    assert "the agent ended with exit code 3" in case["found"]


@pytest.mark.slow
@pytest.mark.e2e
def test_an_agent_without_hello_is_started_twice_and_then_given_up() -> None:
    ends = (sys.executable, "-c", "import sys; sys.exit('no such option: --id')")
    found = verdicts(ends, ("plain-round", "batches", "large-seed", "few-rows"), jobs=1)

    assert {verdict.outcome for verdict in found.values()} == {"failed"}
    assert "no such option: --id" in found["batches"].found
    assert found["few-rows"].expected == "an agent that says Hello"
    assert "by hand" in found["few-rows"].found and "exit code 1" in found["few-rows"].found


@pytest.mark.e2e
@pytest.mark.parametrize("number", mostly_slow([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
def test_a_kit_that_is_stopped_ends_its_agents_and_its_broker(tmp_path: Path, number: int) -> None:
    told = tmp_path / "told"
    mute = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    words = ("run", "--only", "plain-round", "--out", str(tmp_path / "kit"))
    command = [sys.executable, "-m", "edgefl_conformance", *words, "--", sys.executable, "-c", mute]
    kit = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 60.0
    while not (told.exists() and told.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    kit.send_signal(number)
    out, _ = kit.communicate(timeout=60.0)

    assert kit.returncode == 130, out
    assert "failed" not in out
    left = [each.name for each in Path("/proc").glob("[0-9]*") if _names(each, str(tmp_path / "kit"))]
    assert left == []


def _names(process: Path, folder: str) -> bool:
    try:
        return folder.encode() in (process / "cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return False


def test_a_missing_command_and_an_unknown_case_are_named() -> None:
    with refuses(ConfigError, command="no-such-agent"):
        Campaign(command=["no-such-agent"], only=("connects",)).run()
    with refuses(ConfigError, name="conects"):
        Campaign(command=OURS, only=("conects",)).run()
    with pytest.raises(ConfigError, match=r"expected an agent.s command"):
        Campaign(command=[]).run()
