"""Each function of torch that draws computes what torch's own kernels compute from the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.models.torch_functions.random_inputs import RandomInputMode
from tests.models.draws.torch_numbers import Given, Numbers

SHAPE = (3, 4, 6)
MASK = torch.tensor([[True, False, True, True]] * 4)
HIDDEN = torch.tensor([[False] * 4] + [[True, True, False, True]] * 3)


def _attention(**options: object) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:, None], 2 * x[:, None], x[:, None] - 1, **options)

    return forward


def _grouped(x: Tensor) -> Tensor:
    q, k = x.view(3, 4, 2, 3).transpose(1, 2), x[:, None, :, :3]
    return F.scaled_dot_product_attention(q, k, k, dropout_p=0.4, enable_gqa=True)


def _layer(make: Callable[[], nn.Module], *, training: bool = True) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    module = make().train(training)

    def forward(x: Tensor) -> Tensor:
        out = module(x)
        return torch.cat([part.flatten() for part in out]) if isinstance(out, tuple) else out

    return forward


class SelfAttention(nn.MultiheadAttention):
    def __init__(self, *, weights: bool) -> None:
        super().__init__(6, 2, dropout=0.4, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=self.weights)[0]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "F.dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "F.dropout in place, without a look at what it returns": lambda x: (
        y := x * 1,
        F.dropout(y, 0.3, True, True),
        y,
    )[2],
    "torch.dropout": lambda x: torch.dropout(x, 0.3, train=True),
    "nn.Dropout, twice": lambda x: (drop := nn.Dropout(0.4))(torch.tanh(drop(x))),
    "F.dropout1d": lambda x: F.dropout1d(x, 0.4),
    "F.dropout2d": lambda x: F.dropout2d(x[..., None], 0.4),
    "F.dropout3d in place": lambda x: F.dropout3d(x[..., None, None] * 1, 0.4, inplace=True),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "F.alpha_dropout in place": lambda x: F.alpha_dropout(x * 1, 0.4, training=True, inplace=True),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "F.rrelu": lambda x: F.rrelu(x, 0.1, 0.6, training=True),
    "F.rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "attention": _attention(dropout_p=0.4),
    "attention, causal": _attention(dropout_p=0.4, is_causal=True, scale=0.7),
    "attention, boolean mask": _attention(dropout_p=0.4, attn_mask=MASK),
    "attention, a row that sees nothing": _attention(dropout_p=0.4, attn_mask=HIDDEN),
    "attention, added mask": _attention(dropout_p=0.4, attn_mask=torch.linspace(-1, 1, 16).view(4, 4)),
    "attention, grouped": _grouped,
    "nn.MultiheadAttention": _layer(lambda: SelfAttention(weights=True)),
    "nn.MultiheadAttention, no weights": _layer(lambda: SelfAttention(weights=False)),
    "nn.TransformerEncoderLayer": _layer(lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)),
    "nn.RNN": _layer(lambda: nn.RNN(6, 5, num_layers=3, dropout=0.4)),
    "nn.RNN, relu, both ways": _layer(
        lambda: nn.RNN(
            6,
            5,
            num_layers=2,
            dropout=0.4,
            bidirectional=True,
            nonlinearity="relu",
            bias=False,
            batch_first=True,
        )
    ),
    "torch.rand": lambda x: x * torch.rand(x.shape[0], 1, 1),
    "torch.rand of a size": lambda x: x * torch.rand(x.shape, dtype=x.dtype, device=x.device),
    "torch.rand_like": lambda x: x * torch.rand_like(x),
    "torch.randn": lambda x: x + torch.randn(4, 6),
    "torch.randn_like": lambda x: x * torch.randn_like(x),
    "torch.normal": lambda x: torch.normal(x.detach(), 0.5) * x,
    "torch.normal of numbers": lambda x: torch.normal(1.0, 0.5, (4, 6)) * x,
    "torch.normal of two tensors": lambda x: torch.normal(torch.zeros(6), torch.ones(4, 1)) * x,
    "Tensor.normal_": lambda x: x.new_empty(4, 6).normal_(1.0, 0.5) * x,
    "Tensor.uniform_": lambda x: x.new_empty(4, 6).uniform_(-1.0, 0.5) * x,
    "torch.bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.4)) * x,
    "torch.bernoulli with p": lambda x: torch.bernoulli(x.detach(), 0.4) * x,
    "Tensor.bernoulli_": lambda x: x.new_empty(3, 1, 1).bernoulli_(0.4) * x,
    "drop path": lambda x: x / 0.8 * (0.8 + torch.rand(x.shape[0], 1, 1)).floor_(),
    "F.gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.7),
    "torch.distributions": lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_computes_what_torch_computes_from_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(SHAPE)
    results, asked = [], []
    for mode in (Given, RandomInputMode):
        x, draw = values.clone().requires_grad_(), Numbers()
        with mode(draw):
            out = FUNCTIONS[name](x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
        asked.append(draw.shapes)

    assert asked[0] == asked[1] != []
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "quiet",
    [
        lambda x: F.dropout(x, 0.4, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 1.0),
        lambda x: F.alpha_dropout(x, 0.4),
        lambda x: F.dropout2d(x[..., None], 0.4, training=False),
        F.rrelu,
        lambda x: F.scaled_dot_product_attention(x, x, x),
        _layer(lambda: nn.RNN(6, 5, num_layers=2)),
        _layer(lambda: SelfAttention(weights=False), training=False),
    ],
)
def test_what_draws_nothing_is_torch_s_own(quiet: Callable[[Tensor], Tensor]) -> None:
    x, draw = torch.randn(SHAPE), Numbers()
    with RandomInputMode(draw):
        found = quiet(x)

    assert draw.shapes == []
    assert torch.equal(found, quiet(x))


def test_normal_numbers_are_normal() -> None:
    with RandomInputMode(Numbers()):
        drawn = torch.randn(100_000)

    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02
    assert abs(float((drawn.abs() < 1).float().mean()) - 0.6827) < 0.01
    assert drawn.isfinite().all()


def test_the_ends_of_the_interval_give_finite_numbers() -> None:
    ends = torch.tensor([0.0, 1 - 2**-24])
    with RandomInputMode(lambda shape: ends.expand(shape).clone()):
        assert torch.randn(2).isfinite().all()
        assert F.gumbel_softmax(torch.zeros(3, 2)).isfinite().all()


def test_it_runs_under_the_transforms_of_torch_func() -> None:
    uniform, x = torch.rand(5, 3, 4), torch.randn(5, 3, 4)

    def loss(x: Tensor, uniform: Tensor) -> Tensor:
        with RandomInputMode(lambda shape: uniform):
            return F.dropout(x * x, 0.4).sum() + nn.functional.dropout(x, 0.2, inplace=False).sum()

    apart = torch.stack([torch.func.grad(loss)(each, own) for each, own in zip(x, uniform, strict=True)])
    together = torch.func.vmap(torch.func.grad(loss))(x, uniform)

    assert torch.equal(together, apart)
