"""Evaluation on devices: one pass over a device's held-out rows, which reports integer sums and trains nothing."""

from __future__ import annotations

import torch

from edgefl.contract.algorithm import Algorithm, CarryRule, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.errors import ConfigError
from edgefl.objective.parts import restore_private
from edgefl.wire.metrics import REPORT_BITS, REPORT_LIMIT

EVALUATE = "evaluate"
"""Name of the exchange in files and messages."""


def evaluation(algorithm: Algorithm) -> Algorithm:
    """Return the exchange (round trip between server and device) in which a device evaluates the model of
    ``algorithm`` on its own rows.

    ``start`` keeps the weights, each step adds the sums of one batch (``algorithm.evaluate``), and ``finish`` returns
    ``update.<name>`` int64: each sum in fixed point (:data:`~edgefl.wire.metrics.REPORT_BITS`). Rows that only fill
    the last batch are masked. Sums are float64 until then, so counts are exact. Nothing is trained, and the carry of
    the training exchanges stays as it is. Private tensors come from the carry, so each device evaluates its own model.

    Raises:
        ConfigError: ``algorithm.evaluate`` reads more than weights and one batch, or sums up more than one number for
            each class.
    """
    evaluate = algorithm.evaluate
    read = {name: spec for name, spec in evaluate.inputs.items() if name.startswith("weights.")}
    batch = {name: spec for name, spec in evaluate.inputs.items() if name.startswith("batch.0.")}
    if others := sorted(evaluate.inputs.keys() - read.keys() - batch.keys()):
        raise ConfigError(
            f"algorithm {algorithm.name!r} cannot be evaluated on devices: its function evaluate reads {', '.join(others)}; "
            "let it read weights and batch.0 alone",
            algorithm=algorithm.name,
        )
    sums = _sum_specs(evaluate)
    kept = {name: spec for name, spec in algorithm.start.inputs.items() if name.startswith("carry.")}
    private = kept if algorithm.private else {}

    def start(tensors: Tensors) -> Tensors:
        zeros = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in sums.items()}
        state = prefixed("state.weights", select(tensors, "weights"))
        return (restore_private(tensors, state) if private else state) | prefixed("state.sum", zeros)

    def step(tensors: Tensors) -> Tensors:
        weights = prefixed("weights", select(tensors, "state.weights"))
        found = select(evaluate.fn(weights | {name: tensors[name] for name in batch}), "metric")
        total = select(tensors, "state.sum")
        return prefixed(
            "state.sum", {name: total[name] + found[name].to(total[name].dtype) for name in total}
        )

    def finish(tensors: Tensors) -> Tensors:
        whole = {}
        for name, total in select(tensors, "state.sum").items():
            scaled, most = total.double() * 2.0**REPORT_BITS, float(REPORT_LIMIT)
            finite = torch.nan_to_num(scaled, nan=most, posinf=most, neginf=-most)
            whole[name] = finite.clamp(-most, most).round().to(torch.int64)
        return prefixed("update", whole)

    held = prefixed("state", read)
    total_ports = prefixed("state.sum", sums)
    return Algorithm(
        name=algorithm.name,
        start=Function("start_evaluation", start, read | private),
        phases=(
            Phase(
                EVALUATE,
                Function("add_batch", step, held | total_ports | batch, evaluate.label_range),
                0,
                over_data=True,
            ),
        ),
        finish=Function("finish_evaluation", finish, total_ports),
        evaluate=evaluate,
        carry_rule=CarryRule(any_tier=algorithm.carry_rule.any_tier) if private else CarryRule(),
    )


def _sum_specs(evaluate: Function) -> dict[str, TensorSpec]:
    """Return shape and dtype of each sum of ``evaluate``, by name without its role.

    Raises:
        ConfigError: A sum has more than one dimension.
    """
    outputs = select(evaluate(evaluate.example(0)), "metric")
    if wide := [name for name, tensor in outputs.items() if tensor.dim() > 1]:
        raise ConfigError(
            f"the loss sums up {', '.join(wide)} by more than one dimension, and devices report scalars or one number for "
            "each class: add the others up",
            sums=wide,
        )
    return {name: TensorSpec(tuple(tensor.shape), torch.float64) for name, tensor in outputs.items()}
