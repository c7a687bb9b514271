"""Bags of embeddings in ops that graphs have: torch's own kernel adds rows where no exporter sees them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EmbeddingBag(nn.EmbeddingBag):
    """``nn.EmbeddingBag``, its state included: sums, means or maxima of the rows that a bag names.

    ``input`` is (B, T), a bag a row; or (L,) with ``offsets``, where each bag begins. Entries ``padding_idx`` count for
    nothing, and a bag without others is 0. With ``max_norm``, which changes weights in the forward pass, and where torch
    raises an error, it is torch's.
    """

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        refused = (input.dim() == 1) != (offsets is not None) or (
            per_sample_weights is not None and self.mode != "sum"
        )
        if refused or self.max_norm is not None:
            return super().forward(input, offsets, per_sample_weights)
        rows = F.embedding(input, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        counted = torch.ones_like(input, dtype=torch.bool)
        if self.padding_idx is not None:
            counted = input != self.padding_idx
        if offsets is not None:  # every bag sees all rows, those of others as padding
            counted = counted & self._own(offsets, input.shape[0])
            rows = rows.unsqueeze(0)
        if self.mode == "max":
            hidden = torch.where(counted.unsqueeze(-1), rows, torch.full_like(rows, -math.inf))
            return torch.where(counted.any(1, keepdim=True), hidden.max(1).values, rows.new_zeros(()))
        share = counted.to(rows.dtype)
        if per_sample_weights is not None:
            share = share * per_sample_weights
        bags = share @ rows[0] if offsets is not None else (share.unsqueeze(-1) * rows).sum(1)
        if self.mode == "mean":
            bags = bags / counted.to(rows.dtype).sum(1, keepdim=True).clamp_min(1.0)
        return bags

    def _own(self, offsets: Tensor, length: int) -> Tensor:
        """Which entries each bag holds: bool (bags, length)."""
        if not self.include_last_offset:
            offsets = torch.cat((offsets, offsets.new_full((1,), length)))
        place = torch.arange(length, device=offsets.device)
        return (place >= offsets[:-1, None]) & (place < offsets[1:, None])
