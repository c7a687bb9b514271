"""SCAFFOLD: local steps corrected by the difference between the device's gradients and the mean (Karimireddy et al.
2020).
"""

from __future__ import annotations

from collections.abc import Callable

from edgefl.algorithms.baselines.steps import check_clip, descent, received_state, trained_specs, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.options import check_above_zero, check_counts
from edgefl.contract.server import Scalars, ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, begun, evaluate, held_ports, pack


def scaffold(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    eta_g: float = 1.0,
    clip: float | None = None,
) -> Algorithm:
    """Return SCAFFOLD with option II: local steps without the drift of the device's own gradients (Karimireddy et al. 2020).

    With c the server's control variate and c_i the device's, both 0 at first, and K = ``steps`` (fafed.md 3.2)::

        y   <- y - lr (g(y; B) - c_i + c)                (K times, from the round's x);
        c_i <- c_i - c + (x - y) / (K lr);
        x   <- x + eta_g mean(y - x);
        c   <- c + share mean(change of c_i)             (share: fraction of all devices that reported).

    A device sends ``c + change of c_i = (x - y) / (K lr)``. The mean of all c_i is c as long as all devices take part and
    keep their carry. A device that lost its carry restarts at c_i = 0, unknown to c. From then on the mean of the c_i
    differs from c by the lost share.

    ``clip``: g alone, before the correction, is scaled down to this norm over all tensors.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round, K.
        lr: Learning rate, unless the server announces another (``hyper.lr``); above 0.
        eta_g: Step size of the server; above 0.
        clip: Norm over all tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range.
    """
    check_counts("algorithm 'scaffold'", batch=batch, steps=steps)
    check_above_zero("algorithm 'scaffold'", lr=lr, eta_g=eta_g)
    check_clip("algorithm 'scaffold'", clip)
    made = _Scaffold(objective, steps)
    correction = prefixed("state.correction", trained_specs(objective))
    step = descent(objective, batch, made.correct, correction, clip=clip)
    return Algorithm(
        name="scaffold",
        start=Function("start", made.start, weight_ports(objective, "c") | made.control),
        phases=(Phase("train", step, steps),),
        finish=Function("finish", made.finish, made.finish_ports),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr},
        server=ServerOpt("scaffold", {"c": 0.0}, _server(eta_g), options=frozenset({"eta_g"})),
        whole=True,
    )


class _Scaffold:
    """Device functions of SCAFFOLD: the beginning of a round, the direction of a step, and the end of a round."""

    def __init__(self, objective: Objective, steps: int) -> None:
        self.objective, self.steps = objective, steps
        self.control = prefixed("carry.control", trained_specs(objective))
        self.finish_ports = (
            weight_ports(objective, "c") | held_ports(objective) | self.control | {"hyper.lr": SCALAR}
        )

    def start(self, tensors: Tensors) -> Tensors:
        """Return the state of the first step, by output name: the weights, and c - c_i, which corrects the gradient of
        every step.
        """
        c, own = received_state(tensors, "c", self.objective), select(tensors, "carry.control")
        return begun(self.objective, tensors) | prefixed("state.correction", {n: c[n] - own[n] for n in c})

    def correct(self, tensors: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        correction = select(tensors, "state.correction")
        return {name: g + correction[name] for name, g in grads.items()}, {}

    def finish(self, tensors: Tensors) -> Tensors:
        """Return the outputs of the round by port (output name).

        ``update.*`` are the weights. ``update.c/*`` is the mean gradient of the local steps, by which the server
        updates c. ``carry.control.*`` is the device's new c_i, which the device stores.
        """
        objective = self.objective
        left = select(tensors, "state.weights")
        x = select(begun(objective, tensors), "state.weights")
        c, own = received_state(tensors, "c", objective), select(tensors, "carry.control")
        training_gradients = {
            n: (x[n] - left[n]) / (self.steps * tensors["hyper.lr"]) for n in objective.trainable
        }
        update = pack(objective, tensors) | prefixed("update", beside("c", training_gradients))
        return update | prefixed("carry.control", {n: own[n] - c[n] + training_gradients[n] for n in c})


def _server(eta_g: float) -> Callable[[Tensors, Tensors, Scalars], Tensors]:
    def step(before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
        after: Tensors = {}
        for name, c in state_of(before, "c").items():
            after |= beside("c", {name: c + hyper["share"] * (mean[f"c/{name}"] - c)})
            if eta_g != 1.0:
                after[name] = before[name] + eta_g * (mean[name] - before[name])
        return after

    return step
