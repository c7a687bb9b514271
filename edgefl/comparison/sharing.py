"""Check that no two tensors of a module have the same memory, or that training is the same if each has its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.comparison.torch_side import TrainingResult
from edgefl.errors import ModelError

Shared = tuple[str, Tensor, str, Tensor]
"""A tensor with its path, and an owner of the same memory."""


def check_sharing(
    module: nn.Module,
    tensors: Sequence[tuple[str, Tensor]],
    trained: TrainingResult,
    again: Callable[[], TrainingResult],
) -> None:
    """Check that training does not depend on tensors that overlap in memory, because a graph gives each its own memory.

    If some overlap, torch trains again with separate memory for each. The overlap is accepted if the results are
    equal to the bit: then the tensors are constant, or the code does not read the views. It is also accepted if
    repeated training with overlapping tensors gives other bits, because then nothing can be decided.

    Args:
        module: the module.
        tensors: (path, tensor) of all tensors that its code can reach.
        trained: result of training with overlapping tensors.
        again: function that repeats the training.

    Raises:
        ModelError: if the results differ.
    """
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    # The owner of a memory is a trained parameter, or else a tensor of the module.
    ranked = sorted(tensors, key=lambda each: (not each[1].requires_grad, id(each[1]) not in own))
    shared = _overlapping(ranked)
    if not shared or _is_equal(trained, _apart(shared, again)) or not _is_equal(trained, again()):
        return
    path, tensor, owner, owned = next(
        (each for each in shared if not _is_equal(trained, _apart([each], again))), shared[0]
    )
    is_tied = tensor.requires_grad and tensor.shape == owned.shape and tensor.stride() == owned.stride()
    advice = f"assign the same parameter ({path} = {owner}), " if is_tied else ""
    raise ModelError(
        f"{type(module).__name__} cannot be trained as torch would train it: expected tensors with memory of their own, "
        f"found {path!r} in "
        f"the memory of {owner!r}, so that training moves both; {advice}read {owner!r} in forward in its place (a view, "
        "such as the transpose, can be computed there), or give the tensor its own memory by clone()",
        tensor=path,
        owner=owner,
        refused=True,
    )


def _overlapping(tensors: Sequence[tuple[str, Tensor]]) -> list[Shared]:
    """Return (path, tensor, path of the earlier tensor, earlier tensor) for each tensor that overlaps an earlier one."""
    ordered = [
        (path, each)
        for path, each in tensors
        if each.is_leaf and each.layout == torch.strided and each.device.type == "cpu" and each.numel()
    ]
    spans = [(each.data_ptr(), each.data_ptr() + _extent(each) * each.itemsize) for _, each in ordered]
    found: dict[int, Shared] = {}
    open_ones: list[int] = []
    for place in sorted(range(len(ordered)), key=lambda each: spans[each]):
        open_ones = [other for other in open_ones if spans[other][1] > spans[place][0]]
        for other in open_ones:
            first, second = sorted((place, other))
            (owner, one), (path, tensor) = ordered[first], ordered[second]
            if second not in found and _overlap(one, tensor):
                found[second] = path, tensor, owner, one
        open_ones.append(place)
    return [found[place] for place in sorted(found)]


def _extent(tensor: Tensor) -> int:
    """Return the number of entries between the first and the last one in memory, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors, whose extents overlap, have an entry in common."""
    if one.itemsize != other.itemsize or all(each.numel() == _extent(each) for each in (one, other)):
        return True
    return bool(np.intersect1d(_addresses(one), _addresses(other)).size)


def _addresses(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    places = np.full(tuple(tensor.shape), tensor.data_ptr(), np.int64)
    for axis, stride in enumerate(tensor.stride()):
        steps = np.arange(tensor.shape[axis]) * (stride * tensor.itemsize)
        places += steps.reshape(-1, *(1,) * (tensor.dim() - axis - 1))
    return places


@torch.no_grad()
def _apart(shared: Sequence[Shared], again: Callable[[], TrainingResult]) -> TrainingResult:
    """Call ``again`` while each tensor in ``shared`` has separate memory.

    Restore the tensors and return the result of ``again``.
    """
    held = [(tensor, tensor.data) for _, tensor, *_ in shared]
    try:
        for tensor, data in held:
            whole = data.as_strided((_extent(data),), (1,)).clone()
            tensor.data = whole.as_strided(data.shape, data.stride(), 0)
        return again()
    finally:
        for tensor, data in held:
            tensor.data = data


def _is_equal(one: TrainingResult, other: TrainingResult) -> bool:
    """Return True if losses, gradients, state and output are the same to the bit."""
    if one.losses != other.losses or (one.output is None) != (other.output is None):
        return False
    pairs = [(one.gradients, other.gradients), (one.state, other.state)]
    if one.output is not None and other.output is not None:
        pairs.append(({"": one.output}, {"": other.output}))
    return all(
        a.keys() == b.keys() and all(torch.equal(each, b[name]) for name, each in a.items()) for a, b in pairs
    )
