"""The gradient of weights that are masked in groups (fiarse.md 8.3, R4)::

    w_b = x_b 1{s_b >= theta},        p_b = clip((s_b - theta) / (s_b + theta), 0, 1)  for the backward pass
    dF/dx_j = M_b (g_j + (sum_{i in b} g_i x_i) 2 theta / (s_b + theta)^2 ds_b/dx_j),        g = dF/dw

by the product rule of fiarse.md 2.4 with one mask for the whole group. theta is a constant. A score is the root mean square
of the n entries it reads, ds/dx_j = x_j / (n s), or their mean magnitude, ds/dx_j = sign(x_j) / n. For n = 1 both are
eq. (3). Entries of a group that its score does not read (biases, norm pairs) have ds/dx_j = 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Measure = Literal["rms", "mean"]


def slope(score: Tensor, theta: Tensor) -> Tensor:
    """2 theta / (s + theta)^2, the slope of p at the score s, of any shape; 0 where theta = 0, for s = 0 too."""
    both = score + theta
    safe = torch.where(both > 0, both, torch.ones(()))
    return 2 * (theta / safe) / safe


def direction(x: Tensor, score: Tensor, entries: int, measure: Measure) -> Tensor:
    """ds/dx for entries ``x`` of groups of that many ``entries``; ``score`` broadcasts to ``x``. 0 where s = 0."""
    if measure == "mean":
        return x.sign() / entries
    return x / (entries * torch.where(score > 0, score, torch.ones(())))
