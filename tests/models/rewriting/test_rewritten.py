"""Functions of torch that are rewritten in training: the same values and gradients, ties and padding included."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.tensors import TensorSpec
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.models.torch_functions.rules import bincount, cdist, one_hot

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


# -- functions of torch in other functions -----------------------------------------------------------------


MODES = ("use_mm_for_euclid_dist_if_necessary", "donot_use_mm_for_euclid_dist")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", (0.0, 1.0, 2.0, 3.0, math.inf))
@pytest.mark.parametrize("rows", ((4,), (2, 4)), ids=str)
def test_distances_are_torchs_with_torchs_gradient(rows: tuple[int, ...], p: float, mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(*rows, 3, generator=generator), torch.randn(5, 3, generator=generator)
    y[2] = x.reshape(-1, 3)[1]  # a distance of 0
    y[3] = x.reshape(-1, 3)[0] + torch.tensor([0.5, -0.5, 0.25])  # two largest entries
    leaves = [x.requires_grad_(), y.requires_grad_()]

    found, expected = cdist(x, y, p, mode), torch.cdist(x, y, p, mode)

    torch.testing.assert_close(found, expected)
    weights = torch.arange(found.numel(), dtype=found.dtype).reshape(found.shape) % 3 + 1
    if p:
        grads = [torch.autograd.grad((each * weights).sum(), leaves) for each in (found, expected)]
        torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("shape", ((), (4,), (2, 3)), ids=str)
def test_one_hot_is_torchs(shape: tuple[int, ...]) -> None:
    classes = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))

    assert torch.equal(one_hot(classes, 11), F.one_hot(classes, 11))
    assert one_hot(classes) is NotImplemented


def test_bincount_is_torchs_where_all_values_fit_and_shows_it_where_not() -> None:
    values, shares = torch.tensor([0, 2, 2, 1]), torch.tensor([0.5, 1.0, 2.0, 4.0])

    assert torch.equal(bincount(values, minlength=4), torch.bincount(values, minlength=4))
    assert torch.equal(bincount(values, shares, 4), torch.bincount(values, shares, 4))
    assert (bincount(values, minlength=2) < -1e9).all()
    assert bincount(values, shares, 2).isnan().all()


class Coded(nn.Module):
    """Classes as vectors of zeros and a one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(F.one_hot(x, 11).float())
        return scores if x.dim() == 1 else scores.mean(1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ("onnx", "executorch"))
@pytest.mark.parametrize("shape", ((), (6,)), ids=str)
def test_one_hot_compiles(shape: tuple[int, ...], target: Literal["onnx", "executorch"]) -> None:
    sample = TensorSpec(shape, torch.int64, 11)

    assert edgefl.compile(
        edgefl.Model(Coded(), sample=sample, classes=3), options=edgefl.CompileOptions(target=target)
    ).manifest.graphs
