"""The operators of :mod:`edgefl.models.layers.cells` with their gradients.

The gradient of a recurrent weight is one product over all steps, outside the recurrence. These are autograd
functions, not ``torch.library`` formulas, because only the former work under ``torch.func``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgefl.models.layers import cells
from edgefl.wire.errors import ModelError


def lstm(
    x: Tensor, kernel: Tensor, recurrent: Tensor, bias: Tensor, h: Tensor, c: Tensor, *, reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (T, B, H) and last h and c (B, H) of an LSTM layer: :func:`edgefl.models.layers.cells.lstm_cells`."""
    states, h, c, *_ = _Lstm.apply(x, kernel, recurrent, bias, h, c, reverse)  # type: ignore[no-untyped-call]
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
    states, h, *_ = _Gru.apply(x, kernel, recurrent, outer, inner, h, reverse)  # type: ignore[no-untyped-call]
    return states, h


class _Lstm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> cells.LstmResult:
        result: cells.LstmResult = cells.lstm_cells(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: cells.LstmResult) -> None:
        x, kernel, recurrent, _bias, h, _c, ctx.reverse = inputs
        ctx.mark_non_differentiable(*output[3:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, kernel, recurrent, h, output[0], *output[3:])

    @staticmethod
    def backward(ctx: Any, d_states: Tensor | None, d_h: Tensor | None, d_c: Tensor | None, *_: None) -> Any:
        x, kernel, recurrent, h, states, *saved = ctx.saved_tensors
        d_h, d_c = (torch.zeros_like(h) if d is None else d for d in (d_h, d_c))
        d_gates, d_h, d_c = _LstmBackward.apply(  # type: ignore[no-untyped-call]
            d_states, d_h, d_c, *saved, recurrent, ctx.reverse
        )
        return (
            d_gates @ kernel if ctx.needs_input_grad[0] else None,
            _over_steps(d_gates, x),
            _over_steps(d_gates, _shifted(states, h, ctx.reverse)),
            d_gates.sum((0, 1)),
            d_h,
            d_c,
            None,
        )


class _Gru(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> cells.GruResult:
        result: cells.GruResult = cells.gru_cells(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: cells.GruResult) -> None:
        x, kernel, recurrent, _outer, _inner, h, ctx.reverse = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, kernel, recurrent, h, output[0], *output[2:])

    @staticmethod
    def backward(ctx: Any, d_states: Tensor | None, d_h: Tensor | None, *_: None) -> Any:
        x, kernel, recurrent, h, states, *saved = ctx.saved_tensors
        d_h = torch.zeros_like(h) if d_h is None else d_h
        d_a, d_p, d_h = _GruBackward.apply(  # type: ignore[no-untyped-call]
            d_states, d_h, *saved, recurrent, ctx.reverse
        )
        return (
            d_a @ kernel if ctx.needs_input_grad[0] else None,
            _over_steps(d_a, x),
            _over_steps(d_p, _shifted(states, h, ctx.reverse)),
            d_a.sum((0, 1)),
            d_p.sum((0, 1)),
            d_h,
            None,
        )


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again, and says so."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Any:
        raise ModelError(
            "recurrent layers have first derivatives only; approximate a Hessian-vector product by a difference of "
            "two gradients, or freeze the layer"
        )


class _LstmBackward(_Once):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = cells.lstm_cells_backward(*args)
        return gradients


class _GruBackward(_Once):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = cells.gru_cells_backward(*args)
        return gradients


def _shifted(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """The state before each step, (T, B, H)."""
    first = first.unsqueeze(0)
    return torch.cat((states[1:], first)) if reverse else torch.cat((first, states[:-1]))


def _over_steps(d_product: Tensor, read: Tensor) -> Tensor:
    """The gradient of a weight: ``d_product[t]^T @ read[t]`` summed over steps, (T, B, G), (T, B, E) -> (G, E)."""
    return d_product.flatten(0, 1).t() @ read.flatten(0, 1)
