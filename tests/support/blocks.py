# mypy: ignore-errors
"""Blocks that generated modules are composed of, written as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """x plus a part of it, scaled by a learned number."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.inner(x)


class Branches(nn.Module):
    """Two parts side by side, joined in ``dim``."""

    def __init__(self, left: nn.Module, right: nn.Module, dim: int) -> None:
        super().__init__()
        self.left, self.right, self.dim = left, right, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], self.dim)


class Gated(nn.Module):
    """A part times a gate of the same input."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * torch.sigmoid(self.gate(x))
        return out


class Quiet(nn.Module):
    """A part whose gradient is switched off inside forward: ``no_grad``, ``inference`` or ``detach``."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                h = self.inner(x)
        elif self.how == "inference":
            with torch.inference_mode():
                h = self.inner(x)
            h = h.clone()
        else:
            h = self.inner(x).detach()
        out: Tensor = x + h
        return out


class Moving(nn.Module):
    """Subtracts a moving average of its input, kept in a buffer."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.reshape(-1, x.shape[-1]).mean(0), self.rate)
        return x - self.average


class Counting(nn.Module):
    """A warm-up by an integer buffer that forward reads and moves."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (self.calls.to(x.dtype) / self.steps).clamp(max=1.0)


class Logging(nn.Module):
    """Counts its calls and keeps its last output; its arithmetic reads neither."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach()
        return x


class Branched(nn.Module):
    """Other arithmetic in training than in inference."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x if self.training else torch.tanh(x)


class FunctionalDropout(nn.Module):
    """Dropout by function and the module's own flag."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training)


class Standardised(nn.Module):
    """Subtracts a mean and divides by a root of buffers with meaningful values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(-1, 1, width))
        self.register_buffer("var", torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.var.sqrt()


class Experts(nn.Module):
    """Two experts weighed by a softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.router = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        outs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outs * weights.unsqueeze(-2)).sum(-1)


class LowRank(nn.Module):
    """A frozen layer and a learned update of low rank, merged at each call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, width) / width)
        self.up = nn.Parameter(torch.randn(width, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)


class Called(nn.Module):
    """A layer that is called twice, the second time with scaled weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        scaled = {name: 0.5 * each for name, each in self.layer.named_parameters()}
        out: Tensor = torch.func.functional_call(self.layer, scaled, (h,))
        return out


class Recurrent(nn.Module):
    """A recurrent layer without its state."""

    def __init__(self, kind: str, width: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.rnn: nn.Module = getattr(nn, kind)(width, hidden, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x)[0]
        return out


class ScaledGRU(nn.GRU):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Any:
        out, last = super().forward(input, hx)
        return out * 1.5, last


class Stepped(nn.Module):
    """A cell in a loop over the sequence, its state in an attribute."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell, self.h = nn.GRUCell(width, hidden), torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        outs = []
        for t in range(x.shape[1]):
            self.h = self.cell(x[:, t], self.h)
            outs.append(self.h)
        return torch.stack(outs, 1)


class Attention(nn.Module):
    """Self-attention, causal or not, by torch's layer."""

    def __init__(self, width: int, heads: int, rate: float, causal: bool) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(width, heads, dropout=rate, batch_first=True)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        out: Tensor = self.att(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + out


class OwnAttention(nn.Module):
    """Self-attention by function; its rate depends on the mode."""

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.qkv, self.heads, self.rate = nn.Linear(width, 3 * width), heads, rate

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(2)


class Positions(nn.Module):
    """Adds a table of positions outside of the state."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        table = torch.sin(torch.arange(length)[:, None] * torch.linspace(0.1, 1.0, width))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class OverTime(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, width: int, out: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, out, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return out


class Pooled(nn.Module):
    """One vector of a sequence: ``mean``, ``last``, ``max`` or ``learned`` weights."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.score = nn.Linear(width, 1) if how == "learned" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.score is not None:
            return (x * self.score(x).softmax(1)).sum(1)
        return {"mean": lambda: x.mean(1), "last": lambda: x[:, -1], "max": lambda: x.amax(1)}[self.how]()


class SqueezeExcite(nn.Module):
    """Channels weighed by what their means say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(channels, 2), nn.ReLU(), nn.Linear(2, channels), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.f(x.mean((2, 3)))[:, :, None, None]
        return out


class StandardisedConv(nn.Conv2d):
    """A convolution whose weight is standardised at each call."""

    def forward(self, input: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(input, (self.weight - mean) / (std + 1e-2), self.bias)


class ActiveNorm(nn.BatchNorm2d):
    """A batch norm with an activation, as a subclass."""

    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(super().forward(input), 0.1)


class Looped(nn.Module):
    """A root that calls its layers in a loop, with a long skip connection where shapes allow one."""

    def __init__(self, layers: Sequence[nn.Module], kept: Sequence[str] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.kept = tuple(kept)

    def train(self, mode: bool = True) -> Looped:
        """Leave the parts named in ``kept`` in inference mode."""
        super().train(mode)
        for name in self.kept:
            self.get_submodule(name).eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        skip: Tensor | None = None
        for layer in self.layers:
            before, x = x, layer(x)
            if skip is not None and skip.shape == x.shape:
                x = x + 0.3 * skip
            if before.is_floating_point():
                skip = before
        return x
