"""Personal layers: devices share a part of the model, and each keeps the rest to itself (FedPer, FedRep, FedBN)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import nn

from edgefl.algorithms.baselines.sgd import sgd, sgd_step
from edgefl.contract.algorithm import Algorithm, CarryRule, Function, Phase
from edgefl.contract.options import check_below_one, check_counts, check_not_negative
from edgefl.contract.tensors import Tensors
from edgefl.errors import ConfigError
from edgefl.models.layers.norms import BatchNorm
from edgefl.objective.objective import Objective
from edgefl.objective.parts import private_ports, restore_private, store_private

Norms = Literal["batch", "all"]
_NORMS: dict[Norms, tuple[type[nn.Module], ...]] = {
    "batch": (BatchNorm, nn.modules.batchnorm._BatchNorm),
    "all": (BatchNorm, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
}
"""Layers that FedBN keeps on each device, by its option ``norms``."""


def fedper(
    objective: Objective,
    *,
    private: str | list[str] | None = None,
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.0,
    clip: float | None = None,
) -> Algorithm:
    """Return FedPer: FedAvg for the base of the model, while its head stays on each device (Arivazhagan et al. 2019).

    With w the shared tensors and v_i the private ones of device i (Algorithms 1 and 2 of the paper)::

        (w_i, v_i) <- (w_i, v_i) - lr g(w_i, v_i; B)      (``steps`` times, from the round's w and the device's v_i);
        w <- mean w_i.

    A device begins its first round with the server's v, and each later round with its own, moving statistics included.
    The server never receives v_i: its model keeps the initial v, so its own evaluation says nothing about the devices'
    models.

    Args:
        objective: Model part that a tier trains, with its loss.
        private: Name of a module or tensor that stays on the device, such as ``head`` or ``block3.conv1``, or a list of
            them. None: the last unit that has parameters.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Default of ``hyper.lr``.
        momentum: Momentum of the local steps, with new buffers in each round.
        clip: Norm over all tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range, ``private`` names nothing that is trained, or nothing would be shared.
    """
    algorithm = _local_sgd("fedper", objective, batch, steps, lr, momentum, clip=clip)
    return keep_private(algorithm, objective, _named_tensors("fedper", objective, private))


def fedrep(
    objective: Objective,
    *,
    private: str | list[str] | None = None,
    batch: int = 32,
    head_steps: int = 10,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.0,
    clip: float | None = None,
) -> Algorithm:
    """Return FedRep: each device fits its own head to the shared body, then the body to that head (Collins et al. 2021).

    With w the shared tensors and v_i the private ones of device i (Algorithm 1 of the paper, one step size for both)::

        v_i <- v_i - lr g_v(w, v_i; B)        (``head_steps`` times, w fixed);
        w_i <- w_i - lr g_w(w_i, v_i; B)      (``steps`` times from the round's w, v_i fixed);
        w <- mean w_i.

    Moving statistics belong to the part that their layer is in, and move with it. A device begins its first round with the
    server's v, and each later round with its own, as in :func:`fedper`.

    Args:
        objective: Model part that a tier trains, with its loss.
        private: Head: name of a module or tensor, or a list of them. None: the last unit that has parameters.
        batch: Samples per local step.
        head_steps: Local steps of the head per round.
        steps: Local steps of the body per round, which follow. The paper's Algorithm 1 has one.
        lr: Default of ``hyper.lr``.
        momentum: Momentum of the local steps, with new buffers in each round.
        clip: Norm over the moving tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range, ``private`` names nothing that is trained, or nothing would be shared.
    """
    check_not_negative("algorithm 'fedrep'", head_steps=head_steps)
    head = _named_tensors("fedrep", objective, private)
    algorithm = _local_sgd("fedrep", objective, batch, steps, lr, momentum, clip=clip)
    parts = {"head": (head, head_steps), "body": (frozenset(objective.weights) - head, steps)}
    phases = tuple(
        Phase(name, sgd_step(objective, batch, momentum=momentum, clip=clip, phase=name, part=part), count)
        for name, (part, count) in parts.items()
    )
    return keep_private(replace(algorithm, phases=phases), objective, head)


def fedbn(
    objective: Objective,
    *,
    norms: Norms = "batch",
    batch: int = 32,
    steps: int = 10,
    lr: float = 0.05,
    momentum: float = 0.0,
    clip: float | None = None,
) -> Algorithm:
    """Return FedBN: FedAvg without the batch norms, whose parameters and statistics stay on each device (Li et al. 2021).

    It is :func:`fedper` with the tensors of all batch norms as v_i (Algorithm 1 of the paper).

    Args:
        objective: Objective of a model with batch norm.
        norms: "batch": batch norms, torch's and those of this package. "all": also instance, group, layer and RMS
            norms.
        batch: Samples per local step.
        steps: Local steps per round.
        lr: Default of ``hyper.lr``.
        momentum: Momentum of the local steps, with new buffers in each round.
        clip: Norm over all tensors to which g is scaled down. None: no limit.

    Raises:
        ConfigError: A number is out of range, or the trained units (stages of the model) have no such norm.
    """
    kinds = _NORMS[norms]
    layers = [path for path, layer in objective.suffix.named_modules() if isinstance(layer, kinds)]
    private = frozenset(name for name in objective.weights if _is_within(name, layers))
    if not private:
        raise ConfigError(
            f"algorithm 'fedbn' keeps the {'batch norms' if norms == 'batch' else 'norms'} of a model on each device, and "
            "the trained units have none with parameters or statistics: "
            + ("set norms to 'all', " if norms == "batch" else "")
            + "let the tier train those that the model has, or choose fedper, whose option private names any layers",
            algorithm="fedbn",
            norms=norms,
        )
    algorithm = _local_sgd("fedbn", objective, batch, steps, lr, momentum, clip=clip)
    return keep_private(algorithm, objective, private)


def keep_private(algorithm: Algorithm, objective: Objective, private: frozenset[str]) -> Algorithm:
    """Return ``algorithm`` with the tensors ``private`` on the device instead of in the update.

    Args:
        algorithm: Algorithm of one exchange (round trip between server and device) whose ``start`` returns and
            ``finish`` reads ``state.weights.*``.
        objective: Model part that a tier trains, with its loss.
        private: Names of trained tensors and their moving statistics.

    Raises:
        ConfigError: All tensors would be private, or the submodel sends single entries of them.
    """
    what = f"algorithm {algorithm.name!r}"
    sent = objective.carrier.update.keys()
    if not private <= sent:
        raise ConfigError(
            f"{what} keeps whole tensors on each device, and this submodel holds single entries of them; choose another "
            "algorithm, or a kind of whole tensors: output_side or width without rolling",
            algorithm=algorithm.name,
        )
    if private >= sent:
        raise ConfigError(
            f"{what} would keep all {len(sent)} tensors on each device and share none; make fewer of them private, or "
            "choose the algorithm local",
            algorithm=algorithm.name,
        )

    def start(tensors: Tensors) -> Tensors:
        return restore_private(tensors, algorithm.start(tensors))

    def finish(tensors: Tensors) -> Tensors:
        out = algorithm.finish(tensors)
        shared = {name: out[name] for name in out if name.removeprefix("update.") not in private}
        return shared | store_private(objective, private, tensors)

    return replace(
        algorithm,
        start=Function("start", start, {**algorithm.start.inputs, **private_ports(objective, private)}),
        finish=Function("finish", finish, algorithm.finish.inputs),
        carry_rule=CarryRule(any_tier=True),
        private=private,
    )


def _local_sgd(
    name: str, objective: Objective, batch: int, steps: int, lr: float, momentum: float, *, clip: float | None
) -> Algorithm:
    """Return :func:`edgefl.algorithms.baselines.sgd.sgd` without weight decay, under the algorithm name ``name``.

    Raises ConfigError if a number is out of range.
    """
    what = f"algorithm {name!r}"
    check_counts(what, batch=batch)
    check_not_negative(what, steps=steps, lr=lr)
    check_below_one(what, momentum=momentum)
    algorithm = sgd(
        objective, batch=batch, steps=steps, lr=lr, momentum=momentum, weight_decay=0.0, clip=clip
    )
    return replace(algorithm, name=name)


def _named_tensors(algorithm: str, objective: Objective, private: str | list[str] | None) -> frozenset[str]:
    """Return the names of the tensors in the modules ``private``; by default those of the last unit (stage of the
    model) with parameters.

    Raises ConfigError, with the name of ``algorithm``, if one of ``private`` is no module or tensor that the tier trains.
    """
    units = [name for name, unit in objective.suffix.named_children() if any(True for _ in unit.parameters())]
    wanted = units[-1:] if private is None else [private] if isinstance(private, str) else private
    found = {each: {name for name in objective.weights if _is_within(name, [each])} for each in wanted}
    missing = next((each for each in wanted if not found[each]), None)
    if missing is not None or not found:
        raise ConfigError(
            f"algorithm {algorithm!r}: private is {private!r}, and this tier trains "
            + ("nothing of that" if missing is None else f"no module or tensor {missing!r}")
            + f"; name units that every tier trains ({', '.join(units)} here), modules in them, or tensors, or choose "
            "a tier that trains more",
            algorithm=algorithm,
            private=private,
        )
    return frozenset[str]().union(*found.values())


def _is_within(name: str, paths: list[str]) -> bool:
    """Return True if the tensor ``name`` is one of ``paths``, or lies in one of these modules."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)
