"""torch itself, with given numbers in place of its generator: what the rules are compared with.

The numbers go in below autograd, where torch's own kernels ask for them. Nothing of the model or of the functions that it
calls is replaced.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class Numbers:
    """Uniform numbers of any shape, the same in every run with one seed, and what was asked for."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, shape: Any) -> Tensor:
        self.shapes.append(tuple(shape))
        return torch.rand(tuple(shape), generator=self._generator)


class Given(TorchDispatchMode):
    """Runs torch's kernels, those that draw with the numbers of ``draw``."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self._draw = draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or "flash_attention" in str(func):
            return func(*args, **(kwargs or {}))  # the fused kernel runs where nothing is dropped
        return getattr(self, f"_{func.overloadpacket.__name__.strip('_')}")(func, *args, **(kwargs or {}))

    def _normals(self, shape: Any) -> Tensor:
        first, second = self._draw((2, *shape))
        return torch.sqrt(-2 * torch.log(1 - first)) * torch.cos(2 * math.pi * second)

    def _bernoulli(self, func: Any, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        p = rest[0] if rest else kwargs.get("p", x if "bernoulli_" not in str(func) else 0.5)
        drawn = (self._draw(x.shape) >= 1 - p).to(x.dtype)
        return x.copy_(drawn) if "bernoulli_" in str(func) else drawn

    def _rand(self, func: Any, size: Any, **kwargs: Any) -> Tensor:
        return self._draw(size)

    def _rand_like(self, func: Any, x: Tensor, **kwargs: Any) -> Tensor:
        return self._draw(x.shape)

    def _randn(self, func: Any, size: Any, **kwargs: Any) -> Tensor:
        return self._normals(size)

    def _randn_like(self, func: Any, x: Tensor, **kwargs: Any) -> Tensor:
        return self._normals(x.shape)

    def _normal(self, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
        if "normal_" in str(func):  # its arguments are the tensor, the mean and the deviation
            center, spread = (std, size) if size is not None else (0.0, 1.0)
            return mean.copy_(center + spread * self._normals(mean.shape))
        if size is not None:
            return mean + std * self._normals(size)
        shape = torch.broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Tensor)))
        return mean + std * self._normals(shape)

    def _uniform(self, func: Any, x: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Tensor:
        return x.copy_(low + (high - low) * self._draw(x.shape))

    def _exponential(self, func: Any, x: Tensor, rate: float = 1.0, **kwargs: Any) -> Tensor:
        return x.copy_(-torch.log(1 - self._draw(x.shape)) / rate)

    def _rrelu_with_noise(
        self, func: Any, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, *rest: Any
    ) -> Tensor:
        slope = torch.where(x <= 0, lower + (upper - lower) * self._draw(x.shape), torch.ones_like(x))
        noise.copy_(slope)
        return x.copy_(x * slope) if "noise_" in str(func) else x * slope
