"""How fast an agent is, for cases that need one which is not done yet."""

from __future__ import annotations

import time

from edgefl_conformance.material.bundles import Material
from edgefl_conformance.play.stage import Stage

_FEW, _MANY = 300, 200_000
_TELLING_S = 0.5
"""What a round has to take beyond a usual one, so that its steps are most of it."""


def steps_that_take(stage: Stage, what: Material, seconds: float) -> int:
    """How many steps of ``what`` take the agent about so long: by a round that is long enough to tell."""
    stage.good_round(what)  # what is fetched and loaded once takes its time, too
    steps, took = _FEW, 0.0
    while took < _TELLING_S:
        begun = time.monotonic()
        stage.good_round(what.with_steps(steps))
        took = max(1e-6, time.monotonic() - begun - stage.usual_s / 2)
        if took < _TELLING_S:
            if steps >= _MANY:
                break
            steps = min(_MANY, 8 * steps)
    return max(_FEW, min(_MANY, int(seconds * steps / took)))
