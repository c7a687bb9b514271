"""Rules of operations: the relation between the dimensions of their inputs and results.

A rule returns the axes of the first result, or a list with the axes of all results. Results without axes are pinned. If a
rule raises :class:`~edgefl.submodels.channels.axes.UnalignedError`, all inputs and results are pinned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import edgefl.models.layers.cells  # noqa: F401  makes torch.ops.edgefl.lstm_cells and gru_cells
from edgefl.submodels.channels.axes import (
    ONE,
    Atom,
    Axes,
    Axis,
    Concat,
    ProductAxis,
    UnalignedError,
    is_pinned,
    regroup,
    resolve,
    size,
    take,
    unify,
)
from edgefl.submodels.channels.operations import OpCall

Rule = Callable[[OpCall], Axes | list[Axes]]
_RULES: dict[Any, Rule] = {}


def rule_of(func: Any) -> Rule | None:
    """Return the rule that relates the dimensions of inputs and results of the torch operation ``func``.

    None: there is no rule, so its inputs and results must be kept whole.
    """
    exact_rule = _RULES.get(func.overloadpacket)
    if exact_rule is not None:
        return exact_rule
    if torch.Tag.pointwise in func.tags:
        return _pointwise
    name = func.overloadpacket.__name__
    return _spatial if _SPATIAL.search(name) and "backward" not in name else None


def rule(*names: str, room: Any = torch.ops.aten) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the rule of the operations ``names``.

    Args:
        names: Names of operations. Names that this version of torch does not have are ignored.
        room: Namespace of the operations, such as ``torch.ops.aten``.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            packet = getattr(room, name, None)
            if packet is not None:
                _RULES[packet] = function
        return function

    return register


@rule("copy_", "native_dropout", "masked_fill")
def _pointwise(op: OpCall) -> list[Axes]:
    """Return the axes (structures of dimensions) of each result of an operation that works entry by entry, with
    broadcasting.
    """
    read = [op.book.axes(tensor) for tensor in op.tensors]
    return [_broadcast(read, tuple(result.shape)) for result in op.results]


def _broadcast(read: Sequence[Axes], shape: Sequence[int]) -> Axes:
    columns = list(zip_longest(*(reversed(axes) for axes in read), fillvalue=ONE))
    result_axes: list[Axis] = []
    for length, column in zip(reversed(shape), columns, strict=True):
        same = [axis for axis in column if size(axis) == length != 1]
        for axis in same[1:]:
            unify(same[0], axis)
        result_axes.insert(0, same[0] if same else ONE)
    return tuple(result_axes)


@rule(
    "alias", "detach", "clone", "contiguous", "_to_copy", "to", "lift_fresh", "lift_fresh_copy", "dropout",
    "_softmax", "softmax", "_log_softmax", "log_softmax", "_safe_softmax", "fill_", "zero_", "fill", "bernoulli",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "tril", "triu", "_conj",
)  # fmt: skip
def _alike(op: OpCall) -> list[Axes]:
    first = op.book.axes(next(op.tensors))
    return [first for _ in op.results]


@rule(
    "zeros", "ones", "empty", "full", "scalar_tensor", "new_zeros", "new_ones", "new_empty", "new_full", "rand",
    "randn", "empty_strided", "new_empty_strided",
)  # fmt: skip
def _fill(op: OpCall) -> Axes:
    """Return the axes (structures of dimensions) of a tensor of one value, which has no structure of its own."""
    return tuple(map(op.given_size, op.shape))


@rule(
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_copy", "_reshape_alias",
    "unsqueeze_copy", "unsqueeze_", "squeeze_", "squeeze_copy",
)  # fmt: skip
def _view(op: OpCall) -> Axes:
    return regroup(op.axes("self"), op.shape)


@rule("permute", "permute_copy")
def _permute(op: OpCall) -> Axes:
    axes = op.axes("self")
    return tuple(axes[dim] for dim in op["dims"])


@rule("transpose", "transpose_copy", "t", "t_copy", "numpy_T", "transpose_", "t_")
def _transpose(op: OpCall) -> Axes:
    axes = list(op.axes("self"))
    if len(axes) >= 2:
        one, other = (
            op.dim(name, len(axes)) if name in op.given else at for name, at in (("dim0", 0), ("dim1", 1))
        )
        axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


@rule("expand", "expand_copy", "broadcast_to", "expand_as")
def _expand(op: OpCall) -> Axes:
    axes = op.axes("self")
    padded = (ONE,) * (len(op.shape) - len(axes)) + axes
    return tuple(
        axis if size(axis) == length else op.given_size(length)
        for axis, length in zip(padded, op.shape, strict=True)
    )


@rule("repeat")
def _repeat(op: OpCall) -> Axes:
    axes = op.axes("self")
    padded = (ONE,) * (len(op["repeats"]) - len(axes)) + axes
    times = [op.whole((number,), "copies one after the other")[0] for number in op["repeats"]]
    return tuple(resolve(ProductAxis(pair)) for pair in zip(times, padded, strict=True))


@rule("cat", "concat", "concatenate")
def _cat(op: OpCall) -> Axes:
    # Torch lets tensors of shape (0,) through, whatever the others are.
    read = [op.book.axes(tensor) for tensor in op["tensors"] if tensor.dim() == len(op.shape)]
    dim = op.dim("dim", len(op.shape))
    joined = resolve(Concat(tuple(axes[dim] for axes in read)))
    return tuple(joined if at == dim else _same(column) for at, column in enumerate(zip(*read, strict=True)))


@rule("stack")
def _stack(op: OpCall) -> Axes:
    read = [op.book.axes(tensor) for tensor in op["tensors"]]
    dim = op.dim("dim", len(op.shape))
    rest = [_same(column) for column in zip(*read, strict=True)]
    return (*rest[:dim], resolve(Concat((ONE,) * len(read))), *rest[dim:])


def _same(axes: Sequence[Axis]) -> Axis:
    for axis in axes[1:]:
        unify(axes[0], axis)
    return axes[0]


@rule(
    "split", "split_with_sizes", "split_copy", "split_with_sizes_copy", "chunk", "unsafe_split", "unsafe_chunk",
    "tensor_split",
)  # fmt: skip
def _split(op: OpCall) -> list[Axes]:
    axes = op.axes("self")
    dim = op.dim("dim", len(axes))
    pieces, start = [], 0
    for result in op.results:
        pieces.append((*axes[:dim], take(axes[dim], start, start + result.shape[dim]), *axes[dim + 1 :]))
        start += result.shape[dim]
    return pieces


@rule("slice", "slice_copy", "narrow")
def _slice(op: OpCall) -> Axes:
    axes = op.axes("self")
    dim = op.dim("dim", len(axes))
    if "length" in op.given:
        start, stop, step = op["start"], op["start"] + op["length"], 1
    else:
        start, stop, step = slice(op["start"], op["end"], op["step"]).indices(size(axes[dim]))
    if step == 1 and start < stop:
        axis = take(axes[dim], start, stop)
    else:
        op.pin([axes[dim]], "every so many entries are taken")
        axis = op.whole((op.shape[dim],), "every so many entries are taken")[0]
    return (*axes[:dim], axis, *axes[dim + 1 :])


@rule("select", "select_copy", "unbind", "unbind_copy")
def _select(op: OpCall) -> list[Axes]:
    axes = op.axes("self")
    dim = op.dim("dim", len(axes))
    op.pin([axes[dim]], "entries are taken by their number")
    return [(*axes[:dim], *axes[dim + 1 :])] * len(op.results)


@rule("index_select", "index")
def _index(op: OpCall) -> Axes:
    axes = op.axes("self")
    if "indices" in op.given:
        dims = [at for at, index in enumerate(op["indices"]) if index is not None]
        if len(dims) != 1:
            raise UnalignedError
        dim, index = dims[0], op["indices"][dims[0]]
    else:
        dim, index = op.dim("dim", len(axes)), op["index"]
    op.pin([axes[dim]], "entries are looked up by their number")
    return (*axes[:dim], *op.book.axes(index), *axes[dim + 1 :])


@rule("roll", "flip")
def _reorder(op: OpCall) -> Axes:
    axes = op.axes("self")
    op.pin([axes[dim] for dim in op["dims"]] or axes, "entries change places")
    return axes


@rule("constant_pad_nd")
def _pad(op: OpCall) -> Axes:
    axes = list(op.axes("self"))
    pads = op["pad"]
    for pair in range(len(pads) // 2):
        before, after = pads[2 * pair : 2 * pair + 2]
        dim = len(axes) - 1 - pair
        if is_pinned(axes[dim]) or min(before, after) < 0:
            op.pin([axes[dim]], "entries are cut off")
            axes[dim] = op.whole((op.shape[dim],), "padding")[0]
        else:
            ends = [op.whole((length,), "padding") if length else () for length in (before, after)]
            axes[dim] = resolve(Concat((*ends[0], axes[dim], *ends[1])))
    return tuple(axes)


@rule(
    "mean", "sum", "amax", "amin", "prod", "any", "all", "var", "std", "var_mean", "std_mean", "logsumexp", "max",
    "min", "norm", "linalg_vector_norm", "nansum",
)  # fmt: skip
def _reduce(op: OpCall) -> list[Axes]:
    axes = op.book.axes(next(op.tensors))
    dim_argument = op["dim"]
    dims = [dim_argument] if isinstance(dim_argument, int) else (dim_argument or range(len(axes)))
    gone = {dim % len(axes) for dim in dims} if axes else set()
    result_axes = [
        ONE if at in gone else axis for at, axis in enumerate(axes) if op["keepdim"] or at not in gone
    ]
    return [tuple(result_axes)] * len(op.results)


_SPATIAL = re.compile(r"pool\d?d?|upsample|_pad\dd")


def _spatial(op: OpCall) -> list[Axes]:
    """Return the axes (structures of dimensions) of each result of pooling, resizing or padding.

    The trailing dimensions are positions, which must be kept whole. The others are unchanged.

    Raises:
        UnalignedError: The operation's name does not contain the number of positions, such as ``2d``.
    """
    axes = op.book.axes(next(op.tensors))
    match = re.search(r"(\d)d", op.func.overloadpacket.__name__)
    if match is None:
        raise UnalignedError
    spatial = int(match[1])
    op.pin(axes[-spatial:], "positions")
    return [(*axes[:-spatial], *op.whole(result.shape[-spatial:], "positions")) for result in op.results]


@rule("convolution", "_convolution", "convolution_overrideable")
def _convolution(op: OpCall) -> Axes:
    x, kernel = op.axes("input"), op.axes("weight")
    op.pin((*x[2:], *kernel[2:]), "positions of a convolution")
    outside, inside = (kernel[1], kernel[0]) if op["transposed"] else (kernel[0], kernel[1])
    if op["groups"] > 1:
        if op["transposed"]:
            raise UnalignedError
        groups = Atom(op["groups"])
        unify(x[1], ProductAxis((groups, inside)))
        unify(outside, ProductAxis((groups, Atom(size(outside) // op["groups"]))))
    else:
        unify(x[1], inside)
    if op["bias"] is not None:
        unify(op.axes("bias")[0], outside)
    return (x[0], outside, *op.whole(op.shape[2:], "positions of a convolution"))


@rule("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "_addmm_activation")
def _product(op: OpCall) -> Axes:
    """Return the axes (structures of dimensions) of a matrix product, after unifying the two dimensions that it sums over.

    These are the last dimension of the left operand, and the last but one (or only) of the right operand.
    """
    tensors = list(op.tensors)
    left, right = (op.book.axes(tensor) for tensor in tensors[-2:])
    at = max(len(right) - 2, 0)
    unify(left[-1], right[at])
    if len(left) == 3:
        unify(left[0], right[0])
    product_axes = (*left[:-1], *right[at + 1 :])
    return (
        _broadcast([product_axes, op.book.axes(tensors[0])], op.shape) if len(tensors) == 3 else product_axes
    )


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
)
def _batch_norm(op: OpCall) -> Axes:
    x = op.axes("input")
    _unify_channels(op, x, "weight", "bias", "running_mean", "running_var")
    return x


def _unify_channels(op: OpCall, x: Axes, *names: str) -> None:
    for name in names:
        if isinstance(op[name], Tensor):
            unify(x[1], op.axes(name)[0])


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _layer_norm(op: OpCall) -> Axes:
    x = op.axes("input")
    for name in ("weight", "bias"):
        if isinstance(op[name], Tensor):
            own = op.axes(name)
            _broadcast([x, own], [size(axis) for axis in x])
    return x


@rule("native_group_norm")
def _group_norm(op: OpCall) -> Axes:
    x = op.axes("input")
    unify(x[1], ProductAxis((Atom(op["group"]), Atom(size(x[1]) // op["group"]))))
    _unify_channels(op, x, "weight", "bias")
    return x


@rule("embedding")
def _embedding(op: OpCall) -> Axes:
    table = op.axes("weight")
    op.pin(table[:1], "rows are looked up by their number")
    return (*op.axes("indices"), table[1])


@rule("lstm_cells", room=torch.ops.edgefl)
def _lstm(op: OpCall) -> list[Axes]:
    return _cells(op, gates=4, carried=("h", "c"), biases=("bias",))


@rule("gru_cells", room=torch.ops.edgefl)
def _gru(op: OpCall) -> list[Axes]:
    return _cells(op, gates=3, carried=("h",), biases=("outer", "inner"))


def _cells(op: OpCall, *, gates: int, carried: Sequence[str], biases: Sequence[str]) -> list[Axes]:
    """Return the axes (structures of dimensions) of each result of a recurrent cell.

    The rows of each weight are one block per gate, cut in the same way in all gates
    (:mod:`edgefl.models.layers.cells`).

    Args:
        op: Call of the operation.
        gates: Number of gates.
        carried: Names of the arguments that are states, (batch, hidden).
        biases: Names of the arguments that are biases.
    """
    (steps, batch, features), kernel, recurrent = op.axes("x"), op.axes("kernel"), op.axes("recurrent")
    hidden = op.axes("h")[1]
    rows = Concat((hidden,) * gates)
    unify(features, kernel[1])
    unify(hidden, recurrent[1])
    for axes in (kernel, recurrent, *map(op.axes, biases)):
        unify(axes[0], rows)
    for name in carried:
        state = op.axes(name)
        unify(batch, state[0])
        unify(hidden, state[1])
    inner = len(op.results) - 1 - len(carried)
    states: list[Axes] = [(batch, hidden)] * len(carried)
    return [(steps, batch, hidden), *states, *[(steps, hidden, batch)] * inner]
