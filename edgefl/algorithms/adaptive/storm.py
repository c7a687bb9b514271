"""Recursive momentum on many devices (STORM, Cutkosky and Orabona 2019), the common part of STEM and FAFED.

Iteration t of device i, with ONE batch and one dropout mask for both gradients, and A = 1 unless adaptive::

    gn = grad f_i(x_t; B)            go = grad f_i(x_{t-1}; B)
    m  = gn + (1 - alpha_t) (m - ext go)
    v  = beta v + (1 - beta) gn^2                    (adaptive; other forms: SecondMoment)
    x_{t+1} = x_t - eta_t m / A

An exchange has the iterations t = (r-1) q + 1 .. r q. The device sends x_t, m and v *before* the step of the last one. The
server makes that step for all devices with the averages: v first, A = sqrt(v) + rho from it, and then x - eta_t m / A. A
is constant until the next exchange. The device keeps x_{t-1}: after an exchange that is its OWN earlier x_t, not the
average (fafed.md 8.3). The opening exchange is iteration 0: gradients at x_0, and the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from edgefl.algorithms.adaptive.schedules import StepSizePlan, check_positive
from edgefl.algorithms.baselines.steps import clip_gradients, trained_specs, weight_ports
from edgefl.contract.algorithm import Algorithm, CarryRule, Function, Phase
from edgefl.contract.server import Scalars, ServerOpt, beside, state_of
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.errors import ConfigError
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, begun, evaluate, held_ports, pack, step_ports

SecondMoment = Literal["elementwise", "scalar", "scalar_mean", "adagrad_norm"]
"""Second moment v, with ||g|| over all d trained entries of a device::

    elementwise     v <- beta v + (1 - beta) g^2           for each entry (fafed.md 2.3)
    scalar          v <- beta v + (1 - beta) ||g||^2
    scalar_mean     v <- beta v + (1 - beta) ||g||^2 / d
    adagrad_norm    v <- v + ||g||^2                       (without beta)

The last three have one number for the whole model. ``scalar`` and ``adagrad_norm`` measure a step against the whole
gradient, so their step size is about sqrt(d) times that of ``elementwise``; that of ``scalar_mean`` is equal.

The one number is stored as v of every entry. So graphs, server and averages are those of ``elementwise``, and the mean over
devices is correct for each entry even if they train parts of different size.
"""


def check_second_moment(what: str, value: str) -> None:
    """Raise ConfigError unless ``value`` is one of :data:`SecondMoment`.

    Args:
        what: Name of the algorithm, for the error text.
        value: Value of the option ``second_moment``.
    """
    if value not in get_args(SecondMoment):
        raise ConfigError(
            f"{what}: second_moment is {value!r}; set it to one of {', '.join(get_args(SecondMoment))}",
            value=value,
        )


def second_moment_term(kind: SecondMoment, grads: Tensors) -> Tensors:
    """Return the term that a gradient adds to the second moment v, by tensor name, in the shape of each tensor.

    It is the squares of the gradient's entries for "elementwise". For the other kinds all entries are equal: the sum
    of all squares, or for "scalar_mean" their mean.
    """
    squares = {name: grad.square() for name, grad in grads.items()}
    if kind == "elementwise":
        return squares
    total = torch.stack([square.sum() for square in squares.values()]).sum()
    if kind == "scalar_mean":
        total = total / sum(square.numel() for square in squares.values())
    return {name: total + torch.zeros_like(square) for name, square in squares.items()}


def update_second_moment(kind: SecondMoment, v: Tensors, grads: Tensors, beta: Tensor) -> Tensors:
    """Return the second moment v after one gradient, by tensor name.

    Args:
        kind: Form of the second moment.
        v: Second moment before, by name.
        grads: Gradient by name.
        beta: Decay of v, (); unused for "adagrad_norm".
    """
    new = second_moment_term(kind, grads)
    if kind == "adagrad_norm":
        return {name: v[name] + new[name] for name in new}
    return {name: beta * v[name] + (1 - beta) * new[name] for name in new}


# Device side of STEM and FAFED: recursive momentum, its opening gradient, carry and update.


def divisor(v: Tensor, rho: float | Tensor) -> Tensor:
    """Return the divisor A = sqrt(v) + rho of a step, in v's shape. Entries of v below 0, left by rounding, count as 0."""
    return v.clamp_min(0.0).sqrt() + rho


@dataclass(frozen=True)
class StormDevice:
    """Functions that devices run for STEM and FAFED: those of the repeated exchange and those of the opening exchange.

    An exchange is one round trip between server and device. ``batch``, ``steps`` (q), ``opening_steps``,
    ``second_moment`` (None: A = 1) and ``clip`` are constants of the graphs. eta, alpha, beta, rho and ext are
    scalars, so all schedules share one graph. ``state`` holds ``weights``, ``previous`` (x_{t-1}), ``m``, ``v``,
    ``scale`` (A), ``etas`` and ``alphas`` (q,), and ``step`` () int64, the index of this iteration in ``etas`` and
    ``alphas``. See the equations in :func:`edgefl.algorithms.adaptive.fafed.fafed`.
    """

    objective: Objective
    batch: int
    steps: int
    opening_steps: int
    second_moment: SecondMoment | None
    clip: float | None

    @property
    def adaptive(self) -> bool:
        """True if steps are divided by A, which is made of the second moment of gradients."""
        return self.second_moment is not None

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the server's states that devices read and send: ("m", "v") if :attr:`adaptive`, else ("m",)."""
        return ("m", "v") if self.adaptive else ("m",)

    @property
    def moved(self) -> dict[str, TensorSpec]:
        """Specs of the tensors that training moves, by name."""
        return trained_specs(self.objective)

    # -- opening ---------------------------------------------------------------------------------------------------

    def start_opening(self) -> Function:
        """Return the function ``start`` of the opening exchange (first round trip between server and device).

        Its outputs are the weights, and zeros for the sum of gradients.
        """

        def fn(given: Tensors) -> Tensors:
            state = begun(self.objective, given)
            weights = select(state, "state.weights")
            return state | prefixed("state.m", {name: torch.zeros_like(weights[name]) for name in self.moved})

        return Function("start", fn, weight_ports(self.objective))

    def gather(self) -> Function:
        """Return the step function that adds the gradient of one batch at the initial weights x_0 to a sum.

        Moving statistics do not change.
        """

        def fn(given: Tensors) -> Tensors:
            weights, total = select(given, "state.weights"), select(given, "state.m")
            loss, correct, grads, _ = gradient(self.objective, weights, given)
            state = prefixed("state.m", {name: total[name] + grads[name] for name in self.moved})
            return state | {"metric.loss": loss, "metric.correct": correct}

        ports = step_ports(self.objective, self.batch) | prefixed("state.m", self.moved)
        return Function("gather", fn, ports)

    def finish_opening(self) -> Function:
        """Return the function ``finish`` of the opening exchange (round trip between server and device).

        It sends the mean gradient, and stores x_0 on the device (the carry) as the x_{t-1} of the next exchange.
        """

        def fn(given: Tensors) -> Tensors:
            mean = {name: total / self.opening_steps for name, total in select(given, "state.m").items()}
            (mean,) = clip_gradients(self.clip, mean)
            return prefixed("update", beside("m", mean)) | self._carry(given)

        ports = prefixed("state.weights", self.moved) | prefixed("state.m", self.moved)
        return Function("finish", fn, ports)

    # -- every other exchange --------------------------------------------------------------------------------------

    def start(self) -> Function:
        """Return the function ``start`` of the repeated exchange (round trip between server and device).

        Its outputs are the server's x, m and v, the device's own x_{t-1}, A, and the step sizes of all iterations.
        """

        def fn(given: Tensors) -> Tensors:
            state = begun(self.objective, given) | prefixed("state.previous", select(given, "carry.previous"))
            for name in self.shared:
                state |= prefixed(f"state.{name}", state_of(select(given, "weights"), name))
            if self.adaptive:
                v = select(state, "state.v")
                state |= prefixed("state.scale", {name: divisor(v[name], given["hyper.rho"]) for name in v})
            # Once for the round: a step that read 2 q scalars would take as long as feeding them does.
            etas = [given[f"hyper.eta.{k}"] for k in range(1, self.steps)]
            alphas = [given[f"hyper.alpha.{k}"] for k in range(1, self.steps + 1)]
            # The server takes the step of the last iteration, so the device does not move x_t.
            coefficients = {
                "etas": torch.stack([*etas, torch.zeros_like(alphas[0])]),
                "alphas": torch.stack(alphas),
            }
            return (
                state | prefixed("state", coefficients) | {"state.step": torch.zeros((), dtype=torch.int64)}
            )

        ports = weight_ports(self.objective) | prefixed("carry.previous", self.moved)
        ports |= {f"hyper.eta.{k}": SCALAR for k in range(1, self.steps)}
        ports |= {f"hyper.alpha.{k}": SCALAR for k in range(1, self.steps + 1)}
        for name in self.shared:
            ports |= prefixed("weights", beside(name, self.moved))
        return Function("start", fn, ports | ({"hyper.rho": SCALAR} if self.adaptive else {}))

    def train(self) -> Function:
        """Return the step function of one iteration. In the last one it computes m and v, but leaves the move to the
        server.
        """

        def fn(given: Tensors) -> Tensors:
            weights, gates = select(given, "state.weights"), select(given, "state.gate")
            previous = select(given, "state.previous")
            loss, correct, new, statistics = gradient(self.objective, weights, given)
            # The same batch and noise, or the difference of the two would not cancel them.
            _, _, old, _ = gradient(self.objective, weights | previous, given)
            m, state = self._estimate(given, *clip_gradients(self.clip, new, old))
            here = {name: weights[name] for name in self.moved}
            there = self.objective.carrier.confine(self._move(given, here, m), weights, gates)
            state |= prefixed("state.weights", weights | there | statistics)
            state |= prefixed("state.previous", here) | {"state.step": given["state.step"] + 1}
            return state | {"metric.loss": loss, "metric.correct": correct}

        return Function("train", fn, self._train_ports())

    def finish(self) -> Function:
        """Return the function ``finish`` of the repeated exchange (round trip between server and device).

        It sends x_t, m and v, and stores x_t on the device (the carry) as the x_{t-1} of the next exchange.
        """

        def fn(given: Tensors) -> Tensors:
            update = pack(self.objective, given)
            for name in self.shared:
                update |= prefixed("update", beside(name, select(given, f"state.{name}")))
            return update | self._carry(given)

        ports = held_ports(self.objective)
        for name in self.shared:
            ports |= prefixed(f"state.{name}", self.moved)
        return Function("finish", fn, ports)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _estimate(self, given: Tensors, new: Tensors, old: Tensors) -> tuple[Tensors, Tensors]:
        """Return (momentum m by name, new ``state.m.*`` and ``state.v.*`` by output name).

        Args:
            given: Inputs of the step by port (input or output name).
            new: Gradient at x_t, by name. It alone enters v.
            old: Gradient at x_{t-1}, by name.
        """
        before, ext = select(given, "state.m"), given["hyper.ext"]
        past = 1 - _pick(given["state.alphas"], given["state.step"])
        m = {name: new[name] + past * (before[name] - ext * old[name]) for name in self.moved}
        state = prefixed("state.m", m)
        if self.second_moment is not None:
            v = update_second_moment(self.second_moment, select(given, "state.v"), new, given["hyper.beta"])
            state |= prefixed("state.v", v)
        return m, state

    def _move(self, given: Tensors, here: Tensors, m: Tensors) -> Tensors:
        """Return the weights x_{t+1} after a step, by name.

        In the last iteration it is x_t, because the server makes that step.

        Args:
            given: Inputs of the step by port (input or output name).
            here: Weights x_t by name.
            m: Momentum by name.
        """
        if self.steps == 1:
            return here
        eta = _pick(given["state.etas"], given["state.step"])
        scale = select(given, "state.scale")
        return {
            name: here[name] - eta * (m[name] / scale[name] if self.adaptive else m[name]) for name in here
        }

    def _carry(self, given: Tensors) -> Tensors:
        """Return the trained weights as ``carry.previous.*``, which the device stores for the next exchange (round
        trip between server and device).
        """
        return prefixed("carry.previous", {name: given[f"state.weights.{name}"] for name in self.moved})

    def _train_ports(self) -> dict[str, TensorSpec]:
        ports = step_ports(self.objective, self.batch)
        for name in ("previous", *self.shared, *(("scale",) if self.adaptive else ())):
            ports |= prefixed(f"state.{name}", self.moved)
        ports["state.step"] = TensorSpec((), torch.int64, self.steps)
        ports |= prefixed("state", dict.fromkeys(("etas", "alphas"), TensorSpec((self.steps,))))
        scalars = ["ext", *(("beta",) if self.adaptive else ())]
        return ports | prefixed("hyper", dict.fromkeys(scalars, SCALAR))


def _pick(values: Tensor, step: Tensor) -> Tensor:
    """Return the entry of ``values`` (q,) at the index ``step`` (), as a scalar ()."""
    return values.gather(0, step.reshape(1)).reshape(())


FirstStep = Literal["preconditioned", "plain"]


@dataclass(frozen=True)
class Storm:
    """Settings of one recursive-momentum method, STEM or FAFED, on an objective. :meth:`algorithm` builds it.

    Attributes:
        name: Name of the algorithm.
        objective: Model part that a tier trains, with its loss.
        schedule: Step sizes and momentum parameters.
        batch: Samples per iteration.
        steps: Iterations q of an exchange (round trip between server and device).
        opening_steps: Batches of the opening gradient. None: ``steps``.
        clip: Norm over all tensors that a gradient is scaled down to. The factor comes from the gradient at the
            new point and scales both, because two factors would break the cancellation in their difference
            (fafed.md 8.11).
        ext: Factor of the old gradient, 1 in the paper. Public code of FAFED has 0.95 for images and 1 for its
            language model. At 0, m is a heavy ball.
        adaptive: Scalars beta and rho by name. Empty: A = 1.
        first_step: "plain": the step from x_0 is not divided by A.
        second_moment: Form of v, if ``adaptive`` is not empty.
        announced: Names of the method's options that decide ``schedule``.

    Raises:
        ConfigError: A number is out of range.
    """

    name: str
    objective: Objective
    schedule: StepSizePlan
    batch: int
    steps: int
    opening_steps: int | None = None
    clip: float | None = None
    ext: float = 1.0
    adaptive: Mapping[str, float] = field(default_factory=dict)
    first_step: FirstStep = "preconditioned"
    second_moment: SecondMoment = "elementwise"
    announced: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "opening_steps"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(
                    f"{self.name}: {name} is at least 1, found {count}; raise it", name=name, value=count
                )
        if self.clip is not None:
            check_positive(f"{self.name}: clip", self.clip)
        if not 0 <= self.ext <= 1:
            raise ConfigError(
                f"{self.name}: ext, the weight of the old gradient, lies in [0, 1], found {self.ext}; the paper's method "
                "has 1",
                ext=self.ext,
            )

    def algorithm(self) -> Algorithm:
        """Return the algorithm of the repeated exchange (round trip between server and device), with the opening
        exchange before it.
        """
        device, state = self._device, dict.fromkeys(self._device.shared, 0.0)
        check = evaluate(self.objective, self.batch)
        opening = Algorithm(
            name=self.name,
            start=device.start_opening(),
            phases=(Phase("gather", device.gather(), device.opening_steps),),
            finish=device.finish_opening(),
            evaluate=check,
            hyper={"eta": self.schedule.eta(0), **self.adaptive},
            server=ServerOpt(
                f"{self.name} opening", state, self._opening_step, self._unfold, frozenset({"first_step"})
            ),
            carry_rule=CarryRule(exchanges=1),
            whole=True,
        )
        return Algorithm(
            name=self.name,
            start=device.start(),
            phases=(Phase("train", device.train(), self.steps),),
            finish=device.finish(),
            evaluate=check,
            hyper=self._scalars(1, 1),
            schedule=self._scalars,
            announced=self.announced,
            server=ServerOpt(self.name, state, self._server_step),
            opening=(opening,),
            carry_rule=CarryRule(exchanges=1, needed=True),
            whole=True,
        )

    @property
    def _device(self) -> StormDevice:
        first = self.steps if self.opening_steps is None else self.opening_steps
        second = self.second_moment if self.adaptive else None
        return StormDevice(self.objective, self.batch, self.steps, first, second, self.clip)

    def _scalars(self, position: int, _rounds: int) -> Scalars:
        """Return the scalars of the exchange (round trip between server and device) number ``position``, by name.

        They are eta.1 .. eta.q, alpha.1 .. alpha.q, ext, and beta and rho.
        """
        done = (position - 1) * self.steps  # the opening exchange is iteration 0
        numbers = range(1, self.steps + 1)
        etas = {f"eta.{k}": self.schedule.eta(done + k) for k in numbers}
        alphas = {f"alpha.{k}": self.schedule.alpha(done + k) for k in numbers}
        return {**etas, **alphas, "ext": self.ext, **self.adaptive}

    def _unfold(self, update: Tensors) -> Tensors:
        """Return the tensors of an update that the server averages, by name.

        An adaptive method adds v_0, the squares of this update.

        They are added before averaging, because v_0 is the mean of squares and not the square of a mean.
        """
        if not self.adaptive:
            return update
        return update | beside("v", second_moment_term(self.second_moment, state_of(update, "m")))

    def _opening_step(self, _before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
        return descend(mean, hyper["eta"], hyper.get("rho") if self.first_step == "preconditioned" else None)

    def _server_step(self, _before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
        return descend(mean, hyper[f"eta.{self.steps}"], hyper.get("rho"))


def descend(mean: Tensors, eta: float, rho: float | None) -> Tensors:
    """Return x - eta m / A by name, for every tensor x with an m. A = sqrt(v) + rho, or 1 if ``rho`` is None.

    Args:
        mean: Averages by name: weights x, ``m/<name>`` and ``v/<name>``.
        eta: Step size.
        rho: Number added to sqrt(v), or None.
    """
    v = state_of(mean, "v")
    return {
        name: mean[name] - eta * (m if rho is None else m / divisor(v[name], rho))
        for name, m in state_of(mean, "m").items()
    }
