"""Recurrent layers: each operator of :mod:`edgefl.models.layers.cells` as one ONNX Scan, whatever the length.

The operators have the formulas. A node in the body of a Scan costs some microseconds a step whatever it does,
so the steps are written with few nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import evaluator
from onnxscript import opset18 as op

Value = Any  # a tensor of the graph under construction

# ONNX Scan from a step written as a plain function: the one place that builds a graph within a graph.

Step = Callable[[Sequence[Value], Sequence[Value]], tuple[Sequence[Value], Sequence[Value]]]


def scan(step: Step, state: Sequence[Value], sequences: Sequence[Value], *, reverse: bool) -> list[Value]:
    """Write an ONNX Scan that runs ``step`` over the first axis of ``sequences``, from its end if ``reverse``.

    ``step(state, slices) -> (state, rows)`` is called once, to record its operators; it may use other values of the
    graph. A value may be returned once only: a value that is both state and row needs two nodes.

    Args:
        step: function of the state and of one slice of each sequence; returns the next state and the rows to collect.
        state: initial state.
        sequences: values whose first axis is the number of the step.
        reverse: run from the last position to the first.

    Returns:
        The last state, followed by the rows of all steps, in order of position.
    """
    outer: Any = evaluator.default()
    state_in = [_inner(value, f"state{k}", value.shape) for k, value in enumerate(state)]
    slices = [_inner(value, f"slice{k}", value.shape[1:]) for k, value in enumerate(sequences)]
    inner = type(outer)(outer.opset, {})
    with evaluator.default_as(inner):
        state_out, rows = step(state_in, slices)
    outputs = [*state_out, *rows]
    _name(inner.nodes)
    for value in outputs:
        value.type = state_in[0].type
    body = ir.Graph([*state_in, *slices], outputs, nodes=inner.nodes, name="step", opset_imports={"": 18})
    direction = int(reverse)
    node = ir.Node(
        "",
        "Scan",
        [*state, *sequences],
        [
            ir.AttrGraph("body", body),
            ir.AttrInt64("num_scan_inputs", len(sequences)),
            ir.AttrInt64s("scan_input_directions", [direction] * len(sequences)),
            ir.AttrInt64s("scan_output_directions", [direction] * len(rows)),
        ],
        num_outputs=len(outputs),
    )
    outer.nodes.append(node)
    return list(node.outputs)


def _inner(outside: Value, name: str, shape: Sequence[int]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(outside.dtype))


def _name(nodes: Sequence[ir.Node]) -> None:
    for index, node in enumerate(nodes):
        node.name = f"{node.op_type}_{index}"
        for k, value in enumerate(node.outputs):
            value.name = f"step{index}_{k}"


Values = Sequence[Value]


def lstm(x: Value, kernel: Value, recurrent: Value, bias: Value, h: Value, c: Value, reverse: bool) -> Values:
    column = _column(bias)

    def step(state: Values, slices: Values) -> tuple[Values, Values]:
        h, c = state
        p = op.Gemm(recurrent, h, op.Gemm(kernel, slices[0], column, transB=1))
        i, f, g, o = op.Split(p, axis=0, num_outputs=4)
        i, f, g, o = op.Sigmoid(i), op.Sigmoid(f), op.Tanh(g), op.Sigmoid(o)
        after = op.Add(op.Mul(f, c), op.Mul(i, g))
        squashed = op.Tanh(after)
        h = op.Mul(o, squashed)
        return (h, after), (_transpose(h), i, f, g, o, op.Identity(c), squashed)

    h, c, states, *saved = scan(step, (_transpose(h), _transpose(c)), (x,), reverse=reverse)
    return states, _transpose(h), _transpose(c), *saved


def lstm_backward(
    d_states: Value | None,
    d_h: Value,
    d_c: Value,
    i: Value,
    f: Value,
    g: Value,
    o: Value,
    before: Value,
    squashed: Value,
    recurrent: Value,
    reverse: bool,
) -> Values:
    transposed = _transpose(recurrent)

    def step(state: Values, slices: Values) -> tuple[Values, Values]:
        dh, dc = state
        i, f, g, o, before, squashed, *d_state = slices
        dh = op.Add(dh, _transpose(d_state[0])) if d_state else dh
        through = op.Mul(dh, o)
        output = op.Mul(through, squashed)
        dc = op.Sub(op.Add(dc, through), op.Mul(output, squashed))
        to_g = op.Mul(dc, i)
        to_i = op.Mul(to_g, g)
        dc = op.Mul(dc, f)
        to_f = op.Mul(dc, before)
        d_p = op.Concat(
            op.Sub(to_i, op.Mul(to_i, i)),
            op.Sub(to_f, op.Mul(to_f, f)),
            op.Sub(to_g, op.Mul(to_i, g)),
            op.Sub(output, op.Mul(output, o)),
            axis=0,
        )
        return (op.MatMul(transposed, d_p), dc), (_transpose(d_p),)

    sequences = [i, f, g, o, before, squashed, *_present(d_states)]
    d_h, d_c, d_gates = scan(step, (_transpose(d_h), _transpose(d_c)), sequences, reverse=not reverse)
    return d_gates, _transpose(d_h), _transpose(d_c)


def gru(
    x: Value, kernel: Value, recurrent: Value, outer: Value, inner: Value, h: Value, reverse: bool
) -> Values:
    outer, inner = _column(outer), _column(inner)

    def step(state: Values, slices: Values) -> tuple[Values, Values]:
        (h,) = state
        a_r, a_z, a_n = op.Split(op.Gemm(kernel, slices[0], outer, transB=1), axis=0, num_outputs=3)
        p_r, p_z, p_n = op.Split(op.Gemm(recurrent, h, inner), axis=0, num_outputs=3)
        r, z = op.Sigmoid(op.Add(a_r, p_r)), op.Sigmoid(op.Add(a_z, p_z))
        n = op.Tanh(op.Add(a_n, op.Mul(r, p_n)))
        away = op.Sub(h, n)
        h = op.Add(n, op.Mul(z, away))
        return (h,), (_transpose(h), r, z, n, p_n, away)

    h, states, *saved = scan(step, (_transpose(h),), (x,), reverse=reverse)
    return states, _transpose(h), *saved


def gru_backward(
    d_states: Value | None,
    d_h: Value,
    r: Value,
    z: Value,
    n: Value,
    p_n: Value,
    away: Value,
    recurrent: Value,
    reverse: bool,
) -> Values:
    transposed = _transpose(recurrent)

    def step(state: Values, slices: Values) -> tuple[Values, Values]:
        (dh,) = state
        r, z, n, p_n, away, *d_state = slices
        dh = op.Add(dh, _transpose(d_state[0])) if d_state else dh
        old = op.Mul(dh, z)
        new = op.Sub(dh, old)
        to_z = op.Mul(old, away)
        dn = op.Sub(new, op.Mul(op.Mul(new, n), n))
        inner = op.Mul(dn, r)
        to_r = op.Mul(inner, p_n)
        dr, dz = op.Sub(to_r, op.Mul(to_r, r)), op.Sub(to_z, op.Mul(to_z, z))
        d_p = op.Concat(dr, dz, inner, axis=0)
        d_a = op.Concat(dr, dz, dn, axis=0)
        return (op.Gemm(transposed, d_p, old),), (_transpose(d_a), _transpose(d_p))

    sequences = [r, z, n, p_n, away, *_present(d_states)]
    d_h, d_a, d_p = scan(step, (_transpose(d_h),), sequences, reverse=not reverse)
    return d_a, d_p, _transpose(d_h)


def _transpose(x: Value) -> Value:
    """Return ``x^T``, with its type if the type of ``x`` is known: a Scan's state needs one."""
    turned = op.Transpose(x, perm=[1, 0])
    if x.shape is not None:
        turned.type, turned.shape = x.type, type(x.shape)(reversed(x.shape))
    return turned


def _column(bias: Value) -> Value:
    axis: Value = op.Constant(value_ints=[1])
    return op.Unsqueeze(bias, axis)


def _present(d_states: Value | None) -> Values:
    return [] if d_states is None else [d_states]


_ops = torch.ops.edgefl

TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ops.lstm_cells.default: lstm,
    _ops.lstm_cells_backward.default: lstm_backward,
    _ops.gru_cells.default: gru,
    _ops.gru_cells_backward.default: gru_backward,
}
