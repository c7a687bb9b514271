"""The paper's counts of a tier: parameters p, activations a and capacity C (embracingfl.md 2.8, 3.4), in elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.layers.recurrent import BiLstm, Stack
from edgefl.models.spec import ModelSpec, on_meta, run_units, without_values
from edgefl.models.torch_functions.recurrent import PaddedSequence
from edgefl.submodels.submodel import Submodel

LSTM_VALUES, GRU_VALUES = 10, 7
"""Values per hidden unit, direction and step. LSTM: 4 gate pre-activations, 4 gate outputs, cell and hidden."""
_ROWS = 2
_COUNTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.LSTM, nn.GRU, BiLstm, Stack)


@dataclass(frozen=True)
class TrainedPartCounts:
    """The paper's counts of a trained part: parameters ``p``, and activations ``a`` (:func:`activations`)."""

    p: int
    a: int

    @property
    def mem(self) -> int:
        """Memory 2p + 2a: parameters and gradients, activations and errors (embracingfl.md 2.8)."""
        return 2 * self.p + 2 * self.a


def count(module: nn.Sequential, sample: TensorSpec, batch: int) -> TrainedPartCounts:
    """Return the paper's counts of the trained part ``module`` for ``batch`` rows of ``sample``."""
    p = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return TrainedPartCounts(p, batch * activations(module, sample))


def activations(module: nn.Sequential, sample: TensorSpec) -> int:
    """Return the counted activations per sample: outputs of conv and dense layers, and 10 values per LSTM unit and step.

    GRUs have 7 values, by the same rule. Norms, activation functions, add, pooling, attention scores, embedding outputs, the
    input and single logits do not count.
    """
    total = 0

    def add(part: nn.Module, _args: tuple[Tensor, ...], out: Any) -> None:
        nonlocal total
        total += _count_values(part, out)

    counted = on_meta(module).eval()
    for part in counted.modules():
        if isinstance(part, _COUNTED):
            part.register_forward_hook(add)
    # The context restores the state of hooks that are not edgefl's at its end, so the total is read inside.
    with without_values(counted):
        run_units(counted, torch.empty((_ROWS, *sample.shape), dtype=sample.dtype, device="meta"))
        return total


def _count_values(part: nn.Module, out: Any) -> int:
    if isinstance(part, BiLstm):
        return LSTM_VALUES * part.hidden * len(part.directions) * part.steps
    if isinstance(part, Stack):
        states = out if isinstance(out, Tensor) else out[0]
        return (2 * part.kind.gates + part.kind.state_tensors) * part.layers * (states.numel() // _ROWS)
    if isinstance(part, nn.LSTM | nn.GRU):
        values = LSTM_VALUES if isinstance(part, nn.LSTM) else GRU_VALUES
        states = out[0].padded if isinstance(out[0], PaddedSequence) else out[0]
        return values * part.num_layers * (states.numel() // _ROWS)
    per_sample: int = out.numel() // out.shape[0]
    return 0 if isinstance(part, nn.Linear) and per_sample == 1 else per_sample


def full(spec: ModelSpec) -> TrainedPartCounts:
    """Return the paper's counts of the whole model, with its accounting batch."""
    return count(spec.module, spec.sample, spec.accounting_batch)


def tier(submodel: Submodel) -> TrainedPartCounts:
    """Return the paper's counts of a submodel, with the accounting batch of its model."""
    return count(submodel.suffix, submodel.boundary, submodel.spec.accounting_batch)


def capacity(submodel: Submodel) -> float:
    """Return the capacity of a tier, C = (2p + 2a) / (2 p_full + 2 a_full), in (0, 1] (embracingfl.md 2.8)."""
    return tier(submodel).mem / full(submodel.spec).mem


def average_capacity(capacities: dict[str, float], clients: dict[str, int]) -> float:
    """Return C_avg of a mix of clients. The paper averages capacities rounded to two decimals (embracingfl.md 3.4).

    Args:
        capacities: Capacity of each tier, by name.
        clients: Number of clients of each tier, by name.
    """
    total = sum(round(capacities[name], 2) * number for name, number in clients.items())
    return total / sum(clients.values())
