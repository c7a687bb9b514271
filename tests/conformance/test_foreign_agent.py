"""An agent without edgefl, the tutorial's in one file: what it leaves out is told, and what it does right is seen."""

from __future__ import annotations

import sys

import pytest

from tests.conformance.playing import verdicts

COMMAND = (sys.executable, "-m", "tests.conformance.bare_agent")
RIGHT = ("connects", "plain-round", "large-seed", "few-rows", "one-bit-update", "frozen-prefix", "chunks")
LEFT_OUT = {
    "signed": "bare hello, status, updates",
    "bare-task": "an update on ",
    "zstd": "the agent ended with exit code 1; the last that it printed: ",
    "pass-over-the-data": "1 declines",
}


@pytest.mark.slow
@pytest.mark.e2e
def test_the_kit_tells_what_it_does_and_what_it_leaves_out() -> None:
    found = verdicts(COMMAND, (*RIGHT, *LEFT_OUT), patience=0.5)

    assert {name: found[name] for name in RIGHT if found[name].outcome != "passed"} == {}
    assert {name: found[name].outcome for name in LEFT_OUT} == dict.fromkeys(LEFT_OUT, "failed")
    assert {
        name: found[name].found for name, words in LEFT_OUT.items() if words not in found[name].found
    } == {}
