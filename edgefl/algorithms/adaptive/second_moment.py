"""Second moments v of which adaptive methods make their preconditioner A = sqrt(v) + rho (FAFED, fafed.md 2.3)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors
from edgefl.errors import ConfigError

SecondMoment = Literal["elementwise", "scalar", "scalar_mean", "adagrad_norm"]
"""With ||g|| over all d trained entries of a device::

    elementwise     v <- beta v + (1 - beta) g^2           for each entry
    scalar          v <- beta v + (1 - beta) ||g||^2
    scalar_mean     v <- beta v + (1 - beta) ||g||^2 / d
    adagrad_norm    v <- v + ||g||^2                       (beta has no part in it)

The last three have one number for the whole model. ``scalar`` and ``adagrad_norm`` measure a step against the whole
gradient, so they take a step size about sqrt(d) times that of ``elementwise``; ``scalar_mean`` takes the same.

One number is kept as v of every entry all the same: graphs, server and averages are then those of ``elementwise``, and the
mean over devices is right entry by entry even where they train parts of different size.
"""


def known(what: str, value: str) -> None:
    """ConfigError unless there is such a second moment."""
    if value not in get_args(SecondMoment):
        raise ConfigError(
            f"{what}: second_moment is {value!r}; set it to one of {', '.join(get_args(SecondMoment))}",
            value=value,
        )


def fresh(kind: SecondMoment, grads: Tensors) -> Tensors:
    """What one gradient adds to v, in the shape of each tensor: its squares, or what they sum up to."""
    squares = {name: grad.square() for name, grad in grads.items()}
    if kind == "elementwise":
        return squares
    total = torch.stack([square.sum() for square in squares.values()]).sum()
    if kind == "scalar_mean":
        total = total / sum(square.numel() for square in squares.values())
    return {name: total + torch.zeros_like(square) for name, square in squares.items()}


def updated(kind: SecondMoment, v: Tensors, grads: Tensors, beta: Tensor) -> Tensors:
    """v after a gradient."""
    new = fresh(kind, grads)
    if kind == "adagrad_norm":
        return {name: v[name] + new[name] for name in new}
    return {name: beta * v[name] + (1 - beta) * new[name] for name in new}
