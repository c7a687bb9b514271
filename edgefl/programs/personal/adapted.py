"""A program with the graph that adapts its model to one user."""

from __future__ import annotations

from dataclasses import replace

from edgefl.contract.program import Program
from edgefl.contract.ranges import at_least_zero
from edgefl.objective.objective import Objective
from edgefl.programs.personal.adaptation import ALPHA, personalize
from edgefl.wire.errors import ConfigError

STEP = 0.01
"""Default step size of personalization."""


def adapted(program: Program, objective: Objective, *, alpha: float = STEP) -> Program:
    """``program`` with ``personalize``: one SGD step of size ``hyper.alpha`` on a batch as large as those it trains on.

    Training, and what it sends, are as they were; a bundle gains one graph. ConfigError for a program that has such a
    graph, or whose evaluation reads the weights in a form of its own, which a step on the weights as they are would not fit.
    """
    what = f"program {program.name!r}"
    at_least_zero(what, alpha=alpha)
    if program.personalize is not None or ALPHA in program.hyper:
        raise ConfigError(
            f"{what} has a scalar {ALPHA!r} of its own; leave out personal, and set it among the program's options",
            program=program.name,
        )
    if program.inference is not None:
        raise ConfigError(
            f"{what} computes with its weights in a form of its own, so a plain step would adapt another model than the one "
            "that is evaluated; leave out personal, or train by fedavg_update or per_fedavg",
            program=program.name,
        )
    batch = program.phases[0].function.inputs["batch.0.x"].shape[0]
    return replace(program, personalize=personalize(objective, batch), hyper={**program.hyper, ALPHA: alpha})
