"""LSTM and GRU layers as operators: one node of a graph each, whatever the length of the sequence.

An operator contains only the steps and the product with the inputs. The gradient of a recurrent weight is one product
over all steps, outside of the recurrence. Gradients are defined by :func:`lstm` and :func:`gru`, which are autograd
functions, because ``torch.library`` formulas do not work under ``torch.func``. Exporters turn each operator into one
ONNX Scan (:mod:`edgefl_export.decompositions.recurrent`).

Arguments and results have sequences of shape (T, B, features). Inside, a step is (features, B), so that a gate is a
contiguous block and a product reads the weight in its own layout. With ``reverse`` the steps run from the last position
to the first. Each result has the position of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl.errors import ModelError

LstmResult = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
GruResult = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Gradient = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("edgefl::lstm_cells", mutates_args=())
def lstm_cells(
    x: Tensor, kernel: Tensor, recurrent: Tensor, bias: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> LstmResult:
    """Run T steps of an LSTM, as one operator.

    p = kernel @ x[t] + bias + recurrent @ h consists of the gates i, f, g, o in this order. Then::

        c' = sigmoid(f) * c + sigmoid(i) * tanh(g);    h' = sigmoid(o) * tanh(c').

    Args:
        x: Sequence (T, B, E).
        kernel: Input weights (4H, E).
        recurrent: Recurrent weights (4H, H).
        bias: Bias (4H).
        h: Initial hidden state (B, H).
        c: Initial cell state (B, H).
        reverse: Run from the last position to the first.

    Returns:
        (hidden states (T, B, H), last h (B, H), last c (B, H), i, f, g, o, before, squashed). The last six are for the
        backward pass, each (T, H, B): the activated gates, the cell state before each step, and tanh of the one after
        it.
    """
    projected, hidden = _project(x, kernel, bias), h.shape[1]
    states, i_, f_, g_, o_, before, squashed = _sequences(x, h, 6)
    h, c = h.t(), c.t()
    for t in _order(x, reverse):
        p = torch.addmm(projected[:, t], recurrent, h)
        i = torch.sigmoid(p[:hidden], out=i_[t])
        f = torch.sigmoid(p[hidden : 2 * hidden], out=f_[t])
        g = torch.tanh(p[2 * hidden : 3 * hidden], out=g_[t])
        o = torch.sigmoid(p[3 * hidden :], out=o_[t])
        before[t] = c
        c = torch.addcmul(f * c, i, g)
        h = o * torch.tanh(c, out=squashed[t])
        states[t] = h.t()
    return states, h.t().contiguous(), c.t().contiguous(), i_, f_, g_, o_, before, squashed


@torch.library.custom_op(
    "edgefl::lstm_cells_backward",
    mutates_args=(),
    schema="(Tensor? d_states, Tensor d_h, Tensor d_c, Tensor i, Tensor f, Tensor g, Tensor o, Tensor before, "
    "Tensor squashed, Tensor recurrent, bool reverse) -> (Tensor, Tensor, Tensor)",
)
def lstm_cells_backward(d_states: Tensor | None, d_h: Tensor, d_c: Tensor, *saved: Any) -> Gradient:
    """Return the gradients of :func:`lstm_cells`: of every p (T, B, 4H), of the initial h (B, H) and of the initial c
    (B, H).

    With dh = d_states[t] + (gradient from the step after), s = ``squashed`` and c = ``before``::

        dc += dh * o * (1 - s^2);
        di = dc * g * i * (1 - i);  df = dc * c * f * (1 - f);  dg = dc * i * (1 - g^2);  do = dh * s * o * (1 - o);
        dh <- recurrent^T @ [di, df, dg, do],    dc <- dc * f

    Args:
        d_states: Gradient of the hidden states (T, B, H). None: zero.
        d_h: Gradient of the last h (B, H).
        d_c: Gradient of the last c (B, H).
        *saved: Saved gates i, f, g and o, cell state before each step, and tanh of the one after it, each (T, H, B);
            recurrent weights (4H, H); value of ``reverse`` in the forward pass.
    """
    i, f, g, o, before, squashed, recurrent, reverse = saved
    steps, hidden, batch = i.shape
    d_gates, d_p = i.new_empty(steps, batch, 4 * hidden), i.new_empty(4 * hidden, batch)
    di, df, dg, do = d_p.chunk(4)
    transposed, d_h, d_c = recurrent.t().contiguous(), d_h.t(), d_c.t()
    for t in _order(i, not reverse):
        dh = d_h if d_states is None else d_states[t].t() + d_h
        through = dh * o[t]
        output = through * squashed[t]
        dc = torch.addcmul(d_c + through, output, squashed[t], value=-1)
        to_g = dc * i[t]
        to_i = to_g * g[t]
        d_c = dc * f[t]
        to_f = d_c * before[t]
        torch.addcmul(to_i, to_i, i[t], value=-1, out=di)
        torch.addcmul(to_f, to_f, f[t], value=-1, out=df)
        torch.addcmul(to_g, to_i, g[t], value=-1, out=dg)
        torch.addcmul(output, output, o[t], value=-1, out=do)
        d_gates[t] = d_p.t()
        d_h = transposed @ d_p
    return d_gates, d_h.t().contiguous(), d_c.t().contiguous()


@torch.library.custom_op("edgefl::gru_cells", mutates_args=())
def gru_cells(
    x: Tensor, kernel: Tensor, recurrent: Tensor, outer: Tensor, inner: Tensor, h: Tensor, reverse: bool
) -> GruResult:
    """Run T steps of a GRU, as one operator.

    a = kernel @ x[t] + outer and p = recurrent @ h + inner each consist of the blocks r, z, n. Then::

        r = sigmoid(a_r + p_r);  z = sigmoid(a_z + p_z);  n = tanh(a_n + r * p_n);    h' = n + z * (h - n).

    Args:
        x: Sequence (T, B, E).
        kernel: Input weights (3H, E).
        recurrent: Recurrent weights (3H, H).
        outer: Bias of the input product (3H).
        inner: Bias of the recurrent product (3H).
        h: Initial hidden state (B, H).
        reverse: Run from the last position to the first.

    Returns:
        (hidden states (T, B, H), last h (B, H), r, z, n, p_n, h - n). The last five are for the backward pass, each
        (T, H, B).
    """
    projected, hidden = _project(x, kernel, outer), h.shape[1]
    states, r, z, n, p_n, away = _sequences(x, h, 5)
    h, column = h.t(), inner.unsqueeze(1)
    for t in _order(x, reverse):
        a, p = projected[:, t], torch.addmm(column, recurrent, h)
        torch.sigmoid(a[:hidden] + p[:hidden], out=r[t])
        torch.sigmoid(a[hidden : 2 * hidden] + p[hidden : 2 * hidden], out=z[t])
        p_n[t] = p[2 * hidden :]
        torch.tanh(torch.addcmul(a[2 * hidden :], r[t], p_n[t]), out=n[t])
        h = torch.addcmul(n[t], z[t], torch.sub(h, n[t], out=away[t]))
        states[t] = h.t()
    return states, h.t().contiguous(), r, z, n, p_n, away


@torch.library.custom_op("edgefl::gru_cells_backward", mutates_args=())
def gru_cells_backward(
    d_states: Tensor | None,
    d_h: Tensor,
    r: Tensor,
    z: Tensor,
    n: Tensor,
    p_n: Tensor,
    away: Tensor,
    recurrent: Tensor,
    reverse: bool,
) -> Gradient:
    """Return the gradients of :func:`gru_cells`: of every a (T, B, 3H), of every p (T, B, 3H), and of the initial h
    (B, H).

    With dh = d_states[t] + (gradient from the step after) and h - n = ``away``::

        dn = dh * (1 - z) * (1 - n^2);  dz = dh * (h - n) * z * (1 - z);  dr = dn * p_n * r * (1 - r);
        da = [dr, dz, dn],  dp = [dr, dz, dn * r],    dh <- recurrent^T @ dp + dh * z

    Args:
        d_states: Gradient of the hidden states (T, B, H). None: zero.
        d_h: Gradient of the last hidden state (B, H).
        r: Saved r of each step (T, H, B).
        z: Saved z of each step (T, H, B).
        n: Saved n of each step (T, H, B).
        p_n: Saved p_n of each step (T, H, B).
        away: Saved h - n of each step (T, H, B).
        recurrent: Recurrent weights (3H, H).
        reverse: Value of ``reverse`` in the forward pass.
    """
    steps, hidden, batch = r.shape
    d_a, d_p = (r.new_empty(steps, batch, 3 * hidden) for _ in range(2))
    transposed, d_h = recurrent.t().contiguous(), d_h.t()
    for t in _order(r, not reverse):
        dh = d_h if d_states is None else d_states[t].t() + d_h
        to_h = dh * z[t]
        new = dh - to_h
        to_z = to_h * away[t]
        dn = torch.addcmul(new, new * n[t], n[t], value=-1)
        inner = dn * r[t]
        to_r = inner * p_n[t]
        dr, dz = to_r - to_r * r[t], to_z - to_z * z[t]
        step = torch.cat((dr, dz, inner))
        d_a[t], d_p[t] = torch.cat((dr, dz, dn)).t(), step.t()
        d_h = torch.addmm(to_h, transposed, step)
    return d_a, d_p, d_h.t().contiguous()


def _project(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Return ``kernel @ x[t] + bias`` for all steps t, computed as one product.

    The result is (G, T, B), for ``x`` (T, B, E), ``kernel`` (G, E) and ``bias`` (G,).
    """
    steps, batch, features = x.shape
    rows = x.reshape(steps * batch, features)
    return torch.addmm(bias.unsqueeze(1), kernel, rows.t()).view(-1, steps, batch)


def _order(sequence: Tensor, reverse: bool) -> range:
    """Return the positions of ``sequence`` (T, ...) in the order in which the steps run: descending if ``reverse``."""
    steps = range(sequence.shape[0])
    return steps[::-1] if reverse else steps


def _sequences(x: Tensor, h: Tensor, saved: int) -> list[Tensor]:
    """Return uninitialized tensors: one (T, B, H) for the hidden states, then ``saved`` tensors of shape (T, H, B).

    ``x`` is the sequence (T, B, E), ``h`` a state (B, H).
    """
    batch, hidden = h.shape
    return [h.new_empty(x.shape[0], batch, hidden)] + [
        h.new_empty(x.shape[0], hidden, batch) for _ in range(saved)
    ]


# Results without values, for tracing and the meta device. An LSTM has one product of weights and step, a GRU two.

Shapes = Callable[..., tuple[Tensor, ...]]


def _results(products: int) -> Shapes:
    """Return a function that makes the results of a forward operator without values, for tracing and the meta device.

    Args:
        products: Number of products of weights in a step: 1 for an LSTM, 2 for a GRU.
    """

    def shapes(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        first = others[-2]
        states, *saved = _sequences(x, first, 7 - products)
        return states, *(first.new_empty(first.shape) for _ in range(3 - products)), *saved

    return shapes


def _gradients(products: int) -> Shapes:
    """Return a function that makes the results of a backward operator without values, for tracing and the meta device.

    Args:
        products: Number of products of weights in a step: 1 for an LSTM, 2 for a GRU.
    """

    def shapes(*args: Any) -> tuple[Tensor, ...]:
        saved, recurrent, _ = args[-3:]
        steps, hidden, batch = saved.shape
        gates = [saved.new_empty(steps, batch, len(recurrent)) for _ in range(products)]
        return *gates, *(saved.new_empty(batch, hidden) for _ in range(3 - products))

    return shapes


# Under vmap, one client after the other: each has weights of its own, so a batch would save nothing.


def _one_by_one(operator: Callable[..., Sequence[Tensor]]) -> Callable[..., Any]:
    """Return the vmap rule of an operator. It runs the operator once for each entry of the mapped dimension.

    The rule stacks the results along dimension 0.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        results = [
            operator(*(a if d is None else a.select(d, k) for a, d in zip(args, in_dims, strict=True)))
            for k in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


for _forward, _backward, _products in (
    (lstm_cells, lstm_cells_backward, 1),
    (gru_cells, gru_cells_backward, 2),
):
    _forward.register_fake(_results(_products))
    _backward.register_fake(_gradients(_products))
    for _operator in (_forward, _backward):
        _operator.register_vmap(_one_by_one(_operator))


def lstm(
    x: Tensor, kernel: Tensor, recurrent: Tensor, bias: Tensor, h: Tensor, c: Tensor, *, reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a differentiable LSTM layer, with the arguments of :func:`lstm_cells`.

    Returns:
        (hidden states (T, B, H), last h (B, H), last c (B, H)).
    """
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
    """Run a differentiable GRU layer, with the arguments of :func:`gru_cells`.

    Returns:
        (hidden states (T, B, H), last hidden state (B, H)).
    """
    states, h, *_ = _Cells.apply(_GRU, x, kernel, recurrent, outer, inner, h, reverse)  # type: ignore[no-untyped-call]
    return states, h


# Kinds of layers by the number of products of weights and step, each with a bias; products and state tensors are three.
_LSTM, _GRU = 1, 2
_FORWARD = {_LSTM: lstm_cells, _GRU: gru_cells}
_BACK = {_LSTM: lstm_cells_backward, _GRU: gru_cells_backward}


class _Cells(torch.autograd.Function):
    """Autograd function of an LSTM (``products`` 1) or GRU (``products`` 2) layer."""

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
        gradients = _CellsBackward.apply(  # type: ignore[no-untyped-call]
            count, d_states, *d_last, *saved, recurrent, ctx.reverse
        )
        products, d_first = gradients[:count], gradients[count:]
        return (
            None,
            products[0] @ kernel if ctx.needs_input_grad[1] else None,
            _sum_over_steps(products[0], x),
            _sum_over_steps(products[-1], _shift_states(states, h, ctx.reverse)),
            *(product.sum((0, 1)) for product in products),
            *d_first,
            None,
        )


class _CellsBackward(torch.autograd.Function):
    """Backward pass of :class:`_Cells`. Differentiating it raises ModelError."""

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


def _shift_states(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Return the hidden state before each step, (T, B, H).

    Args:
        states: Hidden state after each step (T, B, H).
        first: Initial state (B, H).
        reverse: True if the steps ran from the last position to the first.
    """
    first = first.unsqueeze(0)
    return torch.cat((states[1:], first)) if reverse else torch.cat((first, states[:-1]))


def _sum_over_steps(d_product: Tensor, read: Tensor) -> Tensor:
    """Return the gradient of a weight (G, E): the sum over all steps and samples of ``d_product[t]^T @ read[t]``.

    Args:
        d_product: Gradient of the product with the weight (T, B, G).
        read: Factor that the weight was multiplied with (T, B, E).
    """
    return d_product.flatten(0, 1).t() @ read.flatten(0, 1)
