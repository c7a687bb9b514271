"""Optimizers of the server: FedAdam, FedYogi, FedAdagrad (Reddi et al. 2021), FedAMS (Wang et al. 2022) and FedAvgM
(Hsu et al. 2019).

Delta is the mean change of the round. The adaptive optimizers compute ``m <- beta1 m + (1 - beta1) Delta`` and a second
moment v of Delta. They start with m = 0 and v = tau^2, correct no bias, and add tau outside of the root (fafed.md 3.4,
3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from edgefl.contract.options import check_above_zero, check_below_one
from edgefl.contract.server import Scalars, ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors
from edgefl.errors import ConfigError

Rule = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""(Delta, the state by name) -> (the step to take, the next state), of one parameter."""


def change_optimizer(name: str, state: Mapping[str, float], rule: Rule) -> ServerOpt:
    """Return an optimizer that sets the model to ``x + step``, with the step of ``rule`` for ``Delta = mean - x``.

    ``x`` is the model at the start of the round. An entry that no device sent has Delta = 0, but its state may still move
    it. Only trainable parameters have a state. Moving statistics are set to their mean.

    Args:
        name: Name of the optimizer.
        state: Initial value of each state, by name of the state; at least one.
        rule: Function ``(Delta, states) -> (step, next states)`` for one parameter. States are tensors of the
            parameter's shape, by name of the state.
    """

    def step(before: Tensors, mean: Tensors, _hyper: Scalars) -> Tensors:
        states = {each: state_of(before, each) for each in state}
        after: Tensors = {}
        for parameter in next(iter(states.values())):
            x = before[parameter]
            change, new = rule(mean[parameter] - x, {each: states[each][parameter] for each in state})
            after[parameter] = x + change
            for each, value in new.items():
                after |= beside(each, {parameter: value})
        return after

    return ServerOpt(name, state, step)


LR, TAU = 0.0316, 0.01
"""The server step of FAFED's paper for these (10^-1.5, the largest of its grid) and its tau."""
State = Mapping[str, Tensor]
Variant = Literal["amsgrad", "max_stabilisation"]


def fedadam(*, lr: float = LR, beta1: float = 0.9, beta2: float = 0.9, tau: float = TAU) -> ServerOpt:
    """Return FedAdam: Adam on the mean change of the round (Reddi et al. 2021; fafed.md 3.4).

    ``m <- beta1 m + (1 - beta1) Delta``, ``v <- beta2 v + (1 - beta2) Delta^2``, ``x <- x + lr m / (sqrt(v) + tau)``.

    Args:
        lr: step size; above 0.
        beta1: decay of the mean change m; in [0, 1).
        beta2: decay of the second moment v; in [0, 1).
        tau: smallest scale of a step, and root of the initial v; above 0.

    Raises:
        ConfigError: a number is out of range.
    """
    _check("fedadam", lr, tau, beta1=beta1, beta2=beta2)
    return _adaptive("fedadam", lr, beta1, tau, lambda v, square: beta2 * v + (1 - beta2) * square)


def fedyogi(*, lr: float = LR, beta1: float = 0.9, beta2: float = 0.9, tau: float = TAU) -> ServerOpt:
    """Return FedYogi: Yogi on the mean change of the round (Reddi et al. 2021; fafed.md 3.4).

    ``m <- beta1 m + (1 - beta1) Delta``, ``v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)``, ``x <- x + lr m / (sqrt(v) +
    tau)``. Delta is the mean change.

    Args:
        lr: step size; above 0.
        beta1: decay of the mean change m; in [0, 1).
        beta2: decay of the second moment v; in [0, 1).
        tau: smallest scale of a step, and root of the initial v; above 0.

    Raises:
        ConfigError: a number is out of range.
    """
    _check("fedyogi", lr, tau, beta1=beta1, beta2=beta2)

    def second(v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - beta2) * square * torch.sign(v - square)

    return _adaptive("fedyogi", lr, beta1, tau, second)


def fedadagrad(*, lr: float = LR, beta1: float = 0.0, tau: float = TAU) -> ServerOpt:
    """Return FedAdagrad: Adagrad on the mean change of the round (Reddi et al. 2021; fafed.md 3.4).

    ``m <- beta1 m + (1 - beta1) Delta``, ``v <- v + Delta^2``, ``x <- x + lr m / (sqrt(v) + tau)``. Delta is the mean
    change.

    Args:
        lr: step size; above 0.
        beta1: decay of the mean change m; in [0, 1).
        tau: smallest scale of a step, and root of the initial v; above 0.

    Raises:
        ConfigError: a number is out of range.
    """
    _check("fedadagrad", lr, tau, beta1=beta1)
    return _adaptive("fedadagrad", lr, beta1, tau, lambda v, square: v + square)


def fedams(
    *, lr: float = LR, beta1: float = 0.9, beta2: float = 0.9, tau: float = TAU, variant: Variant = "amsgrad"
) -> ServerOpt:
    """Return FedAMS: FedAdam whose second moment never falls (Wang et al. 2022; fafed.md 3.5).

    vhat, the largest v so far, replaces v; it begins as v does.

    Args:
        lr: step size; above 0.
        beta1: decay of the mean change m; in [0, 1).
        beta2: decay of the second moment v; in [0, 1).
        tau: smallest scale of a step, and root of the initial v; above 0.
        variant: ``amsgrad``: ``vhat <- max(vhat, v)``, ``x <- x + lr m / (sqrt(vhat) + tau)``, where tau acts as in FedAdam.
            ``max_stabilisation``: ``vhat <- max(vhat, v, tau)``, ``x <- x + lr m / sqrt(vhat)``.

    Raises:
        ConfigError: a number is out of range, or there is no such variant.
    """
    _check("fedams", lr, tau, beta1=beta1, beta2=beta2)
    if variant not in get_args(Variant):
        raise ConfigError(
            f"optimizer 'fedams': variant is {variant!r}; set it to one of {', '.join(get_args(Variant))}",
            option="variant",
            value=variant,
        )

    def rule(delta: Tensor, state: State) -> tuple[Tensor, State]:
        m = beta1 * state["m"] + (1 - beta1) * delta
        v = beta2 * state["v"] + (1 - beta2) * delta.square()
        vhat = torch.maximum(state["vhat"], v)
        if variant == "amsgrad":
            scale = vhat.sqrt() + tau
        else:
            vhat = vhat.clamp_min(tau)
            scale = vhat.sqrt()
        return lr * m / scale, {"m": m, "v": v, "vhat": vhat}

    return change_optimizer("fedams", {"m": 0.0, "v": tau**2, "vhat": tau**2}, rule)


def _adaptive(
    name: str, lr: float, beta1: float, tau: float, second: Callable[[Tensor, Tensor], Tensor]
) -> ServerOpt:
    """Return the optimizer with the step ``lr m / (sqrt(v) + tau)`` and the momentum m of the mean change.

    Args:
        name: Name of the optimizer.
        lr: Step size.
        beta1: Decay of m.
        tau: Smallest scale of a step, and root of the initial v.
        second: Function (old v, Delta^2) that returns the new second moment v.
    """

    def rule(delta: Tensor, state: State) -> tuple[Tensor, State]:
        m = beta1 * state["m"] + (1 - beta1) * delta
        v = second(state["v"], delta.square())
        return lr * m / (v.sqrt() + tau), {"m": m, "v": v}

    return change_optimizer(name, {"m": 0.0, "v": tau**2}, rule)


def _check(name: str, lr: float, tau: float, **betas: float) -> None:
    check_above_zero(f"optimizer {name!r}", lr=lr, tau=tau)
    check_below_one(f"optimizer {name!r}", **betas)


def server_momentum(*, lr: float = 1.0, beta: float = 0.9) -> ServerOpt:
    """Return FedAvgM: momentum on the mean change, ``m <- beta m + Delta``, ``x <- x + lr m`` (Hsu et al. 2019).

    m is 0 initially. With the default ``lr`` and ``beta`` = 0 it is the plain mean.

    Args:
        lr: step size; above 0.
        beta: decay of m; in [0, 1).

    Raises:
        ConfigError: a number is out of range.
    """
    check_above_zero("optimizer 'server_momentum'", lr=lr)
    check_below_one("optimizer 'server_momentum'", beta=beta)

    def rule(delta: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        m = beta * state["m"] + delta
        return lr * m, {"m": m}

    return change_optimizer("server_momentum", {"m": 0.0}, rule)
