"""Local training of a model with early exits whose distillation the server can switch on late (ScaleFL, fiarse.md 3)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from edgefl.contract.program import Function, Phase, Program, Schedule
from edgefl.contract.server import Scalars
from edgefl.contract.tensors import Tensors
from edgefl.models.exit_loss import ExitLoss
from edgefl.objective.objective import Objective
from edgefl.objective.parts import SCALAR
from edgefl.programs.baselines.sgd import sgd
from edgefl.wire.errors import ModelError

WEIGHT = "kd_weight"
"""Name of the scalar, ``hyper.kd_weight``."""
BEGIN = 0.25
"""Distillation begins when this fraction of the rounds has passed."""


def multi_exit(
    objective: Objective,
    *,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    kd_weight: float | None = None,
    eval_batch: int | None = None,
) -> Program:
    """:func:`edgefl.programs.baselines.sgd.sgd` on the losses of all exits; the weight of distillation is a scalar
    of the round.

    Of the exits j = 1..m of the tier the loss is ``sum_j j / (m (m + 1) / 2) * (CE_j + [j < m] kd_weight * KL(p_m || p_j))``
    (:class:`edgefl.models.exit_loss.ExitLoss`). ``kd_weight`` (default: the model's own, 0 unless it was given one) is the
    default of ``hyper.kd_weight``, which the server announces once a quarter of the rounds has passed, and 0 before.
    With a weight of 0 there is neither the scalar nor anything of the divergence in the graphs, and this is
    ``sgd``. ModelError for a model without exits.
    """
    loss = objective.loss
    if not isinstance(loss, ExitLoss):
        raise ModelError(
            "the program multi_exit trains models with early exits, and this one has none: give it some by "
            "edgefl.models.exits.with_exits, or train it by sgd",
            loss=type(loss).__name__,
        )
    weight = loss.kd_weight if kd_weight is None else kd_weight
    loss = loss.distilling(weight)
    trained = _Distilling.like(objective, loss) if weight else replace(objective, loss=loss)
    program = sgd(
        trained,
        batch=batch,
        steps=steps,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        eval_batch=eval_batch,
    )
    if not weight:
        return replace(program, name="multi_exit")
    phases = tuple(map(_reading_weight, program.phases))
    hyper = {**program.hyper, WEIGHT: float(weight)}
    return replace(program, name="multi_exit", phases=phases, hyper=hyper, schedule=_begins_late(weight))


def _begins_late(weight: float) -> Schedule:
    """No distillation until the share BEGIN of the rounds has passed."""

    def at(position: int, rounds: int) -> Scalars:
        return {WEIGHT: float(weight) if position >= BEGIN * rounds - 1e-9 else 0.0}

    return at


@dataclass(frozen=True, eq=False)
class _Distilling(Objective):
    """An objective whose loss has the weight that comes as one of the ``facts``."""

    loss: ExitLoss = field(kw_only=True)

    @classmethod
    def like(cls, objective: Objective, loss: ExitLoss) -> _Distilling:
        own = {entry.name: getattr(objective, entry.name) for entry in fields(objective) if entry.init}
        return cls(**own | {"loss": loss})

    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        noise: Mapping[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensors]:
        # A shallow copy has the same modules; only its loss differs, which cannot be an argument.
        bound = copy.copy(self)
        object.__setattr__(bound, "loss", self.loss.distilling((facts or {})[WEIGHT]))
        return Objective.__call__(bound, params, buffers, x, y, noise, gates, facts)


def _reading_weight(phase: Phase) -> Phase:
    step = phase.function

    def fn(tensors: Tensors) -> Tensors:
        return step.fn(tensors | {f"data.{WEIGHT}": tensors[f"hyper.{WEIGHT}"]})

    function = Function(step.name, fn, {**step.inputs, f"hyper.{WEIGHT}": SCALAR}, step.label_range)
    return replace(phase, function=function)
