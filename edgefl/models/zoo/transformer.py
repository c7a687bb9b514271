"""Transformers: a small Vision Transformer (pre-norm) and a small BERT-like encoder (post-norm), each with a head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.initial import Initial, initialize
from edgefl.models.losses import CausalLM
from edgefl.models.spec import ModelSpec, sequential

Pool = Literal["mean", "token"]


class Attention(nn.Module):
    """Self-attention with ``heads`` heads: (B, T, W) -> (B, T, W).

    softmax(q k^T / sqrt(W / heads)) v per head; ``qkv`` projects to the three at once, ``out`` mixes the heads. The width
    between ``qkv`` and ``out`` follows from their weights, and may differ from W. ``causal``: a position attends to those
    before it and itself.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ModelError(
                f"{heads} attention heads do not divide the width {width}", width=width, heads=heads
            )
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Feedforward(nn.Module):
    """Dense, GELU, dense."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(F.gelu(self.inner(x)))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each with a residual, dropout on what is added, and a layer norm.

    Pre-norm: ``x + f(norm(x))``. Post-norm: ``norm(x + f(x))``.
    """

    def __init__(
        self, width: int, heads: int, *, pre: bool, rate: float, eps: float, causal: bool = False
    ) -> None:
        super().__init__()
        self.pre = pre
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, causal=causal)
        self.drop1 = nn.Dropout(rate)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.feedforward = Feedforward(width, 4 * width)
        self.drop2 = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.drop1(self.attention(self.norm1(x)))
            grown: Tensor = x + self.drop2(self.feedforward(self.norm2(x)))
            return grown
        x = self.norm1(x + self.drop1(self.attention(x)))
        out: Tensor = self.norm2(x + self.drop2(self.feedforward(x)))
        return out


class Positions(nn.Module):
    """Learned vectors per position, (T, W), that are added to the input; with ``token``, a learned token comes first."""

    def __init__(self, length: int, width: int, *, token: bool = False) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, width)) if token else None
        self.weight = nn.Parameter(torch.empty(length + token, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        short = x.shape[1] < self.weight.shape[0]
        return x + (self.weight[: x.shape[1]] if short else self.weight)

    def fill(self, generator: torch.Generator) -> None:
        """Fill with normal values of deviation 0.02."""
        for parameter in self.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)


class PatchEmbedding(nn.Module):
    """Image (B, C, S, S) -> one vector per patch, in rows, with positions: (B, (S / patch)^2 [+ 1], W)."""

    def __init__(self, in_channels: int, size: int, patch: int, width: int, *, token: bool) -> None:
        super().__init__()
        if size % patch:
            raise ModelError(
                f"patches of {patch} do not divide the image size {size}", size=size, patch=patch
            )
        self.conv = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.positions = Positions((size // patch) ** 2, width, token=token)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.positions(self.conv(x).flatten(2).transpose(1, 2))
        return out


class PatchHead(nn.Module):
    """Layer norm, the class token or the mean over patches, dense layer: (B, T, W) -> (B, classes)."""

    def __init__(self, width: int, classes: int, pool: Pool, eps: float) -> None:
        super().__init__()
        self.pool = pool
        self.norm = nn.LayerNorm(width, eps=eps)
        self.dense = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        out: Tensor = self.dense(x[:, 0] if self.pool == "token" else x.mean(dim=1))
        return out


class TokenEmbedding(nn.Module):
    """Token numbers (B, T) int64 -> token plus position vectors, layer norm unless ``eps`` is None, dropout: (B, T, W)."""

    def __init__(self, vocabulary: int, length: int, width: int, rate: float, eps: float | None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = Positions(length, width)
        self.norm = nn.Identity() if eps is None else nn.LayerNorm(width, eps=eps)
        self.drop = nn.Dropout(rate)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.positions(self.tokens(tokens))))
        return out


class NextHead(nn.Module):
    """Layer norm and decoder: (B, T, W) -> logits of the next token (B, T, V)."""

    def __init__(self, width: int, vocabulary: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.decoder = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.norm(x))
        return out


class PooledHead(nn.Module):
    """BERT's pooler and classifier: tanh of a dense layer on the first token, dropout, dense layer."""

    def __init__(self, width: int, classes: int, rate: float) -> None:
        super().__init__()
        self.pooler = nn.Linear(width, width)
        self.drop = nn.Dropout(rate)
        self.dense = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(self.drop(torch.tanh(self.pooler(x[:, 0]))))
        return out


def vit(
    *,
    in_channels: int = 3,
    size: int = 32,
    classes: int = 10,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    pool: Pool = "mean",
    rate: float = 0.0,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return a Vision Transformer: patch embedding, ``depth`` pre-norm blocks, head; 2,693,194 parameters at the defaults.

    ViT-Ti/16 is ``size=224, patch=16, depth=12, pool="token", classes=1000`` (5,717,416 parameters).
    """
    if pool not in ("mean", "token"):
        raise ModelError(f"a ViT pools by 'mean' or 'token', found {pool!r}", pool=pool)
    eps = 1e-6

    def units() -> nn.Sequential:
        blocks = _blocks(depth, width, heads, pre=True, rate=rate, eps=eps)
        first = PatchEmbedding(in_channels, size, patch, width, token=pool == "token")
        return sequential([("embed", first), *blocks, ("head", PatchHead(width, classes, pool, eps))])

    return ModelSpec("vit", initialize(units, seed, initial), TensorSpec((in_channels, size, size)), classes)


def bert(
    *,
    length: int = 64,
    vocabulary: int = 8192,
    classes: int = 2,
    width: int = 256,
    depth: int = 4,
    heads: int = 4,
    rate: float = 0.1,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return a BERT-like encoder with a classification head, of BERT-mini's scale; a sample is ``length`` token numbers.

    Differences from BERT: no segment embeddings and no padding mask (every position attends to all), because one
    tensor crosses between units; no dropout on attention weights, which fused attention has no input for.
    """
    eps = 1e-12

    def units() -> nn.Sequential:
        blocks = _blocks(depth, width, heads, pre=False, rate=rate, eps=eps)
        first = TokenEmbedding(vocabulary, length, width, rate, eps)
        return sequential([("embed", first), *blocks, ("head", PooledHead(width, classes, rate))])

    sample = TensorSpec((length,), torch.int64, vocabulary)
    return ModelSpec("bert", initialize(units, seed, initial), sample, classes)


def gpt(
    *,
    length: int = 64,
    vocabulary: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    rate: float = 0.1,
    initial: Initial = "keras",
    seed: int = 0,
) -> ModelSpec:
    """Return a small model of GPT-2's form: token and position vectors, causal pre-norm blocks, norm and decoder.

    A sample is ``length`` tokens, its label the ``length`` tokens that follow each; 867,072 parameters at the defaults.

    Embedding and decoder are not tied, so that a tier may hold the decoder alone.
    """
    eps = 1e-5

    def units() -> nn.Sequential:
        blocks = _blocks(depth, width, heads, pre=True, rate=rate, eps=eps, causal=True)
        first = TokenEmbedding(vocabulary, length, width, rate, eps=None)
        return sequential([("embed", first), *blocks, ("head", NextHead(width, vocabulary, eps))])

    sample = TensorSpec((length,), torch.int64, vocabulary)
    return ModelSpec(
        "gpt",
        initialize(units, seed, initial),
        sample,
        vocabulary,
        loss=CausalLM(ignore_index=None, shift=False),
    )


def _blocks(
    depth: int, width: int, heads: int, *, pre: bool, rate: float, eps: float, causal: bool = False
) -> list[tuple[str, nn.Module]]:
    return [
        (f"block{number}", Block(width, heads, pre=pre, rate=rate, eps=eps, causal=causal))
        for number in range(1, depth + 1)
    ]
