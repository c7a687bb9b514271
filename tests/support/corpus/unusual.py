# mypy: ignore-errors
"""Section 3: models that people have and that were refused with a text that misleads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from tests.support.corpus.building import IMAGE, SEQUENCE, TOKENS, Collection, TwoLayers

_ = Collection()
CASES = _.cases


class Net(nn.Module):
    """Two layers; subclasses change what lies between."""

    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(width, 3)

    def forward(self, x):
        return self.b(self.between(self.a(x)))


@_.case("r-ops", sample=TOKENS)
class OneHotTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(11, 3)

    def forward(self, x):
        return self.a(F.one_hot(x, 11).float().mean(1))


@_.case("r-ops", sample=TOKENS)
class OneHotOfArgmax(nn.Module):
    # The number of classes comes from a layer.
    def __init__(self):
        super().__init__()
        self.embed, self.route, self.head = nn.Embedding(11, 8), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x):
        scores = self.route(self.embed(x)).mean(1)
        hard = F.one_hot(scores.argmax(-1), num_classes=self.route.out_features).to(scores.dtype)
        return self.head(hard - scores.detach() + scores)


@_.case("r-ops")
class CdistToPrototypes(Net):
    def __init__(self):
        super().__init__(4)
        self.prototypes = nn.Parameter(torch.randn(4, 8))

    def between(self, h):
        return -torch.cdist(h, self.prototypes)


@_.case("r-ops", sample=SEQUENCE)
class CdistBatchedSquared(nn.Module):
    # Pairwise distances within a sample; zero on the diagonal, where its gradient is 0.
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(8, 4), nn.Linear(5, 3)

    def forward(self, x):
        h = self.a(x)
        return self.head(torch.exp(-torch.cdist(h, h)).mean(1))


@_.case("r-ops")
class CdistOfOtherNorm(Net):
    def __init__(self):
        super().__init__(4)
        self.prototypes = nn.Parameter(torch.randn(4, 8))

    def between(self, h):
        return torch.cdist(h, self.prototypes, p=1.0)


@_.case("r-roots")
class StarredInputs(nn.Module):
    # forward(self, *xs)
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, *xs):
        return sum(self.a(x) for x in xs)


@_.case("r-roots")
class StarredWrapper(nn.Module):
    # A wrapper that hands everything on.
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@_.case("r-roots", sample={"x": TensorSpec((8,)), "scale": TensorSpec((8,))})
class TwoInputs(TwoLayers):
    def forward(self, x, scale):
        return self.b(torch.tanh(self.a(x)) * scale)


@_.case("r-roots")
class OptionalInputs(TwoLayers):
    # Further inputs with defaults that nobody gives.
    def forward(self, x, mask=None, *, scale=1.0, return_hidden=False):
        h = self.a(x) * scale
        h = h if mask is None else h * mask
        return (self.b(h), h) if return_hidden else self.b(h)


@_.case("r-roots", output=lambda out: out["logits"])
class DictionaryRoot(TwoLayers):
    # Several outputs, the loss takes one.
    def forward(self, x):
        h = self.a(x).relu()
        return {"hidden": h, "logits": self.b(h)}


@_.case("r-roots")
def partial_forward_on_instance():
    # The root's forward is replaced on the object.
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = model.forward
    model.forward = lambda x: plain(x.abs()) * 2
    return model


@_.case("r-roots")
class BareParameters(nn.Module):
    # No layer at all, parameters in a list and a dictionary.
    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(8, n) / 3) for n in (8, 3))
        self.b = nn.ParameterDict({"first": nn.Parameter(torch.zeros(8))})

    def forward(self, x):
        return torch.tanh(x @ self.w[0] + self.b["first"]) @ self.w[1]


@_.case("r-ops")
class OneHotOfBuckets(nn.Module):
    # A loop over thresholds makes the classes.
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.tensor([-0.5, 0.0, 0.5]))
        self.a = nn.Linear(32, 3)

    def forward(self, x):
        return self.a(F.one_hot(torch.bucketize(x, self.edges), 4).flatten(1).float())


@_.case("r-ops")
class CdistToBuffer(Net):
    # Radial basis functions around fixed centres.
    def __init__(self):
        super().__init__(5)
        self.register_buffer("centres", torch.randn(5, 8))

    def between(self, h):
        return torch.exp(-0.1 * torch.cdist(h, self.centres) ** 2)


@_.case("r-autograd", "refused")
class GradientPenaltyInside(Net):
    # torch.autograd.grad in forward: an energy's force.
    def forward(self, x):
        x = x.detach().requires_grad_(True)
        energy = self.a(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.b(force)


@_.case("r-autograd", "refused")
class GradientInFrozenPart(Net):
    def forward(self, x):
        h = self.a(x)
        with torch.enable_grad():
            probe = h.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.b(probe).logsumexp(-1).sum(), probe)
        return self.b(h - 0.1 * slope)


@_.case("r-autograd", "refused")
class JacobianByFunctional(Net):
    def forward(self, x):
        slope = torch.func.vmap(torch.func.grad(lambda row: self.a(row).tanh().sum()))(x)
        return self.b(slope)


@_.case("r-autograd", "refused")
class BackwardInside(Net):
    # An inner training step with backward().
    def forward(self, x):
        h = self.a(x)
        fast = self.b.weight.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            F.linear(h.detach(), fast).pow(2).mean().backward()
        return F.linear(h, self.b.weight - 0.1 * fast.grad, self.b.bias)


@_.case("r-autograd", "refused")
class MetaLearnedStep(Net):
    # The second derivative goes through an inner step.
    def forward(self, x):
        inner = F.linear(self.a(x), self.b.weight).pow(2).mean()
        (g,) = torch.autograd.grad(inner, self.b.weight, create_graph=True)
        return F.linear(self.a(x), self.b.weight - 0.1 * g, self.b.bias)


@_.case("r-autograd", "refused")
class HessianVectorProduct(Net):
    def forward(self, x):
        _, product = torch.autograd.functional.vjp(
            lambda v: self.a(v).tanh().sum(1), x, torch.ones(x.shape[0]), create_graph=True
        )
        return self.b(product)


@_.case("s-form", "refused", sample=IMAGE)
class SpatialTransformer(nn.Module):
    # The gradient of grid_sample has no form.
    def __init__(self):
        super().__init__()
        self.where, self.head = nn.Linear(192, 6), nn.Linear(192, 3)
        nn.init.zeros_(self.where.weight)
        self.where.bias.data.copy_(torch.tensor([0.9, 0.1, 0, 0, 0.8, 0.1]))

    def forward(self, x):
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))


@_.case("s-form", "refused", sample=IMAGE)
class DeformedByOffsets(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset, self.head = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(192, 3)

    def forward(self, x):
        line = torch.linspace(-1, 1, 8)
        base = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
        grid = base + 0.1 * self.offset(x).tanh().permute(0, 2, 3, 1)
        return self.head(F.grid_sample(x, grid, mode="bilinear", align_corners=True).flatten(1))


@_.case("s-form", "refused")
class PoissonLikelihoodLgamma(Net):
    def between(self, h):
        return torch.lgamma(F.softplus(h) + 1)


@_.case("s-form", "refused")
class BetaByLgamma(Net):
    def between(self, h):
        p = F.softplus(h) + 0.5
        return torch.special.gammaln(p) - torch.digamma(p)


@_.case("s-form", "refused")
class MedianPooling(Net):
    def between(self, h):
        return h - h.median(-1, keepdim=True)[0]


@_.case("s-form", "refused")
class MatrixExponential(Net):
    def between(self, h):
        return h @ torch.matrix_exp(self.a.weight - self.a.weight.t())


@_.case("s-form", "refused")
class SlogdetFlow(Net):
    def between(self, h):
        return h + torch.linalg.slogdet(self.a.weight)[1]


@_.case("s-form", "refused", sample=TOKENS)
class EmbeddingWithMaxNorm(nn.Module):
    # Renormalises rows of its table in forward.
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8, max_norm=1.0), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


class Rec(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, rnn, width):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0].mean(1))


@_.case("t-layers", sample=SEQUENCE)
def lstm_projection():
    return Rec(nn.LSTM(8, 6, proj_size=4, batch_first=True), 4)


@_.case("t-layers", sample=SEQUENCE)
def lstm_projection_two_directions():
    return Rec(nn.LSTM(8, 6, 2, proj_size=3, bidirectional=True, batch_first=True), 6)


@_.case("t-layers", sample=SEQUENCE)
def lstm_projection_state_read():
    # The cell state is wider than the hidden one.
    class Model(Rec):
        def forward(self, x):
            _, (h, c) = self.rnn(x)
            return self.head(torch.cat([h[-1], c[-1]], -1))

    return Model(nn.LSTM(8, 6, proj_size=4, batch_first=True), 10)


@_.case("t-layers", "refused")
def batch_norm_cumulative():
    # momentum=None: the weight of a batch is one over their number.
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))


@_.case("t-layers", "refused", sample=IMAGE)
def batch_norm_cumulative_deep():
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None, affine=False))
    return nn.Sequential(block, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@_.case("t-layers")
def batch_norm_cumulative_frozen():
    # In inference mode the momentum has no meaning.
    norm = nn.BatchNorm1d(8, momentum=None).eval()
    norm.running_mean.uniform_(-1, 1)
    return nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), nn.Linear(8, 3))


@_.case("t-layers", sample=IMAGE)
def batch_norm_without_statistics():
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@_.case("t-layers", sample=SEQUENCE)
class TimeMixingRwkv(nn.Module):
    # RWKV's recurrence over time with a running maximum.
    def __init__(self):
        super().__init__()
        self.k, self.v, self.r = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.decay, self.first, self.head = (
            nn.Parameter(torch.rand(8)),
            nn.Parameter(torch.rand(8)),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        k, v, r = self.k(x), self.v(x), torch.sigmoid(self.r(x))
        num = den = torch.zeros_like(k[:, 0])
        top = torch.full_like(num, -1e38)
        outs = []
        for t in range(x.shape[1]):
            m = torch.maximum(top, self.first + k[:, t])
            e1, e2 = torch.exp(top - m), torch.exp(self.first + k[:, t] - m)
            outs.append(r[:, t] * (e1 * num + e2 * v[:, t]) / (e1 * den + e2))
            m = torch.maximum(top - self.decay.exp(), k[:, t])
            e1, e2 = torch.exp(top - self.decay.exp() - m), torch.exp(k[:, t] - m)
            num, den, top = e1 * num + e2 * v[:, t], e1 * den + e2, m
        return self.head(torch.stack(outs, 1).mean(1))


@_.case("u-plain")
def lazy_layers():
    # Shapes are known after the first call.
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    model(torch.zeros(2, 8))
    for each in model.parameters():
        nn.init.uniform_(each, -0.3, 0.3)
    return model


@_.case("u-plain")
def root_in_eval_mode():
    # Loaded for inference, then handed over: the root is put into training mode once.
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()


@_.case("u-plain")
def dropout_draws():
    # Real draws, fed to both sides.
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


@_.case("u-plain", sample=TOKENS)
class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(11, 3)

    def forward(self, x):
        return self.head(self.out(torch.tanh(self.mix(self.embed(x)))).mean(1))


@_.case("u-plain", classes=2)
def single_logit():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


@_.case("u-plain", sample=TensorSpec((1, 7, 5)))
def awkward_shapes():
    # Odd sizes, stride beyond the kernel, ceil_mode.
    model = nn.Sequential(
        nn.Conv2d(1, 5, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2)),
        nn.BatchNorm2d(5),
        nn.MaxPool2d(2, stride=3, ceil_mode=True),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    model(torch.zeros(2, 1, 7, 5))
    return model
