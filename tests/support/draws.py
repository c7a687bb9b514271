"""Numbers of a device's noise ports, given to torch's own draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgefl.wire.tensors import Arrays

_DROPOUTS = frozenset({"dropout", "dropout_"})
# Functions that draw and have no form here.
_OTHERS = frozenset(
    {"randn", "randn_like", "normal", "normal_"}
    | {"dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
    | {"rrelu", "rrelu_", "exponential_", "randint", "randperm", "multinomial"}
)


class Undecided(Exception):
    """The judge has no form for what the module draws."""


class Draws:
    """Noise of each step by the names of its ports, ``PATH.uniform`` with ``_1`` for a second draw of one module."""

    def __init__(self, noise: list[Arrays]) -> None:
        self._noise = noise

    @staticmethod
    def none() -> AbstractContextManager[None]:
        """Return the context of a training whose device draws nothing."""
        return nullcontext()

    @contextmanager
    def step(self, module: nn.Module, number: int) -> Iterator[None]:
        """Feed the dropouts of one step. Raise Undecided for any other draw."""
        paths: list[str] = []
        taken: set[str] = set()
        noise = self._noise[number]
        names = {id(part): name for name, part in module.named_modules()}

        def enter(part: nn.Module, _: Any) -> None:
            paths.append(names.get(id(part), ""))

        def leave(_part: nn.Module, _args: Any, _out: Any) -> None:
            paths.pop()

        def drawn(shape: torch.Size) -> Tensor:
            fitting = [
                name
                for name, each in noise.items()
                if name not in taken and tuple(each.shape) == tuple(shape)
            ]
            path = paths[-1] if paths else ""
            exact = [name for name in fitting if path and _inside(path, name)] or fitting
            if not exact:
                # Torch draws and the device does not: weights differ by it.
                return torch.rand(shape)
            taken.add(exact[0])
            return torch.from_numpy(noise[exact[0]])

        class Fed(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                name = getattr(func, "__name__", "")
                if name in _DROPOUTS:
                    return _dropout(func, drawn, *args, **kwargs)
                if name == "scaled_dot_product_attention" and _rate(args, kwargs) > 0:
                    return _attention(drawn, *args, **kwargs)
                if name in ("bernoulli", "bernoulli_"):
                    return _bernoulli(name, drawn, *args, **kwargs)
                if name == "uniform_":
                    return _uniform_(drawn, *args, **kwargs)
                if name in ("rand", "rand_like"):
                    made = func(*args, **kwargs)
                    return drawn(made.shape).to(made.dtype)
                if name in _OTHERS and _in_training(name, args, kwargs):
                    raise Undecided(f"{name} draws")
                if name == "native_dropout" or (name in ("lstm", "gru", "rnn_tanh") and _recurrent(args)):
                    raise Undecided(f"{name} draws")
                return func(*args, **kwargs)

        handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave),
        ]
        try:
            with Fed():
                yield
        finally:
            for handle in handles:
                handle.remove()


def _dropout(
    func: Any, draw: Any, input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **kw: Any
) -> Any:
    training = kw.pop("train", training)
    if not training or not p:
        return func(input, p, training, *rest, **kw)
    return torch.where(draw(input.shape).to(input.dtype) >= p, input / (1 - p), torch.zeros_like(input))


def _inside(path: str, name: str) -> bool:
    """Return True if the port ``name`` belongs to the module ``path``; units join the parts of a path by ``_``."""
    return f".{path}.".replace("_", ".") in f".{name}.".replace("_", ".")


def _bernoulli(name: str, draw: Any, x: Tensor, p: Tensor | float | None = None, **_: Any) -> Tensor:
    chance = p if p is not None else 0.5 if name == "bernoulli_" else x
    ones = (draw(x.shape) >= 1.0 - chance).to(x.dtype)
    return x.copy_(ones) if name == "bernoulli_" else ones


def _uniform_(draw: Any, x: Tensor, *bounds: float, **named: float) -> Tensor:
    low, high = (
        *bounds,
        *(named.get(name, value) for name, value in (("from", 0.0), ("to", 1.0))[len(bounds) :]),
    )
    return x.copy_(low + (high - low) * draw(x.shape))


def _attention(
    draw: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention as torch documents it, with given draws."""
    if enable_gqa:
        raise Undecided("grouped attention draws")
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row that may look at nothing has weights of 0.
    weights = scores.softmax(-1).where(scores.amax(-1, keepdim=True) > -math.inf, 0.0)
    kept = draw(weights.shape).to(weights.dtype) >= dropout_p
    return torch.where(kept, weights / (1.0 - dropout_p), torch.zeros_like(weights)) @ value


def _rate(args: Any, kwargs: Any) -> float:
    return float(args[4]) if len(args) > 4 else float(kwargs.get("dropout_p", 0.0))


def _in_training(name: str, args: Any, kwargs: Any) -> bool:
    flags = [each for each in (*args, *kwargs.values()) if isinstance(each, bool)]
    return not flags or any(flags)


def _recurrent(args: Any) -> bool:
    """Return True if a recurrent layer drops in this call: its rate and mode follow each other."""
    return any(
        isinstance(rate, float) and rate > 0 and isinstance(mode, bool) and mode
        for rate, mode in pairwise(args)
    )
