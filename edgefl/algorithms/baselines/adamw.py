"""AdamW on the device: for transformers, whose layers differ in scale too much for one learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from edgefl.algorithms.baselines.steps import descent, root, trained_specs, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.options import check_above_zero, check_below_one, check_counts, check_not_negative
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, begun, dtype_of, evaluate, finish, held_ports, pack


def adamw(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    keep: bool = False,
) -> Algorithm:
    """Return Local AdamW: Adam with bias correction and decoupled decay on each device (Loshchilov and Hutter 2019).

    ::

        m <- beta1 m + (1 - beta1) g;
        v <- beta2 v + (1 - beta2) g^2;
        y <- y - lr ((m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay y).

    Decay acts on kernels only, not on biases, norms and embeddings. m, v and t are new in every round. With ``keep`` a
    device continues with its own, at the price of two models in its store.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        beta1: Decay of m, in [0, 1).
        beta2: Decay of v, in [0, 1).
        eps: Number added to the root, above 0.
        weight_decay: Decay of kernels.
        keep: True: the device stores m, v and t and continues with them in its next round.

    Raises:
        ConfigError: A number is out of range.
    """
    check_counts("algorithm 'adamw'", batch=batch)
    check_not_negative("algorithm 'adamw'", steps=steps, lr=lr, weight_decay=weight_decay)
    check_above_zero("algorithm 'adamw'", eps=eps)
    check_below_one("algorithm 'adamw'", beta1=beta1, beta2=beta2)
    made = _AdamW(objective, beta1, beta2, eps, weight_decay)
    plain = finish(objective)
    return Algorithm(
        name="adamw",
        start=Function("start", made.start, weight_ports(objective) | (made.ports("carry") if keep else {})),
        phases=(Phase("train", descent(objective, batch, made.direction, made.ports("state")), steps),),
        finish=Function("finish", made.finish, held_ports(objective) | made.ports("state"))
        if keep
        else plain,
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr},
    )


@dataclass(frozen=True, eq=False)
class _AdamW:
    """Device functions of AdamW: the beginning of a round, the direction of a step, and the end of a round.

    The optimizer state holds m and v by parameter, and the scalars ``mass1`` and ``mass2``: 1 - beta1^t and 1 -
    beta2^t. They are means of t ones, so a new optimizer's state is zeros.
    """

    objective: Objective
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        each = trained_specs(self.objective)
        return prefixed("m", each) | prefixed("v", each) | {"mass1": SCALAR, "mass2": SCALAR}

    def ports(self, role: str) -> dict[str, TensorSpec]:
        return prefixed(f"{role}.adam", self.specs)

    def start(self, tensors: Tensors) -> Tensors:
        """Return the state of the first step: the weights, and the stored optimizer state or zeros."""
        state = begun(self.objective, tensors)
        # Of the scalars too, so that models in float64 are trained in it.
        dtype = dtype_of(self.objective, state)
        adam = select(tensors, "carry.adam") or {name: spec.zeros() for name, spec in self.specs.items()}
        return state | prefixed("state.adam", {name: value.to(dtype) for name, value in adam.items()})

    def direction(self, tensors: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        """Return (direction by parameter name, new ``state.adam.*`` by output name).

        The direction is the quotient of the corrected moments, plus the decay for kernels.
        """
        old, weights = select(tensors, "state.adam"), select(tensors, "state.weights")
        new = {
            f"mass{n}": beta * old[f"mass{n}"] + (1 - beta) for n, beta in ((1, self.beta1), (2, self.beta2))
        }
        along = {}
        for name, g in grads.items():
            m = new[f"m.{name}"] = self.beta1 * old[f"m.{name}"] + (1 - self.beta1) * g
            v = new[f"v.{name}"] = self.beta2 * old[f"v.{name}"] + (1 - self.beta2) * g.square()
            along[name] = (m / new["mass1"]) / (root(v / new["mass2"]) + self.eps)
            if self.weight_decay and name in self.objective.kernels:
                along[name] = along[name] + self.weight_decay * weights[name]
        return along, prefixed("state.adam", new)

    def finish(self, tensors: Tensors) -> Tensors:
        """Return ``update.*``, and the optimizer state as ``carry.adam.*`` to store: the ``finish`` used if ``keep`` is
        set.
        """
        return pack(self.objective, tensors) | prefixed("carry.adam", select(tensors, "state.adam"))
