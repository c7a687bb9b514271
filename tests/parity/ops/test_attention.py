"""Attention: the plain function, and torch's layers made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.ops.case import Case, Family, Mask, agrees, every

HEADS = (2, 2, 5, 4)  # batch, heads, positions, features of a head
attend = F.scaled_dot_product_attention


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of a sequence [N, T, 8] to itself."""

    def __init__(self, *, causal: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.causal = causal

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        out, weights = self.inner(x, x, x, attn_mask=mask if self.causal else None)
        return (out, weights)


class CrossAttention(nn.Module):
    """Queries [N, T, 8] attend to a memory [N, S, 6]; ``padding`` [N, S] marks positions that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        padding = torch.cat([torch.zeros_like(padding[:, :1]), padding[:, 1:]], 1)  # one position is there
        return self.inner(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True, **options)


class Decoder(nn.Module):
    """A causal decoder layer over a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.inner(x, memory, tgt_mask=mask, tgt_is_causal=True)


CASES: Family = {
    "scaled_dot_product_attention": {
        "plain": Case(attend, HEADS, HEADS, HEADS),
        "causal": Case(lambda q, k, v: attend(q, k, v, is_causal=True), HEADS, HEADS, HEADS),
        "own scale": Case(lambda q, k, v: attend(q, k, v, scale=0.3), HEADS, HEADS, HEADS),
        "added mask": Case(attend, HEADS, HEADS, HEADS, (5, 5)),
        "boolean mask": Case(
            lambda q, k, v, m: attend(q, k, v, m | torch.eye(5, dtype=torch.bool)),
            HEADS,
            HEADS,
            HEADS,
            Mask((2, 1, 5, 5)),
        ),
        "other length of keys and size of values": Case(attend, HEADS, (2, 2, 7, 4), (2, 2, 7, 3)),
        "grouped queries": Case(
            lambda q, k, v: attend(q, k, v, enable_gqa=True), (2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)
        ),
    },
    "MultiheadAttention": {
        "with weights": Case(SelfAttention(), (2, 5, 8)),
        "causal": Case(SelfAttention(causal=True), (2, 5, 8)),
        "no bias": Case(SelfAttention(bias=False), (2, 5, 8)),
        "cross, other sizes, padded keys": Case(CrossAttention(), (2, 5, 8), (2, 7, 6), Mask((2, 7))),
    },
    "TransformerEncoderLayer": {
        "norm behind": Case(encoder(), (2, 5, 8)),
        "norm in front, gelu": Case(encoder(norm_first=True, activation="gelu"), (2, 5, 8)),
        "inference": Case(encoder().eval(), (2, 5, 8)),
    },
    "TransformerDecoderLayer": {"causal": Case(Decoder(), (2, 5, 8), (2, 6, 8))},
}


MORE = (
    "MultiheadAttention, cross, other sizes, padded keys",
    "scaled_dot_product_attention, causal",
    "scaled_dot_product_attention, grouped queries",
)


# A layer of what the cases above have each by itself.
RARE = ("TransformerDecoderLayer, causal",)


@pytest.mark.sample(2)
@every(CASES, MORE, RARE, differentiable=True)
def test_attention_equals_torch(case: Case, again: bool, form: str) -> None:
    agrees(case.step(again), form)
