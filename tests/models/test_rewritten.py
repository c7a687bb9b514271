"""Functions of torch that are rewritten in training: the same values and gradients, ties and padding included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.tensors import TensorSpec
from edgefl.models.draws.steering import Steered

BAGS = torch.tensor([[1, 4, 1], [0, 0, 0], [3, 0, 2]])
VIDEO = torch.randint(0, 4, (2, 3, 7, 6, 5), generator=torch.Generator().manual_seed(0)).float()
LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    **{f"bags, {mode}": (nn.EmbeddingBag(5, 3, mode=mode), BAGS) for mode in ("sum", "mean", "max")},
    **{
        f"bags with padding, {mode}": (nn.EmbeddingBag(5, 3, mode=mode, padding_idx=0), BAGS)
        for mode in ("sum", "mean", "max")
    },
    "maxima, with ties": (nn.MaxPool3d(2), VIDEO),
    "maxima, padded": (nn.MaxPool3d((3, 2, 3), stride=2, padding=1), VIDEO),
    "maxima, dilated and in ceil mode": (nn.MaxPool3d(2, 2, dilation=2, ceil_mode=True), VIDEO),
    "maxima, unbatched": (nn.MaxPool3d(2, stride=1), VIDEO[0]),
    "means": (nn.AvgPool3d(2), VIDEO),
    "means, padded": (nn.AvgPool3d((3, 2, 3), stride=2, padding=1), VIDEO),
    "means, padding not counted": (nn.AvgPool3d(3, 2, 1, count_include_pad=False), VIDEO),
    "means, own divisor": (nn.AvgPool3d(2, divisor_override=3), VIDEO),
}


def trained(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of an uneven sum of it."""
    leaves = [*layer.parameters()]
    if x.is_floating_point():
        leaves.append(x := x.clone().requires_grad_())
    out = layer(x)
    weights = torch.arange(1.0, out.numel() + 1).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_what_torch_computes(name: str) -> None:
    layer, x = LAYERS[name]
    expected = trained(layer, x)
    with Steered():
        found = trained(layer, x)

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_weighted_bags_are_sums_of_weighted_rows() -> None:
    table, weights = torch.randn(5, 3), torch.rand(BAGS.shape)
    for padding in (None, 0):
        expected = F.embedding_bag(BAGS, table, mode="sum", per_sample_weights=weights, padding_idx=padding)
        with Steered():
            found = F.embedding_bag(BAGS, table, mode="sum", per_sample_weights=weights, padding_idx=padding)
        torch.testing.assert_close(found, expected)


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv3d(1, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.avg_pool3d(F.max_pool3d(torch.relu(self.conv(x)), 2), 2).flatten(1))


class Masked(nn.Module):
    """torch's own encoder with padding: its fast path in inference makes nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(tokens), src_key_padding_mask=tokens == 0)[:, 0])


MODELS: dict[str, tuple[nn.Module, TensorSpec]] = {
    "bags": (
        nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3)),
        TensorSpec((5,), torch.int64, 9),
    ),
    "video": (Video(), TensorSpec((1, 4, 4, 4))),
    "masked encoder": (Masked(), TensorSpec((6,), torch.int64, 9)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_it_is_trained_as_it_comes(name: str) -> None:
    module, sample = MODELS[name]
    fused = torch.backends.mha.get_fastpath_enabled()
    verdict = edgefl.check(module, sample=sample, classes=3, engines=["onnx"])

    assert verdict.ok, str(verdict)
    assert torch.backends.mha.get_fastpath_enabled() == fused


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_it_is_trained_by_executorch(name: str) -> None:
    module, sample = MODELS[name]
    verdict = edgefl.check(module, sample=sample, classes=3, engines=["executorch"])

    assert verdict.ok, str(verdict)
