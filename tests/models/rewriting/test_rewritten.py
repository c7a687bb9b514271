"""Functions of torch that are rewritten in training: the same values and gradients, ties and padding included."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.tensors import TensorSpec
from edgefl.models.torch_functions.control_flow import TraceableMode

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


@pytest.mark.parametrize("padding", [None, 1, -8])
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

    with TraceableMode():
        found = values(layer, tokens, offsets, weights)

    for one, other in zip(found, values(layer, tokens, offsets, weights), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "inputs", [(TOKENS[0],), (TOKENS, torch.tensor([0])), (TOKENS, None, torch.ones(4, 6))]
)
def test_what_torch_refuses_is_refused(inputs: tuple[Tensor | None, ...]) -> None:
    layer = nn.EmbeddingBag(9, 3, mode="mean")
    with pytest.raises((ValueError, NotImplementedError)), TraceableMode():
        layer(*inputs)


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
    "bags": (nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3)), TensorSpec((5,), torch.int64, 9)),
    "video": (Video(), TensorSpec((1, 4, 4, 4))),
    "masked encoder": (Masked(), TensorSpec((6,), torch.int64, 9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "executorch"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_it_is_trained_as_it_comes(name: str, engine: Literal["onnx", "executorch"]) -> None:
    module, sample = MODELS[name]
    fused = torch.backends.mha.get_fastpath_enabled()
    verdict = edgefl.check(edgefl.Model(module, sample=sample, classes=3), engines=[engine])

    assert verdict.ok, str(verdict)
    assert torch.backends.mha.get_fastpath_enabled() == fused
