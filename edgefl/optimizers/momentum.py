"""Momentum at the server: FedAvgM (Hsu et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from edgefl.contract.ranges import above_zero, below_one
from edgefl.contract.server import ServerOpt
from edgefl.optimizers.change import on_change


def server_momentum(*, lr: float = 1.0, beta: float = 0.9) -> ServerOpt:
    """FedAvgM: momentum on the mean change, ``m <- beta m + Delta``, ``x <- x + lr m`` (Hsu et al. 2019).

    m = 0 at first. With ``beta`` = 0 and ``lr`` = 1 it is the plain mean.
    """
    above_zero("optimizer 'server_momentum'", lr=lr)
    below_one("optimizer 'server_momentum'", beta=beta)

    def rule(delta: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        m = beta * state["m"] + delta
        return lr * m, {"m": m}

    return on_change("server_momentum", {"m": 0.0}, rule)
