"""What a server makes of the averages of an exchange, and how its state is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from edgefl.contract.tensors import Tensors

_Value = TypeVar("_Value")
Scalars = Mapping[str, float]


def _mean(_before: Tensors, _mean: Tensors, _hyper: Scalars) -> Tensors:
    return {}


def _as_sent(update: Tensors) -> Tensors:
    return update


@dataclass(frozen=True)
class ServerOpt:
    """What the server makes of the averages of an exchange (ServerOpt of Reddi et al. 2021).

    ``state``: what it keeps beside the weights, by name, with the value that its entries begin with; there is one tensor
    for each trainable parameter of the model, of its shape. ``step(before, mean, hyper)`` gets the weights and the state
    as the exchange began with them, the same tensors with the mean wherever devices sent something and the old value
    elsewhere, and the exchange's scalars, to which the server adds ``share``, the part of all devices that reported. It
    returns the tensors that become something else than that mean. ``unfold(update)`` gives what is averaged in place of
    one update (the squares of what was sent, for example), by the same names. All are pure functions of named tensors.
    ``options`` names those of the program that the server alone reads.
    """

    name: str = "mean"
    state: Mapping[str, float] = field(default_factory=dict)
    step: Callable[[Tensors, Tensors, Scalars], Tensors] = _mean
    unfold: Callable[[Tensors], Tensors] = _as_sent
    options: frozenset[str] = frozenset()


MEAN = ServerOpt()
"""FedAvg's: the mean is the new model."""


def beside(state: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    """``{"conv.weight": x}`` as the server's state has it: ``{"m/conv.weight": x}``."""
    return {f"{state}/{name}": value for name, value in named.items()}


def state_of(tensors: Mapping[str, Tensor], state: str) -> Tensors:
    """The inverse of :func:`beside`: the tensors of one state, by the name of their parameter."""
    return {
        name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{state}/")
    }
