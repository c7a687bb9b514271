"""Random operations of torch, computed from given numbers uniform in [0, 1).

Each rule in :data:`RULES` has the function ``draw`` as its first argument, followed by the arguments of the torch
function. It returns NotImplemented if the call draws nothing, or is not supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Draw = Callable[[Sequence[int]], Tensor]
"""Function that returns new numbers of a shape, float, uniform in [0, 1)."""
Rule = Callable[..., Any]

# exponential_ never gives 0, because people take its logarithm: half the step between two numbers of `draw`.
_LEAST = 2.0**-25
# Minus the value of SELU at minus infinity, by which alpha dropout replaces an entry.
_ALPHA = 1.7580993408473766


def normal(draw: Draw, shape: Sequence[int]) -> Tensor:
    """Return standard normal numbers of a shape, from uniform numbers u of (2, *shape).

    They are sqrt(-2 ln(1 - u_0)) cos(2 pi u_1) (Box and Muller 1958).
    """
    radius, angle = draw((2, *shape)).unbind()
    return torch.sqrt(-2.0 * torch.log(1.0 - radius)) * torch.cos(2.0 * math.pi * angle)


def drop_entries(draw: Draw, x: Tensor, rate: float) -> Tensor:
    """Return ``x`` with dropout: each entry is kept with probability 1 - rate and divided by 1 - rate, or else set to 0.

    ``draw`` returns the uniform random numbers, one for each entry.
    """
    return _drop(draw, x, rate, x.shape)


def _drop(draw: Draw, x: Tensor, rate: float, shape: Sequence[int]) -> Tensor:
    """Return ``x`` with dropout by one random number per entry of ``shape``, which broadcasts to ``x``."""
    if rate == 1.0:
        return x * 0.0
    return torch.where(draw(shape) >= rate, x / (1.0 - rate), torch.zeros_like(x))


def _dropout(draw: Draw, input: Tensor, p: float, train: bool) -> Any:
    return drop_entries(draw, input, p) if train and p else NotImplemented


def _dropout_(draw: Draw, input: Tensor, p: float, train: bool) -> Any:
    if not train or not p:
        return NotImplemented
    return input.mul_(drop_entries(draw, torch.ones_like(input), p))


def _channels(x: Tensor) -> tuple[int, ...]:
    """Return the shape (rows, channels, 1, ...) with one number for each row and channel of ``x``."""
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def _feature_dropout(draw: Draw, input: Tensor, p: float, train: bool) -> Any:
    return _drop(draw, input, p, _channels(input)) if train and p else NotImplemented


def _alpha(draw: Draw, x: Tensor, rate: float, shape: Sequence[int]) -> Tensor:
    """Apply alpha dropout, which preserves mean and variance of SELU activations (Klambauer et al. 2017, section 3).

    Draws one random number per entry of ``shape``, which broadcasts to ``x``.
    """
    if rate == 1.0:
        return x * 0.0
    scale = 1.0 / math.sqrt((_ALPHA**2 * rate + 1.0) * (1.0 - rate))
    kept = (draw(shape) >= rate).to(x.dtype)
    return x * (kept * scale) + ((kept - 1.0) * (_ALPHA * scale) + _ALPHA * scale * rate)


def _alpha_dropout(draw: Draw, input: Tensor, p: float, train: bool) -> Any:
    return _alpha(draw, input, p, input.shape) if train and p else NotImplemented


def _feature_alpha_dropout(draw: Draw, input: Tensor, p: float, train: bool) -> Any:
    return _alpha(draw, input, p, _channels(input)) if train and p else NotImplemented


def _rrelu(
    draw: Draw,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> Any:
    if not training:
        return NotImplemented
    slope = lower + (upper - lower) * draw(input.shape).to(input.dtype)
    return torch.where(input <= 0, input * slope, input)


def _attention(
    draw: Draw,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not dropout_p:
        return NotImplemented
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
    if is_causal:
        square = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        attn_mask = square.tril()
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = torch.where(attn_mask, scores, torch.full_like(scores, -math.inf))
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row whose mask hides all positions has weights of 0.
    softmax = torch.softmax if attn_mask is None else torch.ops.aten._safe_softmax.default
    return drop_entries(draw, softmax(scores, -1), dropout_p) @ value


def _empty(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return an empty tensor for the arguments of ``torch.rand``, ``torch.randn`` or ``torch.rand_like``.

    Args:
        make: ``torch.empty`` or ``torch.empty_like``.
        args: Positional arguments.
        kwargs: Keyword arguments. Those that ``make`` does not have are dropped.
    """
    options = {name: value for name, value in kwargs.items() if name not in ("generator", "requires_grad")}
    return make(*args, **options)


def _uniform_like(draw: Draw, empty: Tensor) -> Tensor:
    return draw(empty.shape).to(empty.dtype)


def _normal_like(draw: Draw, empty: Tensor) -> Tensor:
    return normal(draw, empty.shape).to(empty.dtype)


def _factory(make: Callable[..., Tensor], numbers: Callable[[Draw, Tensor], Tensor]) -> Rule:
    """Return the rule of a function that creates a random tensor.

    Args:
        make: Function that creates an empty tensor from the function's arguments.
        numbers: Function (draw, empty tensor) that returns random numbers of its shape and dtype.
    """

    def rule(draw: Draw, *args: Any, **kwargs: Any) -> Tensor:
        return NotImplemented if "out" in kwargs else numbers(draw, _empty(make, *args, **kwargs))

    return rule


def _normal(
    draw: Draw,
    mean: Tensor | float,
    std: Tensor | float = 1.0,
    size: Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    if "out" in kwargs:
        return NotImplemented
    if size is not None:
        return mean + std * _normal_like(draw, _empty(torch.empty, size, **kwargs))
    given = torch.broadcast_tensors(*(value for value in (mean, std) if isinstance(value, Tensor)))[0]
    return mean + std * _normal_like(draw, given)


def _normal_(draw: Draw, x: Tensor, mean: float = 0.0, std: float = 1.0, **kwargs: Any) -> Tensor:
    return x.copy_(mean + std * _normal_like(draw, x))


def _uniform_(draw: Draw, x: Tensor, *bounds: float, **kwargs: Any) -> Tensor:
    low, high = dict(enumerate(bounds)), (0.0, 1.0)
    start, stop = (low.get(place, kwargs.get(name, high[place])) for place, name in enumerate(("from", "to")))
    return x.copy_(start + (stop - start) * _uniform_like(draw, x))


def _bernoulli(draw: Draw, input: Tensor, p: float | None = None, **kwargs: Any) -> Any:
    if "out" in kwargs:
        return NotImplemented
    return (draw(input.shape) >= 1.0 - (input if p is None else p)).to(input.dtype)


def _bernoulli_(draw: Draw, x: Tensor, p: Tensor | float = 0.5, **kwargs: Any) -> Tensor:
    return x.copy_(draw(x.shape) >= 1.0 - p)


def _exponential_(draw: Draw, x: Tensor, lambd: float = 1.0, **kwargs: Any) -> Tensor:
    return x.copy_(torch.log(1.0 - draw(x.shape)).neg().clamp_min(_LEAST) / lambd)


def _in_place(rule: Rule) -> Rule:
    """Return the variant of ``rule`` that writes the result into its input."""

    def write(draw: Draw, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = rule(draw, input, *args, **kwargs)
        return result if result is NotImplemented else input.copy_(result)

    return write


RULES: Mapping[str, Rule] = {
    "dropout": _dropout,
    "dropout_": _dropout_,
    "feature_dropout": _feature_dropout,
    "feature_dropout_": _in_place(_feature_dropout),
    "alpha_dropout": _alpha_dropout,
    "alpha_dropout_": _in_place(_alpha_dropout),
    "feature_alpha_dropout": _feature_alpha_dropout,
    "feature_alpha_dropout_": _in_place(_feature_alpha_dropout),
    "rrelu": _rrelu,
    "rrelu_": _in_place(_rrelu),
    "scaled_dot_product_attention": _attention,
    "rand": _factory(torch.empty, _uniform_like),
    "rand_like": _factory(torch.empty_like, _uniform_like),
    "randn": _factory(torch.empty, _normal_like),
    "randn_like": _factory(torch.empty_like, _normal_like),
    "normal": _normal,
    "normal_": _normal_,
    "uniform_": _uniform_,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "exponential_": _exponential_,
}
"""Rules by the name of a torch function or tensor method. A name that ends in ``_`` writes into its first argument."""
