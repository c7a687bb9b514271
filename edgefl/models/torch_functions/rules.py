"""Rules that rewrite torch functions which no training graph can represent, in terms of functions that one can.

A rule has the arguments and the result of the function. It returns NotImplemented for a call that torch should compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from edgefl.models.layers.norms import moments
from edgefl.models.torch_functions import recurrent, storage


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
    """Return the sum, mean or maximum (``mode``) of the rows of ``weight`` that each bag names, (B, E).

    Arguments as of ``torch.nn.functional.embedding_bag``. ``input`` is (B, T) with one bag per row, or (L,) with
    ``offsets``, the beginnings of the bags. Entries equal to ``padding_idx`` are ignored. A bag without other entries
    is 0. Returns NotImplemented for arguments that torch rejects, and for ``max_norm``, which changes weights in the
    forward pass.
    """
    left_to_torch = (input.dim() == 1) != (offsets is not None) or (
        per_sample_weights is not None and mode != "sum"
    )
    if left_to_torch or max_norm is not None:
        return NotImplemented
    rows = F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = input != padding_idx % weight.shape[0]
    if offsets is not None:  # every bag reads all rows, and those of others as padding
        counted = counted & _bag_entries(offsets, input.shape[0], include_last_offset)
        rows = rows.unsqueeze(0)
    if mode == "max":
        hidden = torch.where(counted.unsqueeze(-1), rows, torch.full_like(rows, -math.inf))
        return torch.where(counted.any(1, keepdim=True), hidden.max(1).values, rows.new_zeros(()))
    share = counted.to(rows.dtype)
    if per_sample_weights is not None:
        share = share * per_sample_weights
    bags = share @ rows[0] if offsets is not None else (share.unsqueeze(-1) * rows).sum(1)
    return bags / counted.to(rows.dtype).sum(1, keepdim=True).clamp_min(1.0) if mode == "mean" else bags


def _bag_entries(offsets: Tensor, length: int, has_end: bool) -> Tensor:
    """Return a mask of the entries of each bag, bool (bags, length).

    Args:
        offsets: First entry of each bag.
        length: Number of entries.
        has_end: True if the last offset is the end of the last bag.
    """
    if not has_end:
        offsets = torch.cat((offsets, offsets.new_full((1,), length)))
    place = torch.arange(length, device=offsets.device)
    return (place >= offsets[:-1, None]) & (place < offsets[1:, None])


def rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:
    """Return leaky ReLU with the mean of ``lower`` and ``upper`` as slope, in inference, where torch draws no slope.

    Returns NotImplemented in training.
    """
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2, inplace)


def one_hot(input: Tensor, num_classes: int = -1) -> Any:
    """Return 1 at the class of each entry and 0 elsewhere, int64 (*, num_classes).

    Torch reads the largest class from the tensor to check it. Returns NotImplemented without ``num_classes``, because
    the shape would depend on values.
    """
    if num_classes <= 0:
        return NotImplemented
    return (input.unsqueeze(-1) == torch.arange(num_classes, device=input.device)).long()


def cdist(
    x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = "use_mm_for_euclid_dist_if_necessary"
) -> Any:
    """Return the distances between the rows of two tensors (*, P, M) and (*, R, M), as (*, P, R).

    The gradient at distance 0 is 0, as in torch. Returns NotImplemented if ``compute_mode`` demands torch's product.
    """
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
    """Return the number of boundaries that are smaller than each entry of ``input``; with ``right``, smaller or equal.

    Arguments as of ``torch.bucketize``. Returns NotImplemented if ``out`` is given or ``input`` is no tensor.
    """
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
    """Return the number of entries of each sequence that are smaller than each value; with ``right``, smaller or equal.

    Arguments as of ``torch.searchsorted``. Returns NotImplemented if ``out`` is given or ``input`` is no tensor.
    """
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
    """Return the number of entries of each of ``minlength`` classes, or the sum of their weights. It has no gradient.

    Returns NotImplemented without ``minlength``, because the shape would depend on values. If an entry is negative or
    not below ``minlength``, torch would fail or return a longer result, which a graph cannot. Then all counts are
    -2^40, or NaN with weights, so that the loss shows the error.
    """
    if minlength <= 0:
        return NotImplemented
    fits = ((input >= 0) & (input < minlength)).all()
    is_class = input.unsqueeze(-1) == torch.arange(minlength, device=input.device)
    if weights is None:
        return torch.where(fits, is_class.sum(0), -(2**40))
    kept = weights.detach() if weights.dtype == torch.float32 else weights.detach().double()
    return torch.where(fits, torch.where(is_class, kept.unsqueeze(-1), 0.0).sum(0), math.nan)


def select_entries(tensor: Tensor, index: Any) -> Any:
    """Return ``tensor[index]`` for an index with integers that are tensors, such as ``table[counter % 5]``.

    Torch would read the values of these integers. Returns NotImplemented for any other index, and for one with lists or
    masks.
    """
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


def copy_detached(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a detached copy of ``tensor``, as ``copy.deepcopy`` makes of a weight. ``memo`` is ignored.

    Torch refuses to copy weights while a graph is traced, because they are no leaf tensors then.
    """
    return tensor.detach().clone()


NormKind = Literal["batch", "instance", "native"]


@dataclass(frozen=True, eq=False)
class NormCall:
    """Call of one of torch's functions for batch norm or instance norm.

    Attributes:
        kind: "batch", "instance", or "native" for the batch norm that also returns the batch's mean and 1/std.
        input: Batch.
        running_mean: Moving mean, or None.
        running_var: Moving variance, or None.
        weight: Scale per channel, or None.
        bias: Shift per channel, or None.
        training: Normalise by the statistics of the batch (instance norm's ``use_input_stats``) instead of the moving
            statistics.
        momentum: Weight of the batch in the moving statistics.
        eps: Added to the variance.
    """

    kind: NormKind
    input: Tensor
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> NormCall | None:
        """Return the call of ``function`` with these arguments, or None if ``function`` is no batch norm or instance
        norm.
        """
        if function not in _SIGNATURES:
            return None
        kind, names = _SIGNATURES[function]
        values = {"training": kind == "instance", **dict(zip(names, args, strict=False)), **kwargs}
        values["training"] = values.pop("use_input_stats", values["training"])
        values.pop("cudnn_enabled", None)
        return cls(kind, **values)

    def normalize(self) -> Any:
        """Normalise by the statistics of the batch, without changing moving statistics.

        Returns:
            The normalised batch. For a batch norm (normalised batch, mean, 1/std), the last two per channel.
        """
        if self.kind == "instance":
            return F.instance_norm(
                self.input, None, None, self.weight, self.bias, True, self.momentum, self.eps
            )
        return torch.native_batch_norm(self.input, self.weight, self.bias, None, None, True, 0.0, self.eps)

    def result(self, made: Any) -> Any:
        """Return the value that the function itself returns, from ``made``, the result of :meth:`normalize`.

        It is the normalised batch alone, or for kind ``native`` the whole tuple.
        """
        return made[0] if self.kind == "batch" else made

    def statistics(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (mean, unbiased variance) of the batch per channel, in ``dtype`` and without gradient.

        For instance norm, which has statistics per sample, they are averaged over the samples.
        """
        rows, per_sample = self.input.detach().to(dtype), self.kind == "instance"
        dims = [*range(2, rows.dim())] if per_sample else [dim for dim in range(rows.dim()) if dim != 1]
        mean, var = rows.mean(dims), rows.var(dims, correction=0)
        count = rows[0, 0].numel() if per_sample else rows.numel() // rows.shape[1]
        if per_sample:
            mean, var = mean.mean(0), var.mean(0)
        return mean, var * (count / max(count - 1, 1))


_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
# Without the last one, cudnn_enabled.
_OPERATOR = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")

_SIGNATURES: Mapping[Callable[..., Any], tuple[NormKind, tuple[str, ...]]] = {
    F.batch_norm: ("batch", _FUNCTIONAL),
    torch.batch_norm: ("batch", _OPERATOR),
    torch.native_batch_norm: ("native", _OPERATOR),
    F.instance_norm: ("instance", _FUNCTIONAL),
    torch.instance_norm: ("instance", _OPERATOR),
}


def _train_norm(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a norm in training, with a write of the moving statistics that a graph can contain.

    Torch's kernels change the moving statistics within one operation. This rule writes them by separate operations.
    Returns NotImplemented in inference, and for an instance or native batch norm without moving statistics.

    Args:
        function: Torch's function of the norm.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.
    """
    call = NormCall.of(function, args, kwargs)
    if call is None or not call.training:
        return NotImplemented
    old_mean, old_var = call.running_mean, call.running_var
    if (old_mean is None or old_var is None) and call.kind != "batch":
        return NotImplemented
    made = call.normalize()
    if old_mean is not None and old_var is not None:
        if call.kind == "instance":
            mean, var = call.statistics(call.input.dtype)
        else:
            mean, var = moments(call.input, made[1], made[2], call.eps)
        _write_average(old_mean, mean, call.momentum)
        _write_average(old_var, var, call.momentum)
    return call.result(made)


@torch.no_grad()
def _write_average(old: Tensor, new: Tensor, momentum: float) -> None:
    """Update moving statistics in place: ``(1 - momentum) * old + momentum * new``."""
    # As in torch's kernels, autograd must not see the write: a batch norm that ran in inference before may have saved them.
    with _unsafe_preserve_version_counter(old):
        # Not copy_: torch.func.vmap has no rule for it, which the simulator needs for many clients.
        old.mul_(1 - momentum).add_(new * momentum)


_NORM_RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    function: partial(_train_norm, function) for function in _SIGNATURES
}


RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.embedding_bag: embedding_bag,
    F.one_hot: one_hot,
    F.rrelu: rrelu,
    Tensor.__deepcopy__: copy_detached,
    Tensor.__getitem__: select_entries,
    Tensor.bincount: bincount,
    torch.bincount: bincount,
    torch.bucketize: bucketize,
    torch.searchsorted: searchsorted,
    torch.cdist: cdist,
    **_NORM_RULES,
    **recurrent.RULES,
    **storage.RULES,
}
"""Rules by torch function."""


class RewriteMode(TorchFunctionMode):
    """Mode that replaces some torch functions by rules in :data:`RULES`, which a graph can contain."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        rewritten = NotImplemented if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if rewritten is NotImplemented else rewritten
