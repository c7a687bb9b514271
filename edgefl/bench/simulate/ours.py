"""The process that simulates with edgefl, ``python -m edgefl.bench.simulate.ours FOLDER``: a federation file, as anybody
writes one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from edgefl.bench.simulate.work import tell

FEDERATION = "federation.toml"


def main(folder: Path) -> None:
    """``edgefl simulate``; the model is evaluated when the rounds are over."""
    from device_runtime.memory import return_memory_late
    from edgefl.api.simulate import Simulation, prepare_simulation
    from edgefl.simulator.plan import Plan
    from edgefl.system.distribution import version

    return_memory_late()
    prepared = prepare_simulation(folder / FEDERATION, folder / "out")
    moments = []
    for _ in prepared.rounds():
        moments.append(time.perf_counter())
    federation = prepared.federation
    each = federation.round.model_copy(update={"evaluate_every": 1})
    spec = Plan.of(federation.model_copy(update={"round": each}), prepared.dataset).spec
    assert spec.evaluate is not None
    found = spec.evaluate(Simulation(prepared.folder).model)
    tell(moments, found["accuracy"], version())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
