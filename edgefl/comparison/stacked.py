"""Stacked recurrent layers of torch, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from edgefl.models.torch_functions.random_ops import Draw, dropped

LAYERS: Mapping[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}
"""Functions of torch by name."""


def layer_by_layer(layer: Callable[..., Any], draw: Draw, *args: Any) -> Any:
    """Run stacked recurrent layers of torch with dropout between them by ``draw``; NotImplemented without dropout."""
    packed = (
        isinstance(args[1], Tensor)
        and args[1].dim() == 1
        and len(args) == 9
        and not isinstance(args[2], bool)
    )
    packed = packed and isinstance(args[3], list | tuple)
    if packed:
        data, batch_sizes, state, weights, biases, layers, rate, training, both = args
        lead: tuple[Any, ...] = (batch_sizes,)
        last: tuple[Any, ...] = ()
    else:
        data, state, weights, biases, layers, rate, training, both, batch_first = args
        data, lead, last = data.transpose(0, 1) if batch_first else data, (), (False,)
    if not training or not rate or layers == 1:
        return NotImplemented
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    ends = 2 if both else 1
    count = len(weights) // layers
    finals: list[tuple[Tensor, ...]] = []
    for number in range(layers):
        data = dropped(draw, data, rate) if number else data
        own = weights[number * count : (number + 1) * count]
        first = tuple(each[number * ends : (number + 1) * ends] for each in states)
        given = first[0] if isinstance(state, Tensor) else first
        data, *final = layer(data, *lead, given, own, biases, 1, 0.0, training, both, *last)
        finals.append(tuple(final))
    out = data.transpose(0, 1) if not packed and batch_first else data
    return out, *(torch.cat(each) for each in zip(*finals, strict=True))
