"""Functions of torch that no training graph has a form for, in terms of functions that have one.

A rule takes what the function takes and returns what it returns, or NotImplemented for a case that it leaves to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from edgefl.models.layers import normalised, storage, torch_recurrent


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sums, means or maxima of the rows that a bag names, (B, E): ``input`` is (B, T), a bag a row; or (L,) with ``offsets``
    where bags begin. Entries ``padding_idx`` count for nothing, and a bag without others is 0. What torch refuses, and
    ``max_norm``, which changes weights in the forward pass, are torch's."""
    refused = (input.dim() == 1) != (offsets is not None) or (
        per_sample_weights is not None and mode != "sum"
    )
    if refused or max_norm is not None:
        return NotImplemented
    rows = F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = input != padding_idx % weight.shape[0]
    if offsets is not None:  # every bag sees all rows, those of others as padding
        counted = counted & _own(offsets, input.shape[0], include_last_offset)
        rows = rows.unsqueeze(0)
    if mode == "max":
        hidden = torch.where(counted.unsqueeze(-1), rows, torch.full_like(rows, -math.inf))
        return torch.where(counted.any(1, keepdim=True), hidden.max(1).values, rows.new_zeros(()))
    share = counted.to(rows.dtype)
    if per_sample_weights is not None:
        share = share * per_sample_weights
    bags = share @ rows[0] if offsets is not None else (share.unsqueeze(-1) * rows).sum(1)
    return bags / counted.to(rows.dtype).sum(1, keepdim=True).clamp_min(1.0) if mode == "mean" else bags


def _own(offsets: Tensor, length: int, last: bool) -> Tensor:
    """Which entries each bag holds: bool (bags, length). ``last``: the last offset is where the last bag ends."""
    if not last:
        offsets = torch.cat((offsets, offsets.new_full((1,), length)))
    place = torch.arange(length, device=offsets.device)
    return (place >= offsets[:-1, None]) & (place < offsets[1:, None])


def rrelu(
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Outside of training nothing is drawn: the slope is the middle one."""
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2, inplace)


def one_hot(input: Tensor, num_classes: int = -1) -> Any:
    """Return 1 at the class of each entry and 0 elsewhere, int64 (*, num_classes). Torch reads the largest class out of the
    tensor to check it. Without ``num_classes`` the shape depends on values, and the call is left to torch."""
    if num_classes <= 0:
        return NotImplemented
    return (input.unsqueeze(-1) == torch.arange(num_classes, device=input.device)).long()


def cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary",
) -> Any:
    """Return the distances between the rows of two tensors, (*, P, R). The gradient at distance 0 is 0, as in torch."""
    if p == 2 and compute_mode == "use_mm_for_euclid_dist":
        return NotImplemented
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == math.inf:
        size = apart.abs()
        largest = size.detach().amax(-1, keepdim=True)
        # Each of several largest entries gets the whole gradient, as in torch; amax would divide it among them.
        return largest.squeeze(-1) + ((size - size.detach()) * (size.detach() == largest)).sum(-1)
    if p == 2:
        square = (apart * apart).sum(-1)
        is_zero = square == 0
        return torch.where(is_zero, square, torch.where(is_zero, 1.0, square).sqrt())
    return torch.linalg.vector_norm(apart, p, dim=-1)


def bucketize(
    input: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False, out: Tensor | None = None
) -> Any:
    """Rule for ``torch.bucketize``: the number of boundaries below each entry, with ``right`` also those equal to it."""
    return searchsorted(boundaries, input, out_int32=out_int32, right=right, out=out)


def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Rule for ``torch.searchsorted``: the number of entries of each sequence below each value."""
    if out is not None or not isinstance(input, Tensor):
        return NotImplemented
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    sequence, values = sorted_sequence.unsqueeze(-2), input.unsqueeze(-1)
    if sorted_sequence.dim() == 1:
        sequence = sorted_sequence
    # A NaN is above all boundaries, so the comparison is negated.
    is_above = sequence > values if right or side == "right" else sequence >= values
    count = is_above.logical_not().sum(-1)
    return count.int() if out_int32 else count


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Rule for ``torch.bincount`` where ``minlength`` gives the number of classes; its result has no gradient. Without
    ``minlength`` the shape depends on values, and the call is left to torch.

    torch's result is longer if a value is not below ``minlength``, and a graph cannot be. Then no count is right: all are
    -2^40, or NaN with weights, so that the loss shows it.
    """
    if minlength <= 0:
        return NotImplemented
    fits = ((input >= 0) & (input < minlength)).all()
    is_class = input.unsqueeze(-1) == torch.arange(minlength, device=input.device)
    if weights is None:
        return torch.where(fits, is_class.sum(0), -(2**40))
    kept = weights.detach() if weights.dtype == torch.float32 else weights.detach().double()
    return torch.where(fits, torch.where(is_class, kept.unsqueeze(-1), 0.0).sum(0), math.nan)


def indexed(tensor: Tensor, index: Any) -> Any:
    """Rule for an index with integers that are tensors, such as ``table[counter % 5]``: torch reads their values. Lists and
    masks beside them are left to torch."""
    parts = index if type(index) is tuple else (index,)
    if not any(map(_is_number, parts)) or any(isinstance(each, list) or _is_mask(each) for each in parts):
        return NotImplemented
    sized = [each for each in parts if each is not None and each is not Ellipsis]
    dim = 0
    for each in parts:
        if _is_number(each):
            tensor = tensor.index_select(dim, (each % tensor.shape[dim]).reshape(1))
        dim += 0 if each is None else tensor.dim() - len(sized) if each is Ellipsis else 1
    return tensor[tuple(0 if _is_number(each) else each for each in parts)]


def _is_number(part: object) -> bool:
    return isinstance(part, Tensor) and not part.dim() and part.dtype in _INTEGERS


def _is_mask(part: object) -> bool:
    return isinstance(part, bool) or (isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8))


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def deepcopied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a detached copy, as ``copy.deepcopy`` does for a weight; while a graph is traced, weights are no leaves."""
    return tensor.detach().clone()


RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.embedding_bag: embedding_bag,
    F.one_hot: one_hot,
    F.rrelu: rrelu,
    Tensor.__deepcopy__: deepcopied,
    Tensor.__getitem__: indexed,
    Tensor.bincount: bincount,
    torch.bincount: bincount,
    torch.bucketize: bucketize,
    torch.searchsorted: searchsorted,
    torch.cdist: cdist,
    **normalised.RULES,
    **torch_recurrent.RULES,
    **storage.RULES,
}
"""Rules by function."""


class Rewriting(TorchFunctionMode):
    """Mode that applies :data:`RULES` to the functions called in it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        rewritten = NotImplemented if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if rewritten is NotImplemented else rewritten
