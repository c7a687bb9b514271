"""An algorithm with the graph that adapts its model to one user."""

from __future__ import annotations

from dataclasses import replace

from edgefl.algorithms.personal.adaptation import ALPHA, personalize
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.ranges import at_least_zero
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective

STEP = 0.01
"""Default step size of personalization."""


def adapted(algorithm: Algorithm, objective: Objective, *, alpha: float = STEP) -> Algorithm:
    """``algorithm`` with ``personalize``: one SGD step of size ``hyper.alpha`` on a batch as large as those it trains on.

    Training, and what it sends, are as they were; a bundle gains one graph. ConfigError for an algorithm that has such a
    graph, or whose evaluation reads the weights in a form of its own, which a step on the weights as they are would not fit.
    """
    what = f"algorithm {algorithm.name!r}"
    at_least_zero(what, alpha=alpha)
    if algorithm.personalize is not None or ALPHA in algorithm.hyper:
        raise ConfigError(
            f"{what} has a scalar {ALPHA!r} of its own; leave out personal, and set it among the algorithm's options",
            algorithm=algorithm.name,
        )
    if algorithm.inference is not None:
        raise ConfigError(
            f"{what} computes with its weights in a form of its own, so a plain step would adapt another model than the one "
            "that is evaluated; leave out personal, or train by fedavg_update or per_fedavg",
            algorithm=algorithm.name,
        )
    batch = algorithm.phases[0].function.inputs["batch.0.x"].shape[0]
    return replace(
        algorithm, personalize=personalize(objective, batch), hyper={**algorithm.hyper, ALPHA: alpha}
    )
