"""The operators of :mod:`edgefl.models.layers.cells` with their gradients.

The gradient of a recurrent weight is one product over all steps, outside the recurrence. These are autograd
functions, not ``torch.library`` formulas, because only the former work under ``torch.func``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgefl.errors import ModelError
from edgefl.models.layers import cells


def lstm(
    x: Tensor, kernel: Tensor, recurrent: Tensor, bias: Tensor, h: Tensor, c: Tensor, *, reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (T, B, H) and last h and c (B, H) of an LSTM layer: :func:`edgefl.models.layers.cells.lstm_cells`."""
    states, h, c, *_ = _Cells.apply(_LSTM, x, kernel, recurrent, bias, h, c, reverse)  # type: ignore[no-untyped-call]
    return states, h, c


def gru(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    outer: Tensor,
    inner: Tensor,
    h: Tensor,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Hidden states (T, B, H) and the last one (B, H) of a GRU layer: :func:`edgefl.models.layers.cells.gru_cells`."""
    states, h, *_ = _Cells.apply(_GRU, x, kernel, recurrent, outer, inner, h, reverse)  # type: ignore[no-untyped-call]
    return states, h


# A layer of either kind by the number of its products of weights and step, each of which has a bias. Its state has the
# tensors that are missing to three.
_LSTM, _GRU = 1, 2
_FORWARD = {_LSTM: cells.lstm_cells, _GRU: cells.gru_cells}
_BACK = {_LSTM: cells.lstm_cells_backward, _GRU: cells.gru_cells_backward}


class _Cells(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(products: int, *args: Any) -> tuple[Tensor, ...]:
        return tuple(_FORWARD[products](*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.products, x, kernel, recurrent, *others, ctx.reverse = inputs
        h, saved = others[ctx.products], output[4 - ctx.products :]
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, kernel, recurrent, h, output[0], *saved)

    @staticmethod
    def backward(ctx: Any, d_states: Tensor | None, *d_others: Tensor | None) -> Any:
        x, kernel, recurrent, h, states, *saved = ctx.saved_tensors
        count = ctx.products
        d_last = [torch.zeros_like(h) if d is None else d for d in d_others[: 3 - count]]
        gradients = _Back.apply(  # type: ignore[no-untyped-call]
            count, d_states, *d_last, *saved, recurrent, ctx.reverse
        )
        products, d_first = gradients[:count], gradients[count:]
        return (
            None,
            products[0] @ kernel if ctx.needs_input_grad[1] else None,
            _over_steps(products[0], x),
            _over_steps(products[-1], _shifted(states, h, ctx.reverse)),
            *(product.sum((0, 1)) for product in products),
            *d_first,
            None,
        )


class _Back(torch.autograd.Function):
    """A gradient that cannot be differentiated again, and says so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(products: int, *args: Any) -> tuple[Tensor, ...]:
        return tuple(_BACK[products](*args))

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:
        raise ModelError(
            "recurrent layers have first derivatives only; approximate a Hessian-vector product by a difference of "
            "two gradients, or freeze the layer"
        )


def _shifted(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """The state before each step, (T, B, H)."""
    first = first.unsqueeze(0)
    return torch.cat((states[1:], first)) if reverse else torch.cat((first, states[:-1]))


def _over_steps(d_product: Tensor, read: Tensor) -> Tensor:
    """The gradient of a weight: ``d_product[t]^T @ read[t]`` summed over steps, (T, B, G), (T, B, E) -> (G, E)."""
    return d_product.flatten(0, 1).t() @ read.flatten(0, 1)
