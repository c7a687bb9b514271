"""MimeAdam and MimeLite: local steps by an Adam whose statistics are the server's (Karimireddy et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgefl.algorithms.baselines.steps import descent, received_state, root, trained_specs, weight_ports
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.options import check_above_zero, check_below_one, check_counts, check_not_negative
from edgefl.contract.server import MEAN, Scalars, ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.losses.loss import Loss, among, check_separable, sample_weights
from edgefl.models.spec import output_spec
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, begun, dtype_of, evaluate, finish, held_ports, pack, step_ports

# The gradient of all local samples, batch by batch.


def accumulate(objective: Objective, batch: int) -> Function:
    """Return the step function that adds up the per-sample gradients at ``state.weights``, one batch per call.

    It adds the gradients of rows whose ``batch.0.mask`` is 1 to ``state.full.*``, and their number or weight to
    ``state.seen``. After a pass over the data, :func:`mean_gradient` returns the mean over all samples. Weights and moving
    statistics do not change. It is a training pass: batch norm normalizes by the batch, including the rows that fill up
    the last one. So with batch norm the result depends on the division into batches.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Rows of a batch.

    Raises:
        ModelError: The loss reduces a batch itself, so that rows without a mask could not be left out.
    """
    out = output_spec(objective.suffix, objective.boundary)
    check_separable(objective.loss, out, "the gradient of all local samples (mimeadam, mimelite)")

    def fn(tensors: Tensors) -> Tensors:
        mask = tensors["batch.0.mask"]
        masked = objective.with_loss(_MaskedLoss(objective.loss, mask))
        loss, correct, grads, _ = gradient(masked, select(tensors, "state.weights"), tensors)
        full = select(tensors, "state.full")
        weight = sample_weights(masked.loss, tensors["batch.0.y"])
        if weight is None:
            rows, seen = len(mask), mask.sum()  # a mean over all rows, of which those without a mask are 0
            sums, loss = {name: rows * g for name, g in grads.items()}, rows * loss / seen
        else:
            seen = weight.sum()
            sums = {name: seen * g for name, g in grads.items()}
        metrics = {"metric.loss": loss, "metric.correct": correct}
        state = prefixed("state.full", {name: full[name] + added for name, added in sums.items()})
        return state | {"state.seen": tensors["state.seen"] + seen} | metrics

    ports = step_ports(objective, batch) | {"batch.0.mask": TensorSpec((batch,))}
    return Function("full_gradient", fn, ports | full_ports(objective))


def full_ports(objective: Objective) -> dict[str, TensorSpec]:
    """Return the specs of the sums of :func:`accumulate`, by input name: ``state.full.*`` (gradients) and
    ``state.seen`` (weight).
    """
    return prefixed("state.full", trained_specs(objective)) | {"state.seen": SCALAR}


def zero_sums(objective: Objective, state: Tensors) -> Tensors:
    """Return zeros for the sums of :func:`accumulate`, by port (input or output name), in the dtype of
    ``state.weights.*``.
    """
    dtype = dtype_of(objective, state)
    return {name: spec.zeros(dtype) for name, spec in full_ports(objective).items()}


def mean_gradient(tensors: Tensors) -> Tensors:
    """Return the mean gradient over the accumulated samples, by name, from ``state.full.*`` and ``state.seen``."""
    return {name: total / tensors["state.seen"] for name, total in select(tensors, "state.full").items()}


@dataclass(frozen=True)
class _MaskedLoss:
    """Loss multiplied by ``mask`` (B,), 1 or 0 per row of the batch. Weights of samples are multiplied, too."""

    loss: Loss
    mask: Tensor

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.mul(among(self.loss, self.mask).each(out, y), self.mask)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.mul(among(self.loss, self.mask).correct(out, y), self.mask)

    def label(self, out: TensorSpec) -> TensorSpec:
        return self.loss.label(out)

    def weight(self, y: Tensor) -> Tensor | None:
        weight = sample_weights(self.loss, y)
        return None if weight is None else weight * self.mask


def mimeadam(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.01,
) -> Algorithm:
    """Return MimeAdam: local Adam steps with the server's statistics and a corrected gradient (Karimireddy et al. 2021).

    A round has two round trips (fafed.md 3.6). In the first, c <- mean of the full local gradients at the round's x. Then::

        u = g(y; B) - g(x; B) + c;
        y <- y - lr ((1 - beta1) u + beta1 m) / (sqrt(v) + tau)        (``steps`` times);
        m <- beta1 m + (1 - beta1) c;  v <- beta2 v + (1 - beta2) c^2  (after the round).

    Both gradients use one batch and one draw of noise. m = 0 and v = tau^2 at first, as in FedAdam. If a round has only some
    of the devices, c is the mean over those of its first round trip.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        beta1: Decay of m, in [0, 1).
        beta2: Decay of v, in [0, 1). Only the server reads it.
        tau: Number added to sqrt(v), and root of the initial v; above 0.

    Raises:
        ConfigError: A number is out of range.
        ModelError: The loss reduces a batch itself.
    """
    adam = _checked_adam("mimeadam", objective, batch, steps, lr, beta1, beta2, tau)
    evaluated = evaluate(objective, batch)
    ahead = Algorithm(
        name="mimeadam",
        start=Function("start", adam.gathering, weight_ports(objective)),
        phases=(Phase("full_gradient", accumulate(objective, batch), 1, over_data=True),),
        finish=Function("finish", adam.send_gradient, full_ports(objective)),
        evaluate=evaluated,
        server=replace(MEAN, name="mean gradient", state={"c": 0.0}),
    )
    step = descent(objective, batch, adam.correct, adam.statistics | adam.anchor)
    return Algorithm(
        name="mimeadam",
        start=Function("start", adam.start_corrected, weight_ports(objective, "c", "m", "v")),
        phases=(Phase("train", step, steps),),
        finish=finish(objective),
        evaluate=evaluated,
        hyper={"lr": lr},
        server=adam.server("mimeadam"),
        ahead=(ahead,),
    )


def mimelite(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.01,
) -> Algorithm:
    """Return MimeLite: MimeAdam without the correction, in one round trip (Karimireddy et al. 2021).

    A device computes its full gradient c_i at the round's x. Then it repeats ``y <- y - lr ((1 - beta1) g(y; B) +
    beta1 m) / (sqrt(v) + tau)`` ``steps`` times, and sends y and c_i. The server updates m and v (``beta2``) with c =
    mean c_i, as in MimeAdam.

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        beta1: Decay of m, in [0, 1).
        beta2: Decay of v, in [0, 1). Only the server reads it.
        tau: Number added to sqrt(v), and root of the initial v; above 0.

    Raises:
        ConfigError: A number is out of range.
        ModelError: The loss reduces a batch itself.
    """
    adam = _checked_adam("mimelite", objective, batch, steps, lr, beta1, beta2, tau)
    return Algorithm(
        name="mimelite",
        start=Function("start", adam.start_lite, weight_ports(objective, "m", "v")),
        phases=(
            Phase("full_gradient", accumulate(objective, batch), 1, over_data=True),
            Phase("train", descent(objective, batch, adam.plain, adam.statistics), steps),
        ),
        finish=Function("finish", adam.both, held_ports(objective) | full_ports(objective)),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr},
        server=adam.server("mimelite"),
    )


def _checked_adam(
    name: str, objective: Objective, batch: int, steps: int, lr: float, beta1: float, beta2: float, tau: float
) -> _Adam:
    check_counts(f"algorithm {name!r}", batch=batch)
    check_not_negative(f"algorithm {name!r}", steps=steps, lr=lr)
    check_above_zero(f"algorithm {name!r}", tau=tau)
    check_below_one(f"algorithm {name!r}", beta1=beta1, beta2=beta2)
    return _Adam(objective, beta1, beta2, tau)


@dataclass(frozen=True, eq=False)
class _Adam:
    """Device functions of MimeAdam and MimeLite, and the server's step.

    Two tensors per parameter are constants of a round: ``state.pull``, the constant part of the direction's
    numerator, and ``state.scale``, its denominator sqrt(v) + tau.
    """

    objective: Objective
    beta1: float
    beta2: float
    tau: float

    @property
    def statistics(self) -> dict[str, TensorSpec]:
        specs = trained_specs(self.objective)
        return prefixed("state.pull", specs) | prefixed("state.scale", specs)

    @property
    def anchor(self) -> dict[str, TensorSpec]:
        return prefixed("state.anchor", trained_specs(self.objective))

    def gathering(self, tensors: Tensors) -> Tensors:
        """Return the state with which the sum of the device's full gradient begins: the weights, and sums of 0."""
        state = begun(self.objective, tensors)
        return state | zero_sums(self.objective, state)

    def start_corrected(self, tensors: Tensors) -> Tensors:
        """Return the state of the first step, by output name.

        It has the weights, a copy of the round's initial weights, and the constant part of each step's direction, (1 -
        beta1) c + beta1 m. Each step takes its second gradient at the copy.
        """
        c, state = received_state(tensors, "c", self.objective), begun(self.objective, tensors)
        weights = select(state, "state.weights")
        anchor = prefixed("state.anchor", {name: weights[name] for name in c})
        pull = {name: (1 - self.beta1) * c[name] + part for name, part in self._momentum(tensors).items()}
        return state | anchor | prefixed("state.pull", pull) | self._scale(tensors)

    def start_lite(self, tensors: Tensors) -> Tensors:
        """Return the state of the first step: weights, the constant part beta1 m of each step's direction, and an
        empty sum of gradients.
        """
        pull = prefixed("state.pull", self._momentum(tensors))
        state = begun(self.objective, tensors)
        return state | pull | self._scale(tensors) | zero_sums(self.objective, state)

    def correct(self, tensors: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        """Return (direction ((1 - beta1) u + beta1 m) / (sqrt(v) + tau) by parameter name, {}), with u = g(y) - g(x) +
        c.

        Args:
            tensors: Inputs of the step by port (input or output name).
            grads: Gradient g(y) by name. The method computes g(x) on the same batch.
        """
        at_x = select(tensors, "state.weights") | select(tensors, "state.anchor")
        old = gradient(self.objective, at_x, tensors)[2]
        return self.plain(tensors, {name: g - old[name] for name, g in grads.items()})

    def plain(self, tensors: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        """Return (direction ((1 - beta1) g + pull) / (sqrt(v) + tau) by parameter name, {}): there is no other new
        state.
        """
        pull, scale = select(tensors, "state.pull"), select(tensors, "state.scale")
        return {n: ((1 - self.beta1) * g + pull[n]) / scale[n] for n, g in grads.items()}, {}

    def send_gradient(self, tensors: Tensors) -> Tensors:
        """Return ``update.c/*``, the device's full gradient."""
        return prefixed("update", beside("c", mean_gradient(tensors)))

    def both(self, tensors: Tensors) -> Tensors:
        """Return ``update.*``, the trained model, and ``update.c/*``, the device's full gradient."""
        return pack(self.objective, tensors) | self.send_gradient(tensors)

    def server(self, name: str) -> ServerOpt:
        """Return the server optimizer called ``name``. It updates the server states m and v with c, the mean full
        gradient.
        """

        def step(_before: Tensors, mean: Tensors, _hyper: Scalars) -> Tensors:
            c, m, v = (state_of(mean, state) for state in ("c", "m", "v"))
            new = {n: self.beta1 * m[n] + (1 - self.beta1) * g for n, g in c.items()}
            square = {n: self.beta2 * v[n] + (1 - self.beta2) * g.square() for n, g in c.items()}
            return beside("m", new) | beside("v", square)

        return ServerOpt(name, {"c": 0.0, "m": 0.0, "v": self.tau**2}, step, options=frozenset({"beta2"}))

    def _momentum(self, tensors: Tensors) -> Tensors:
        return {n: self.beta1 * m for n, m in received_state(tensors, "m", self.objective).items()}

    def _scale(self, tensors: Tensors) -> Tensors:
        v = received_state(tensors, "v", self.objective)
        return prefixed("state.scale", {name: root(value) + self.tau for name, value in v.items()})
