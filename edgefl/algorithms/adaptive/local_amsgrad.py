"""Federated AMSGrad: adaptive local steps that share one vhat (Chen, Li and Li 2020)."""

from __future__ import annotations

import torch

from edgefl.algorithms.baselines.steps import descent, received_state, root, trained_specs, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.options import check_above_zero, check_below_one, check_counts
from edgefl.contract.server import Scalars, ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, begun, dtype_of, evaluate, held_ports, pack


def local_amsgrad(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-4,
) -> Algorithm:
    """Return Federated (local) AMSGrad: each device keeps its own m and v, all divide by one vhat (fafed.md 3.6).

    Each of ``steps`` steps, and the server instead of the last step's move::

        m_i <- beta1 m_i + (1 - beta1) g_i;
        v_i <- beta2 v_i + (1 - beta2) g_i^2;
        x_i <- x_i - lr m_i / sqrt(vhat)                          (all steps but the last of a round);
        vhat <- max(vhat, mean v_i)                               (server);
        x <- mean x_i - lr mean m_i / sqrt(vhat)                  (server).

    The last step divides by the new vhat, which no device knows, so a device sends x_i before it, with m_i and v_i. The
    server averages v_i into vhat alone and m_i into the step alone, so both stay in the device's carry, and start at 0
    without one. vhat = ``eps`` > 0 at first. There is no bias correction.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Step size, a scalar of the round; above 0.
        beta1: Decay of m, in [0, 1).
        beta2: Decay of v, in [0, 1).
        eps: Initial and smallest vhat, above 0.

    Raises:
        ConfigError: A number is out of range.
    """
    check_counts("algorithm 'local_amsgrad'", batch=batch, steps=steps)
    check_above_zero("algorithm 'local_amsgrad'", lr=lr, eps=eps)
    check_below_one("algorithm 'local_amsgrad'", beta1=beta1, beta2=beta2)
    made = _AmsGrad(objective, steps, beta1, beta2, eps)
    return Algorithm(
        name="local_amsgrad",
        start=Function("start", made.start, weight_ports(objective, "vhat") | made.carry),
        phases=(Phase("train", descent(objective, batch, made.direction, made.step_ports), steps),),
        finish=Function("finish", made.finish, held_ports(objective) | made.moments),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr},
        server=ServerOpt("amsgrad", {"m": 0.0, "v": 0.0, "vhat": eps}, _server_step),
    )


class _AmsGrad:
    """Device functions of Federated AMSGrad: the beginning of a round, the direction of a step, and the end of a round."""

    def __init__(self, objective: Objective, steps: int, beta1: float, beta2: float, eps: float) -> None:
        self.objective, self.steps = objective, steps
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        specs = trained_specs(objective)
        self.carry = prefixed("carry.m", specs) | prefixed("carry.v", specs)
        self.moments = prefixed("state.m", specs) | prefixed("state.v", specs)
        self.step_ports = self.moments | prefixed("state.scale", specs) | {"state.moves": SCALAR}

    def start(self, tensors: Tensors) -> Tensors:
        """Return the state of the first step: weights, the device's m and v, sqrt(vhat), and the number of steps that move
        weights.
        """
        vhat = received_state(tensors, "vhat", self.objective)
        state = prefixed("state.m", select(tensors, "carry.m"))
        state |= prefixed("state.v", select(tensors, "carry.v"))
        state |= prefixed("state.scale", {name: root(value, self.eps) for name, value in vhat.items()})
        state |= begun(self.objective, tensors)
        moves = torch.full((), self.steps - 1.0, dtype=dtype_of(self.objective, state))
        return state | {"state.moves": moves}

    def direction(self, tensors: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        """Return (direction m / sqrt(vhat) by parameter name, new ``state.*`` by output name: m, v and the number of
        moves left).

        In the last step of the round the direction is 0, because the server makes that move.
        """
        scale, moves = select(tensors, "state.scale"), tensors["state.moves"]
        m, v = select(tensors, "state.m"), select(tensors, "state.v")
        m = {name: self.beta1 * m[name] + (1 - self.beta1) * g for name, g in grads.items()}
        v = {name: self.beta2 * v[name] + (1 - self.beta2) * g.square() for name, g in grads.items()}
        left = prefixed("state.m", m) | prefixed("state.v", v) | {"state.moves": moves - 1.0}
        share = moves.clamp(0.0, 1.0)
        return {name: share * m[name] / scale[name] for name in m}, left

    def finish(self, tensors: Tensors) -> Tensors:
        """Return ``update.*`` (weights), ``update.m/*`` and ``update.v/*`` for the server, and m and v as ``carry.*`` to
        store.
        """
        m, v = select(tensors, "state.m"), select(tensors, "state.v")
        update = pack(self.objective, tensors) | prefixed("update", beside("m", m) | beside("v", v))
        return update | prefixed("carry.m", m) | prefixed("carry.v", v)


def _server_step(before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
    """Return the new x, vhat and m by tensor name: the step that the server makes at the end of a round.

    It sets state m to 0, so that entries which no device sends next do not move.

    Args:
        before: Weights and server state at the start of the round, by name.
        mean: Averages of what devices sent, by name.
        hyper: Scalars of the round, with ``lr``.
    """
    after: Tensors = {}
    for name, old in state_of(before, "vhat").items():
        m, vhat = mean[f"m/{name}"], torch.maximum(old, mean[f"v/{name}"])
        after[name] = mean[name] - hyper["lr"] * m / vhat.sqrt()
        after |= beside("vhat", {name: vhat}) | beside("m", {name: torch.zeros_like(m)})
    return after
