"""One mixed fleet that trains undisturbed, for every test that looks at a run or disturbs the same one."""

from __future__ import annotations

import pytest

from tests import needs
from tests.e2e.runs import TINY, Calm
from tests.e2e.shared import made_once

ROUNDS = 6

# Both engines, three kinds of parts, updates of one bit with a residual on the device, changes in int8 on the way down.
FLEET = (
    TINY.replace("hidden = [8]", "hidden = [32]").replace("steps = 3", "steps = 12\nlr = 0.05")
    + """
[codec]
name = "ef_signsgd"
[downlink]
encoding = "int8"
keyframe_every = 4
[tiers.strong]
count = 1
[tiers.weak]
cut = 1
chunks = 1
engine = "executorch"
count = 1
[tiers.half]
kind = "width"
gamma = 0.25
count = 1
"""
)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Six rounds of the fleet."""
    needs.require("executorch")
    with made_once(tmp_path_factory, "fleet") as folder:
        return Calm.of(folder / "run", ["--rounds", str(ROUNDS), "--seed", "7"], FLEET)
