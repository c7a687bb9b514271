"""FedBAT: training binarizes the update with learned step sizes (fedbat.md 2; ICML'24)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from edgefl.algorithms.baselines.steps import weight_ports
from edgefl.algorithms.quantized.binarized_update import BinarizedUpdate, FedBATFinish, UploadMode
from edgefl.codecs.binarize import Granularity, StepSizeGroups, draw, is_inside, pack_signs, slope
from edgefl.codecs.codec import STATISTICS_BITS, Codec
from edgefl.codecs.packing import UpdateParts
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.errors import ModelError
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR, batch_ports, begun, dtype_of, evaluate

StepSizes = Literal["learned", "largest"]


def fedbat(
    objective: Objective,
    *,
    batch: int = 64,
    steps: int = 10,
    lr: float = 0.1,
    rho: float = 6.0,
    phi: float = 0.5,
    granularity: Granularity = "tensor",
    binarize_1d: bool = True,
    upload_mode: UploadMode = "resample_final",
    step_size: StepSizes = "learned",
    alpha_range: tuple[float, float] | None = None,
    statistics: int = STATISTICS_BITS,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    masked_loss: bool = False,
) -> Algorithm:
    """Return FedBAT Algorithm 1: the received weights w are frozen, and an update m, which starts at 0, is trained.

    First floor(``phi`` * ``steps``) steps of SGD in full precision, W = w + m, then steps that draw the signs s of m::

        alpha = alpha' * exp(rho * alpha_e),   alpha' = mean|m| after the warm-up,   alpha_e = 0 at first    (eq. 10, 13)
        s = +1 if zeta < (alpha + m) / (2 alpha) else -1,   W = w + alpha * s,   g = dF/dW                    (eq. 6, 7)
        m       <- m - lr * g * [|m| <= alpha]                                                                (eq. 8)
        alpha_e <- alpha_e - lr * rho * alpha * sum g * (s - m / alpha, or sign(m) where |m| > alpha)         (eq. 9)

    Args:
        objective: Model part that a tier trains, with its loss.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Learning rate, unless the server announces another (``hyper.lr``).
        rho: Learning speed of alpha, unless the server announces another (``hyper.rho``).
        phi: Share of warm-up steps.
        granularity: One alpha per tensor, module or model.
        binarize_1d: If False, biases and norms are trained in full precision and sent as float32 (fedbat.md 2.7).
        upload_mode: ``finish`` sends a bit per entry and the step sizes: of a new draw (``resample_final``), of the last
            step's (``last_forward``), or sign(m) (``det_sign``; fedbat.md 8.1).
        step_size: "largest" is the variant of the theory (fedbat.md 8.11): alpha = norm_inf(m) in each step, not learned.
        alpha_range: Bounds of alpha, an addition to the paper. If few entries share an alpha, or the loss is steep, alpha
            can run away, because its step grows with its own square. ``metric.alpha_growth`` shows that: the largest factor,
            up or down, between an alpha and its initial value (1 in the warm-up). A runaway reaches a factor of e^20, which
            no mean over steps hides. ``metric.clamped`` counts step sizes at a limit after a step.
        statistics: Bits per entry of moving statistics.
        momentum: Momentum of m, 0 in the paper.
        weight_decay: Adds weight_decay * W to g of kernels, 0 in the paper.
        masked_loss: True: set logits of classes without local samples to 0 in training.

    Raises:
        ModelError: Options contradict each other, such as learned step sizes without a warm-up (fedbat.md 8.6).
    """
    if masked_loss:
        objective = replace(objective, masked=True)
    warmup = math.floor(phi * steps + 1e-9)  # 0.7 * 90 is a hair below 63
    _check(rho, phi, steps, warmup, upload_mode, step_size, alpha_range)
    parts = UpdateParts.of(objective, binarize_1d=binarize_1d)
    if not parts.coded:
        raise ModelError(
            "fedbat has no tensor to binarize here; set binarize_1d, or train this submodel by sgd"
        )
    learned = step_size == "learned"
    groups = StepSizeGroups.of(parts.coded, granularity)
    binarized = BinarizedUpdate(objective, parts, groups, learned, _bounds(alpha_range))
    upload = FedBATFinish(binarized, Codec("fedbat"), upload_mode, statistics)
    training = _FedBATSteps(binarized, batch, momentum, weight_decay, keeps_draw=upload.last_draw)
    phases = (
        Phase("warmup", Function("warmup", training.warm_up, training.ports), warmup),
        Phase("binarize", Function("binarize", training.binarize, training.binarize_ports), steps - warmup),
    )
    return Algorithm(
        name="fedbat",
        start=Function("start", training.start, weight_ports(objective)),
        phases=tuple(phase for phase in phases if phase.steps),
        finish=Function("finish", upload.finish, upload.ports),
        evaluate=evaluate(objective, batch),
        hyper={"lr": lr, "rho": rho} if learned else {"lr": lr},
        form=upload.form,
    )


def _check(
    rho: float,
    phi: float,
    steps: int,
    warmup: int,
    upload_mode: UploadMode,
    step_size: StepSizes,
    alpha_range: tuple[float, float] | None,
) -> None:
    problem = ""
    if not 0.0 <= phi <= 1.0:
        problem = f"phi is the share of warm-up steps, 0 to 1, found {phi}"
    elif not 0.0 <= rho < math.inf:
        problem = f"rho is at least 0 and finite, found {rho}"
    elif step_size == "learned" and warmup < 1:
        problem = (
            f"learned step sizes begin at mean|m| after the warm-up, and {phi:g} of {steps} steps is none; use a larger "
            "phi, more steps, or step_size 'largest'"
        )
    elif upload_mode == "last_forward" and warmup == steps:
        problem = f"upload_mode 'last_forward' sends the last step's draw, and phi {phi:g} leaves none; use a smaller phi"
    elif alpha_range is not None and step_size == "largest":
        problem = "alpha_range limits learned step sizes; leave it out with step_size 'largest'"
    elif alpha_range is not None and not (len(alpha_range) == 2 and 0.0 < alpha_range[0] <= alpha_range[1]):
        problem = f"alpha_range is two numbers above 0, the smaller first, such as 5e-4 and 5e-2; found {alpha_range}"
    if problem:
        raise ModelError(
            f"algorithm fedbat: {problem}", rho=rho, phi=phi, steps=steps, alpha_range=alpha_range
        )


def _bounds(alpha_range: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if alpha_range is None else (float(alpha_range[0]), float(alpha_range[1]))


@dataclass(frozen=True, eq=False)
class _FedBATSteps:
    """Functions of FedBAT's ``start`` and of its two kinds of steps (warm-up and binarized), with the specs of their
    inputs.

    The received weights are frozen, so no step returns them as a new state.
    """

    update: BinarizedUpdate
    batch: int
    momentum: float
    weight_decay: float
    keeps_draw: bool

    def start(self, tensors: Tensors) -> Tensors:
        """Return the state of the first step: w as received, m = 0, and zeros for step sizes and the stored draw."""
        objective = self.update.objective
        state = begun(objective, tensors)
        weights = select(state, "state.weights")
        zeros = {name: torch.zeros_like(weights[name]) for name in objective.trainable}
        state |= prefixed("state.change", zeros)
        if self.momentum:
            state |= prefixed("state.momentum", zeros)
        scalars = self.update.size_state | (self.update.sent_ports if self.keeps_draw else {})
        dtype = dtype_of(objective, state)
        return state | {name: spec.zeros(dtype) for name, spec in scalars.items()}

    @property
    def ports(self) -> dict[str, TensorSpec]:
        """Specs of the inputs of a warm-up step, by port (input or output name)."""
        objective = self.update.objective
        ports = self.update.ports | batch_ports(objective, self.batch)
        if self.momentum:
            ports |= prefixed("state.momentum", self.update.specs(objective.trainable))
        noise = prefixed("noise", objective.noise(self.batch))
        return ports | prefixed("data", objective.facts) | noise | {"hyper.lr": SCALAR}

    def warm_up(self, tensors: Tensors) -> Tensors:
        """Return the state after one step in full precision, with alpha' of the new m."""
        m = select(tensors, "state.change")
        grads, state = self._gradient(tensors, m)
        state |= self._descend(tensors, m, grads)
        if self.update.learned:
            masks = self.update.objective.carrier.held(select(tensors, "state.gate"))
            state["state.scale"] = self.update.mean_sizes(select(state, "state.change"), masks)
            dtype = dtype_of(self.update.objective, tensors)
            state["metric.alpha_growth"] = torch.ones((), dtype=dtype)
            state["metric.clamped"] = torch.zeros((), dtype=dtype)
        return state

    @property
    def binarize_ports(self) -> dict[str, TensorSpec]:
        noise = prefixed("noise", self.update.specs(self.update.parts.coded))
        return self.ports | self.update.size_ports | noise

    def binarize(self, tensors: Tensors) -> Tensors:
        """Return the state after one step with binarized change (:func:`edgefl.codecs.binarize.draw`), by port (input
        or output name).

        The gradients by m and alpha are taken before the step.
        """
        update, m = self.update, select(tensors, "state.change")
        alpha = update.step_sizes(tensors)
        of, signs = update.groups.spread(alpha), self._signs(tensors, m, alpha)
        grads, state = self._gradient(tensors, m | {name: of[name] * sign for name, sign in signs.items()})
        reached = {name: torch.where(is_inside(m[name], of[name]), grads[name], 0.0) for name in signs}
        state |= self._descend(tensors, m, grads | reached)
        if update.learned:
            pulls = {n: (grads[n] * slope(m[n], of[n], sign)).sum() for n, sign in signs.items()}
            scale, log_scale = tensors["state.scale"], tensors["state.log_scale"]
            size, pull = update.size(tensors), update.groups.sums(pulls)
            state["state.log_scale"], state["metric.clamped"] = size.descend(
                scale, log_scale, alpha, pull, tensors["hyper.lr"]
            )
            state["metric.alpha_growth"] = size.growth(scale, alpha)
        if self.keeps_draw:
            state |= {"state.sent.scales": alpha, "state.sent.codes": pack_signs([*signs.values()])}
        return state

    def _signs(self, tensors: Tensors, m: Tensors, alpha: Tensor) -> Tensors:
        """Return the random signs of each binarized tensor, by name: +1, -1, or 0 for entries that the tier does not
        hold.
        """
        masks = self.update.objective.carrier.held(select(tensors, "state.gate"))
        signs = {}
        for name, size in self.update.groups.spread(alpha).items():
            sign = draw(m[name], size, tensors[f"noise.{name}"])
            signs[name] = torch.where(masks[name], sign, 0.0) if name in masks else sign
        return signs

    def _gradient(self, tensors: Tensors, change: Tensors) -> tuple[Tensors, Tensors]:
        """Return (gradient g by name at W = w + ``change``, moving statistics and metrics of the pass by output name)."""
        objective, weights = self.update.objective, select(tensors, "state.weights")
        at = weights | {name: weights[name] + change[name] for name in objective.trainable}
        # The objective passes unknown noise to the layers, so the noise of the draw must not be among it.
        own = set(prefixed("noise", self.update.specs(self.update.parts.coded)))
        others = {name: tensor for name, tensor in tensors.items() if name not in own}
        loss, correct, grads, moved = gradient(objective, at, others)
        if self.weight_decay:
            grads |= {name: grads[name] + self.weight_decay * at[name] for name in objective.kernels}
        return grads, prefixed("state.weights", moved) | {"metric.loss": loss, "metric.correct": correct}

    def _descend(self, tensors: Tensors, m: Tensors, grads: Tensors) -> Tensors:
        """Return ``state.change.*`` (m) and ``state.momentum.*`` after a step along ``grads``."""
        velocity = select(tensors, "state.momentum")
        if self.momentum:
            velocity = grads = {name: self.momentum * velocity[name] + grads[name] for name in m}
        new = {name: m[name] - tensors["hyper.lr"] * grads[name] for name in m}
        if self.momentum or self.weight_decay:  # these move entries without a gradient
            new = self.update.objective.carrier.confine(new, m, select(tensors, "state.gate"))
        return prefixed("state.change", new) | prefixed("state.momentum", velocity)
