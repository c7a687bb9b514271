# mypy: ignore-errors
"""Kinds (j), (k) and the false refusals beside them: integers below zero, wide ranges, buffers with a meaning."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from tests.support.corpus.building import IMAGE, TOKENS, Collection, TwoLayers

_ = Collection()
CASES = _.cases


def wide(generator, name, spec, rows):
    """Return floats of several magnitudes and both signs."""
    x = torch.randn((rows, *spec.shape), generator=generator)
    return x * torch.tensor([60.0, 1.0, 1e-3, 20.0]).repeat(2)[: spec.shape[-1]]


class Table(nn.Module):
    """Embeds an integer that forward computes from floats of both signs."""

    def __init__(self, size=7):
        super().__init__()
        self.table, self.b = nn.Embedding(size, 8), nn.Linear(8, 3)

    def index(self, x):
        raise NotImplementedError

    def forward(self, x):
        return self.b(self.table(self.index(x)).mean(1).tanh())


@_.case("j-integers")
class RemainderOfNegative(Table):
    # The sign of the divisor in Python and torch, of the dividend in C.
    def index(self, x):
        return (x * 9).long() % 5


@_.case("j-integers", inputs=wide)
class RemainderOfLargeNegative(Table):
    def index(self, x):
        return torch.remainder((x * 100).to(torch.int32), 7).long()


@_.case("j-integers")
class FloorDivisionOfNegative(Table):
    # Rounds to minus infinity.
    def index(self, x):
        return ((x * 7).long() // 3).clamp(-3, 3) + 3


@_.case("j-integers")
class HashedBuckets(Table):
    # Products that pass 2**31.
    def index(self, x):
        return ((x * 1000).long() * 2654435761) % 7


@_.case("j-integers")
class NegativeIndexFromEnd(Table):
    def index(self, x):
        return (x.round().long().clamp(-3, 3)) % 7


@_.case("j-integers")
class RemainderAsNumber(TwoLayers):
    # The remainder is multiplied, not an index: a wrong sign shows nowhere else.
    def forward(self, x):
        phase = ((x * 4).long() % 3).float()
        return self.b(self.a(x) * phase)


@_.case("j-integers", inputs=wide)
class RemainderOfWideInputs(TwoLayers):
    # Small inputs all become 0: only large ones show the sign.
    def forward(self, x):
        phase = ((x * 0.2).long() % 4).float()
        return self.b(self.a(x.clamp(-1, 1)) * phase)


@_.case("j-integers")
class ModuloByTensor(nn.Module):
    # Another divisor for each column, some of them negative.
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("period", torch.tensor([3, -3, 5, -4, 2, 7, -2, 6]))

    def forward(self, x):
        return self.b(self.a(x) + torch.remainder((x * 9).to(torch.int64), self.period).float())


@_.case("j-integers")
class FloatRemainder(TwoLayers):
    def forward(self, x):
        return self.b(torch.remainder(self.a(x) * 5, 2.0) + torch.fmod(x, 0.7))


@_.case("j-integers")
class TruncToIntegers(TwoLayers):
    def forward(self, x):
        steps = (x * 3).to(torch.int64)
        return self.b(self.a(x) * steps.float() + torch.div(steps, 2, rounding_mode="trunc").float())


class Wide(TwoLayers):
    """A function of widely spread values between two layers."""

    def between(self, x, h):
        raise NotImplementedError

    def forward(self, x):
        return self.b(self.between(x, self.a(x.clamp(-3, 3))).clamp(-80, 80) / 10)


@_.case("k-range", inputs=wide)
class LogcumsumexpSpread(Wide):
    # A spread above 88 overflows a naive exponential.
    def between(self, x, h):
        return torch.logcumsumexp(x * 2 + h, -1)


@_.case("k-range", inputs=wide)
class LogsumexpSpread(Wide):
    def between(self, x, h):
        return torch.logsumexp(torch.stack([x * 2, h]), 0)


@_.case("k-range", inputs=wide)
class SoftplusLarge(Wide):
    def between(self, x, h):
        return F.softplus(x * 3 + h) + F.softplus(x, beta=2.0, threshold=5.0)


@_.case("k-range", inputs=wide)
class LogSigmoidLarge(Wide):
    def between(self, x, h):
        return F.logsigmoid(x * 3 + h)


@_.case("k-range", inputs=wide)
class LogaddexpSpread(Wide):
    def between(self, x, h):
        return torch.logaddexp(3 * x, h)


@_.case("k-range", inputs=wide)
class Expm1AndLog1p(Wide):
    def between(self, x, h):
        return torch.log1p(x.abs() * 1e-4 * h.abs()) + torch.expm1(h * 1e-3)


@_.case("k-range", inputs=wide)
class SoftmaxWithMinusInfinity(Wide):
    def between(self, x, h):
        return (x * 2 + h).masked_fill(torch.arange(8) < 3, float("-inf")).softmax(-1)


@_.case("k-range", inputs=wide)
class LogSoftmaxCumulative(Wide):
    def between(self, x, h):
        return (2 * x + h).log_softmax(-1).cumsum(-1) / 5


@_.case("k-range", inputs=wide)
class ErfTails(Wide):
    def between(self, x, h):
        return torch.erf(x + h) + torch.special.erfc(h) + F.gelu(x * 2)


class Buffered(nn.Module):
    """A buffer whose values mean something: random ones make no sense."""

    def __init__(self, **buffers):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        for name, each in buffers.items():
            self.register_buffer(name, each)


@_.case("l-buffers")
class InputStandardised(Buffered):
    def __init__(self):
        super().__init__(mean=torch.full((8,), 2.0), var=torch.full((8,), 4.0))

    def forward(self, x):
        return self.b(self.a((x - self.mean) / self.var.sqrt()).relu())


@_.case("l-buffers")
class LogPrior(Buffered):
    # Logit adjustment: the logarithm of class frequencies.
    def __init__(self):
        super().__init__(prior=torch.tensor([0.7, 0.2, 0.1]))

    def forward(self, x):
        return self.b(self.a(x).tanh()) + self.prior.log()


@_.case("l-buffers")
class IntegerIndexBuffer(Buffered):
    # Random integers would lie outside.
    def __init__(self):
        super().__init__(order=torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))

    def forward(self, x):
        return self.b(self.a(x[:, self.order]).relu())


@_.case("l-buffers")
class BooleanMaskBuffer(Buffered):
    def __init__(self):
        super().__init__(mask=torch.tensor([True, False] * 4))

    def forward(self, x):
        return self.b(self.a(x).masked_fill(self.mask, 0.0))


@_.case("l-buffers", "refused")
class InverseCovariance(Buffered):
    # Mahalanobis distance by a Cholesky factor.
    def __init__(self):
        super().__init__(cov=torch.eye(8) + 0.1 * torch.ones(8, 8))

    def forward(self, x):
        white = torch.linalg.solve_triangular(torch.linalg.cholesky(self.cov), self.a(x).t(), upper=False)
        return self.b(white.t())


@_.case("l-buffers")
class PowerByBuffer(Buffered):
    def __init__(self):
        super().__init__(exponent=torch.tensor(0.5), base=torch.tensor(10.0))

    def forward(self, x):
        return self.b(self.a(x).abs().add(0.1) ** self.exponent) * torch.log(self.base)


@_.case("l-buffers", sample=IMAGE)
class LargeNonPersistentBuffer(nn.Module):
    # More than 4,096 entries outside of the state.
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(27, 3)
        self.register_buffer("basis", torch.randn(192, 27) / 14, persistent=False)

    def forward(self, x):
        return self.head(x.flatten(1) @ self.basis)


@_.case("l-buffers", sample=TOKENS)
class LargePositionTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 3)
        position, rate = torch.arange(512.0)[:, None], torch.exp(-torch.arange(0, 16, 2) / 3)
        table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], -1).flatten(1)
        self.register_buffer("pe", table, persistent=False)

    def forward(self, x):
        return self.head((self.embed(x) + self.pe[: x.shape[1]]).tanh().mean(1))


@functools.lru_cache(maxsize=4)
def cached_window(size):
    """Return a window that every later call finds in the cache."""
    return torch.hann_window(size) + 0.1


@_.case("m-cache")
class LruCacheAroundTensor(nn.Module):
    # Filled during a run without values, the cache holds a tensor without values.
    def __init__(self):
        super().__init__()
        cached_window.cache_clear()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x * cached_window(x.shape[-1])).relu())


@_.case("m-cache", sample=TOKENS)
class RelativeIndexByLruCache(nn.Module):
    # BEiT's relative positions by a cached method.
    def __init__(self):
        super().__init__()
        self.embed, self.bias, self.head = nn.Embedding(11, 8), nn.Embedding(11, 1), nn.Linear(8, 3)

    @functools.lru_cache  # noqa: B019
    def index(self, length):
        place = torch.arange(length)
        return place[:, None] - place[None, :] + length - 1

    def forward(self, x):
        h = self.embed(x)
        scores = h @ h.transpose(1, 2) + self.bias(self.index(x.shape[1])).squeeze(-1)
        return self.head((scores.softmax(-1) @ h).mean(1))


_SHAPES = {}


@_.case("m-cache")
class OwnCacheInDict(nn.Module):
    # A dictionary of the file's own takes the place of lru_cache.
    def __init__(self):
        super().__init__()
        _SHAPES.clear()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        size = x.shape[-1]
        if size not in _SHAPES:
            _SHAPES[size] = torch.linspace(0.5, 1.5, size)
        return self.b(self.a(x * _SHAPES[size]).relu())


@_.case("m-cache")
class CacheWithItem(TwoLayers):
    # The cached tensor is asked for a number.
    @functools.cache  # noqa: B019
    def scale(self, size):
        return torch.arange(size).float().mean()

    def forward(self, x):
        return self.b(self.a(x).relu() / self.scale(x.shape[-1]).item())


@_.case("m-cache")
class CachedPropertyTensor(TwoLayers):
    @functools.cached_property
    def taps(self):
        return torch.tensor([0.5, 1.0] * 4)

    def forward(self, x):
        return self.b(self.a(x * self.taps).relu())


@_.case("m-cache", sample=TensorSpec((6, 4)))
class RotaryCacheInAttribute(nn.Module):
    # Grown on demand and kept as a plain attribute.
    def __init__(self):
        super().__init__()
        self.cos, self.a, self.head = None, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        if self.cos is None or self.cos.shape[0] < x.shape[1]:
            angle = torch.arange(x.shape[1]).float()[:, None] * torch.tensor([1.0, 0.1])
            self.cos, self.sin = torch.cos(angle), torch.sin(angle)
        p, q = self.a(x).chunk(2, -1)
        turned = torch.cat([p * self.cos - q * self.sin, p * self.sin + q * self.cos], -1)
        return self.head(turned.mean(1))
