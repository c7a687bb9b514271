"""FedAvg's local training with an adaptive optimizer at the server: FedAdam, FedYogi, FedAdagrad and FedAMS."""

from __future__ import annotations

from dataclasses import replace

from edgefl.contract.program import Program
from edgefl.contract.server import ServerOpt
from edgefl.objective.objective import Objective
from edgefl.optimizers import adaptive
from edgefl.optimizers.adaptive import LR, TAU, Variant
from edgefl.programs.baselines.fedavg import fedavg


def fedadam(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    server_lr: float = LR,
    beta1: float = 0.9,
    beta2: float = 0.9,
    tau: float = TAU,
    clip: float | None = None,
    eval_batch: int | None = None,
) -> Program:
    """FedAdam: local SGD, and Adam on the mean change at the server (Reddi et al. 2021).

    :func:`edgefl.optimizers.adaptive.fedadam` with the step ``server_lr``; the devices do what FedAvg's do.
    """
    server = adaptive.fedadam(lr=server_lr, beta1=beta1, beta2=beta2, tau=tau)
    return _with(server, objective, batch, steps, lr, clip, eval_batch)


def fedyogi(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    server_lr: float = LR,
    beta1: float = 0.9,
    beta2: float = 0.9,
    tau: float = TAU,
    clip: float | None = None,
    eval_batch: int | None = None,
) -> Program:
    """FedYogi: local SGD, and Yogi on the mean change at the server (Reddi et al. 2021).

    :func:`edgefl.optimizers.adaptive.fedyogi` with the step ``server_lr``; the devices do what FedAvg's do.
    """
    server = adaptive.fedyogi(lr=server_lr, beta1=beta1, beta2=beta2, tau=tau)
    return _with(server, objective, batch, steps, lr, clip, eval_batch)


def fedadagrad(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    server_lr: float = LR,
    beta1: float = 0.0,
    tau: float = TAU,
    clip: float | None = None,
    eval_batch: int | None = None,
) -> Program:
    """FedAdagrad: local SGD, and Adagrad on the mean change at the server (Reddi et al. 2021).

    :func:`edgefl.optimizers.adaptive.fedadagrad` with the step ``server_lr``; the devices do what FedAvg's do.
    """
    server = adaptive.fedadagrad(lr=server_lr, beta1=beta1, tau=tau)
    return _with(server, objective, batch, steps, lr, clip, eval_batch)


def fedams(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    server_lr: float = LR,
    beta1: float = 0.9,
    beta2: float = 0.9,
    tau: float = TAU,
    variant: Variant = "amsgrad",
    clip: float | None = None,
    eval_batch: int | None = None,
) -> Program:
    """FedAMS: FedAdam whose second moment never falls (Wang, Lin and Chen 2022).

    :func:`edgefl.optimizers.adaptive.fedams` with the step ``server_lr``; the devices do what FedAvg's do.
    """
    server = adaptive.fedams(lr=server_lr, beta1=beta1, beta2=beta2, tau=tau, variant=variant)
    return _with(server, objective, batch, steps, lr, clip, eval_batch)


def _with(
    server: ServerOpt,
    objective: Objective,
    batch: int,
    steps: int,
    lr: float,
    clip: float | None,
    eval_batch: int | None,
) -> Program:
    program = fedavg(objective, batch=batch, steps=steps, lr=lr, clip=clip, eval_batch=eval_batch)
    return replace(program, name=server.name, server=server)
