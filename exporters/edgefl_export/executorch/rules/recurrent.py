"""Recurrent layers: each operator of :mod:`edgefl.models.layers.cells` step by step, because ExecuTorch has no loop
over rows.

The operators have the formulas. The graph grows with the sequence: :data:`STEPS` bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import edgefl.models.layers.cells  # noqa: F401 - registers the operators
from edgefl.errors import ExportError
from edgefl_export.operators import Rules

STEPS = 512
"""Longest sequence that is written out. A step of an LSTM, forward and back, is some 45 nodes of the graph, and 128 of them
take 9 seconds to export: two bidirectional layers of more steps than this would take minutes."""


def lstm(
    x: Tensor, kernel: Tensor, recurrent: Tensor, bias: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> tuple[Tensor, ...]:
    """Compute the op ``edgefl::lstm_cells`` (T steps of an LSTM) as separate ops for each step.

    Args:
        x: sequence (T, B, E).
        kernel: input weights (4H, E), gates in the order i, f, g, o.
        recurrent: recurrent weights (4H, H).
        bias: bias (4H).
        h: initial hidden state (B, H).
        c: initial cell state (B, H).
        reverse: run from the last position to the first.

    Returns:
        (hidden states (T, B, H), last h, last c, and six tensors (T, H, B) for the backward pass).

    Raises:
        ExportError: if the sequence has more than :data:`STEPS` steps.
    """
    projected, hidden = _project(x, kernel, bias), h.shape[1]
    h, c = h.t(), c.t()
    rows: list[tuple[Tensor, ...]] = []
    for t in _order("LSTM", x, reverse):
        p_i, p_f, p_g, p_o = torch.split(projected[t] + recurrent @ h, hidden)
        i, f, g, o = torch.sigmoid(p_i), torch.sigmoid(p_f), torch.tanh(p_g), torch.sigmoid(p_o)
        before, c = c, f * c + i * g
        squashed = torch.tanh(c)
        h = o * squashed
        rows.append((h, i, f, g, o, before, squashed))
    states, *saved = _stack(rows, reverse)
    return _transpose(states), h.t().contiguous(), c.t().contiguous(), *saved


def lstm_backward(d_states: Tensor | None, d_h: Tensor, d_c: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    """Compute the op ``edgefl::lstm_cells_backward`` (gradients of an LSTM) as separate ops for each step.

    Args:
        d_states: gradient of the hidden states (T, B, H); None counts as zero.
        d_h: gradient of the last h (B, H).
        d_c: gradient of the last c (B, H).
        *saved: the six tensors that the forward pass saved, the recurrent weights and ``reverse``.

    Returns:
        Gradients of the gates before activation (T, B, 4H), of the initial h and of the initial c.
    """
    i, f, g, o, before, squashed, recurrent, reverse = saved
    transposed, dh, dc = recurrent.t(), d_h.t(), d_c.t()
    d_rows = None if d_states is None else _transpose(d_states)
    rows: list[tuple[Tensor, ...]] = []
    for t in _order("LSTM", i, not reverse):
        dh = dh if d_rows is None else dh + d_rows[t]
        i_t, f_t, g_t, o_t, s_t = i[t], f[t], g[t], o[t], squashed[t]
        through = dh * o_t
        output = through * s_t
        dc = dc + through - output * s_t
        to_g = dc * i_t
        to_i = to_g * g_t
        dc = dc * f_t
        to_f = dc * before[t]
        d_p = torch.cat((to_i - to_i * i_t, to_f - to_f * f_t, to_g - to_i * g_t, output - output * o_t))
        dh = transposed @ d_p
        rows.append((d_p,))
    (d_gates,) = _stack(rows, not reverse)
    return _transpose(d_gates), dh.t().contiguous(), dc.t().contiguous()


def gru(
    x: Tensor, kernel: Tensor, recurrent: Tensor, outer: Tensor, inner: Tensor, h: Tensor, reverse: bool
) -> tuple[Tensor, ...]:
    """Compute the op ``edgefl::gru_cells`` (T steps of a GRU) as separate ops for each step.

    Args:
        x: sequence (T, B, E).
        kernel: input weights (3H, E), gates in the order r, z, n.
        recurrent: recurrent weights (3H, H).
        outer: bias of the input product (3H).
        inner: bias of the recurrent product (3H).
        h: initial hidden state (B, H).
        reverse: run from the last position to the first.

    Returns:
        (hidden states (T, B, H), last h, and five tensors (T, H, B) for the backward pass).

    Raises:
        ExportError: if the sequence has more than :data:`STEPS` steps.
    """
    projected, hidden = _project(x, kernel, outer), h.shape[1]
    h, column = h.t(), inner.unsqueeze(1)
    rows: list[tuple[Tensor, ...]] = []
    for t in _order("GRU", x, reverse):
        a_r, a_z, a_n = torch.split(projected[t], hidden)
        p_r, p_z, p_n = torch.split(recurrent @ h + column, hidden)
        r, z = torch.sigmoid(a_r + p_r), torch.sigmoid(a_z + p_z)
        n = torch.tanh(a_n + r * p_n)
        away = h - n
        h = n + z * away
        rows.append((h, r, z, n, p_n, away))
    states, *saved = _stack(rows, reverse)
    return _transpose(states), h.t().contiguous(), *saved


def gru_backward(d_states: Tensor | None, d_h: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    """Compute the op ``edgefl::gru_cells_backward`` (gradients of a GRU) as separate ops for each step.

    Args:
        d_states: gradient of the hidden states (T, B, H); None counts as zero.
        d_h: gradient of the last h (B, H).
        *saved: the five tensors that the forward pass saved, the recurrent weights and ``reverse``.

    Returns:
        Gradients of the input product plus bias (T, B, 3H), of the recurrent product plus bias (T, B, 3H), and of the
        initial h.
    """
    r, z, n, p_n, away, recurrent, reverse = saved
    transposed, dh = recurrent.t(), d_h.t()
    d_rows = None if d_states is None else _transpose(d_states)
    rows: list[tuple[Tensor, ...]] = []
    for t in _order("GRU", r, not reverse):
        dh = dh if d_rows is None else dh + d_rows[t]
        r_t, z_t, n_t = r[t], z[t], n[t]
        old = dh * z_t
        new = dh - old
        to_z = old * away[t]
        dn = new - new * n_t * n_t
        inner = dn * r_t
        to_r = inner * p_n[t]
        dr, dz = to_r - to_r * r_t, to_z - to_z * z_t
        d_p = torch.cat((dr, dz, inner))
        dh = old + transposed @ d_p
        rows.append((torch.cat((dr, dz, dn)), d_p))
    d_a, d_p = _stack(rows, not reverse)
    return _transpose(d_a), _transpose(d_p), dh.t().contiguous()


def _project(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Compute ``kernel @ x[t] + bias`` for all steps t in one product, (T, G, B)."""
    steps, batch, features = x.shape
    rows = x.reshape(steps * batch, features) @ kernel.t() + bias
    return _transpose(rows.view(steps, batch, -1))


def _order(kind: str, sequence: Tensor, reverse: bool) -> range:
    steps = sequence.shape[0]
    if steps > STEPS:
        raise ExportError(
            f"a {kind} layer over {steps} steps is too long for ExecuTorch, which has no loop: at most {STEPS} are "
            "written out. Shorten the sequences, or export for onnx",
            steps=steps,
            limit=STEPS,
        )
    return range(steps)[::-1] if reverse else range(steps)


def _stack(rows: Sequence[tuple[Tensor, ...]], reverse: bool) -> list[Tensor]:
    """Stack the values of all steps along a first axis, in the order of positions in the sequence."""
    ordered = rows[::-1] if reverse else rows
    return [torch.stack(values) for values in zip(*ordered, strict=True)]


def _transpose(sequence: Tensor) -> Tensor:
    """Return a sequence (T, A, B) as (T, B, A), copied."""
    return sequence.transpose(1, 2).contiguous()


_ops = torch.ops.edgefl

RULES: Rules = {
    _ops.lstm_cells.default: lstm,
    _ops.lstm_cells_backward.default: lstm_backward,
    _ops.gru_cells.default: gru,
    _ops.gru_cells_backward.default: gru_backward,
}
