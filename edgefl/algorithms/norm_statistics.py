"""Statistics of batch norm for one submodel size: measured on devices in one pass, and read by their evaluation.

The input of a norm layer depends on the channels in front of it, so each submodel size needs statistics of its own. A
device passes once over its training rows. Each layer normalises by its batch, as in training, and the moments of its input
are summed up. The server adds the sums of all devices of a tier; these give the mean and variance of all their rows
(HeteroFL's static batch norm).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from edgefl.algorithms.statistics import counted_rows
from edgefl.contract.algorithm import Algorithm, CarryRule, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.objective.parts import restore_private
from edgefl.submodels.statistics import MomentsMode
from edgefl.wire.norm_statistics import NORM_BITS, NORM_LIMIT, NORMS, ROWS


def reads_statistics(function: Function, names: Collection[str], unit: str) -> Function:
    """Return ``function`` with batch-norm statistics read from ``weights.<unit>.<name>`` instead of ``weights.<name>``.

    Args:
        function: Function with inputs ``weights.<name>``.
        names: Names of statistics, such as ``body.bn.running_mean``. Names that are no inputs of ``function`` are
            ignored.
        unit: Name under which the server publishes the statistics, such as ``norms/weak``.
    """
    renamed = {f"weights.{name}": f"weights.{unit}.{name}" for name in names}
    original = {new: old for old, new in renamed.items()}

    def fn(tensors: Tensors) -> Tensors:
        return function.fn({original.get(name, name): tensor for name, tensor in tensors.items()})

    inputs = {renamed.get(name, name): spec for name, spec in function.inputs.items()}
    return replace(function, fn=fn, inputs=inputs)


def norm_statistics(algorithm: Algorithm, variances: Mapping[str, str]) -> Algorithm:
    """Return the exchange (round trip between server and device) in which a device measures statistics of batch norm
    of the model of ``algorithm``.

    ``start`` keeps the weights, each step adds the moments of one batch, and ``finish`` returns ``update.<name>``
    int64 in fixed point, per channel: for a mean the mean over all rows, for a variance the standard deviation. A
    deviation has half the digits of a variance, so features of any usual scale fit. ``update.rows`` is the number of
    rows. Rows that only fill up the last batch are left out. Private tensors come from the carry, as in the
    evaluation.

    Args:
        algorithm: Training of the submodel, whose function ``evaluate`` runs it forward.
        variances: For each variance, by its name, the name of its mean. Both are inputs ``weights.<name>`` of
            ``evaluate``. Their received values are not used.
    """
    names = (*variances.values(), *variances)
    evaluate = algorithm.evaluate
    unread = {f"weights.{name}": evaluate.inputs[f"weights.{name}"] for name in names}
    read = {
        name: spec
        for name, spec in evaluate.inputs.items()
        if names and name.startswith("weights.") and name not in unread
    }
    batch = {name: spec for name, spec in evaluate.inputs.items() if name.startswith("batch.0.")}
    sums = {name: TensorSpec(evaluate.inputs[f"weights.{name}"].shape, torch.float64) for name in names}
    sums[ROWS] = TensorSpec((), torch.float64)
    kept = {name: spec for name, spec in algorithm.start.inputs.items() if name.startswith("carry.")}
    private = kept if algorithm.private and read else {}
    held, totals = prefixed("state", read), prefixed("state.sum", sums)

    def start(tensors: Tensors) -> Tensors:
        zeros = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in sums.items()}
        state = prefixed("state.weights", select(tensors, "weights"))
        return (restore_private(tensors, state) if private else state) | prefixed("state.sum", zeros)

    def step(tensors: Tensors) -> Tensors:
        any_values = {name: torch.ones(spec.shape, dtype=spec.dtype) for name, spec in unread.items()}
        inputs = prefixed("weights", select(tensors, "state.weights")) | any_values
        mask = tensors["batch.0.mask"]
        moments = MomentsMode(select(any_values, "weights"), mask)
        if names:  # a tier without norm layers of its own counts its rows only
            with moments:
                evaluate.fn(inputs | {name: tensors[name] for name in batch})
        found = {**moments.sums, ROWS: counted_rows(tensors).sum()}
        total = select(tensors, "state.sum")
        return prefixed("state.sum", {name: total[name] + found[name].double() for name in total})

    def finish(tensors: Tensors) -> Tensors:
        total, found, most = select(tensors, "state.sum"), dict[str, torch.Tensor](), float(NORM_LIMIT)
        whole, rows = {ROWS: total[ROWS].round().to(torch.int64)}, total[ROWS].clamp(min=1.0)
        for variance, mean in variances.items():
            found[mean] = total[mean] / rows
            found[variance] = (total[variance] / rows - found[mean].square()).clamp(min=0.0).sqrt()
        for name, value in found.items():
            scaled = value * 2.0**NORM_BITS
            finite = torch.nan_to_num(scaled, nan=most, posinf=most, neginf=-most)
            whole[name] = finite.clamp(-most, most).round().to(torch.int64)
        return prefixed("update", whole)

    add = Function("add_moments", step, held | totals | batch, evaluate.label_range)
    return Algorithm(
        name=algorithm.name,
        start=Function("start_statistics", start, read | private),
        phases=(Phase(NORMS, add, 0, over_data=True),),
        finish=Function("finish_statistics", finish, totals),
        evaluate=_count(batch),
        carry_rule=CarryRule(any_tier=algorithm.carry_rule.any_tier) if private else CarryRule(),
    )


def _count(batch: dict[str, TensorSpec]) -> Function:
    """Return a function that counts the rows of a batch.

    It fills the place of ``evaluate``, because this exchange (round trip between server and device) evaluates no model.
    """
    name = "batch.0.mask"
    return Function("count_rows", lambda tensors: {"metric.count": tensors[name].sum()}, {name: batch[name]})
