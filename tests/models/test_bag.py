"""Bags of embeddings compute what torch's do, in ops that graphs have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from edgefl.models.layers.visible import visible

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 9, (4, 6), generator=GENERATOR)
TOKENS[2] = 1  # a bag of padding alone, where there is padding


def values(layer: nn.Module, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """The output, and the gradients of a curved loss."""
    given = [
        each.clone().requires_grad_() if each is not None and each.is_floating_point() else each
        for each in inputs
    ]
    out = layer(*given)
    wanted = [*layer.parameters(), *(each for each in given if each is not None and each.requires_grad)]
    return (out, *torch.autograd.grad((out * out.cos()).sum(), wanted))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["rows", "offsets", "offsets with the last"])
def test_a_bag_is_that_of_torch(form: str, mode: str, padding: int | None) -> None:
    last = form == "offsets with the last"
    layer = nn.EmbeddingBag(
        9, 3, mode=mode, padding_idx=padding, include_last_offset=last, dtype=torch.float64
    )
    tokens, offsets = TOKENS, None
    if form != "rows":
        tokens, offsets = TOKENS.flatten(), torch.tensor([0, 5, 5, 12, *([24] if last else [])])
    weights = torch.rand(tokens.shape, generator=GENERATOR, dtype=torch.float64) if mode == "sum" else None

    found = values(visible(layer), tokens, offsets, weights)

    for one, other in zip(found, values(layer, tokens, offsets, weights), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "inputs", [(TOKENS[0],), (TOKENS, torch.tensor([0])), (TOKENS, None, torch.ones(4, 6))]
)
def test_what_torch_refuses_is_refused(inputs: tuple[Tensor | None, ...]) -> None:
    layer = nn.EmbeddingBag(9, 3, mode="mean")
    for one in (layer, visible(layer)):
        with pytest.raises((ValueError, NotImplementedError)):
            one(*inputs)
