"""Tables, sets and graphs, as people write models for them."""
# A call of a module is Any, and people return it as it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


class WideDeep(nn.Module):
    """A linear model of categories beside an MLP."""

    offsets: Tensor

    def __init__(self, sizes: list[int], numbers: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(sum(sizes), classes, mode="sum")
        self.embeds = nn.ModuleList([nn.Embedding(size, width) for size in sizes])
        self.bn = nn.BatchNorm1d(numbers)
        self.deep = nn.Sequential(
            nn.Linear(width * len(sizes) + numbers, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, classes)
        )
        self.register_buffer("offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        wide = self.wide(categories + self.offsets)
        embedded = [layer(categories[:, i]) for i, layer in enumerate(self.embeds)]
        return wide + self.deep(torch.cat([*embedded, self.bn(numbers)], 1))


class DeepFM(nn.Module):
    """Factorisation machine and MLP on the same vectors."""

    def __init__(self, sizes: list[int], width: int = 8) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Embedding(sum(sizes), 1), nn.Embedding(sum(sizes), width)
        self.bias = nn.Parameter(torch.zeros((1,)))
        self.mlp = nn.Sequential(nn.Linear(width * len(sizes), 16), nn.ReLU(), nn.Linear(16, 1))
        self.offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(self.offsets.tolist()).unsqueeze(0)
        v = self.embedding(x)
        fm = 0.5 * (v.sum(dim=1).pow(2) - v.pow(2).sum(dim=1)).sum(dim=1, keepdim=True)
        logit = self.linear(x).sum(dim=1) + self.bias + fm + self.mlp(v.flatten(1))
        return torch.sigmoid(logit)


class MixtureOfExperts(nn.Module):
    """The best two of four experts for each row, all of them computed."""

    def __init__(self, features: int, classes: int, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(features, experts)
        self.noise = nn.Linear(features, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, classes)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, indices = logits.topk(self.k, dim=-1)
        sparse = torch.full_like(logits, float("-inf")).scatter(-1, indices, top)
        weights = F.softmax(sparse, dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (weights.unsqueeze(-1) * outputs).sum(dim=1)


class NeuralODE(nn.Module):
    """One network, run through the steps of Runge and Kutta."""

    def __init__(self, features: int, classes: int, width: int = 16, steps: int = 4) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(features, width), nn.Linear(width, classes)
        self.field = nn.Sequential(nn.Linear(width + 1, width), nn.Tanh(), nn.Linear(width, width))
        self.steps = steps

    def f(self, t: float, y: Tensor) -> Tensor:
        return self.field(torch.cat([y, torch.full_like(y[:, :1], t)], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.start(x), 1.0 / self.steps
        for t in torch.linspace(0, 1 - h, self.steps).tolist():
            k1 = self.f(t, y)
            k2 = self.f(t + h / 2, y + h / 2 * k1)
            y = y + h * k2
        return self.end(y)


class Parameters(nn.Module):
    """Weights in a ParameterDict and a ParameterList, a scale that learns, nn.Bilinear."""

    def __init__(self, features: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.maps = nn.ParameterDict({"a": torch.randn(features, width) * 0.3, "b": torch.zeros(width)})
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(3)])
        self.bilinear = nn.Bilinear(width, features, classes)
        self.log_scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.maps["a"] + self.maps["b"]
        for gain in self.gains:
            h = torch.where(h > 0, h * gain, 0.1 * h)
        return self.bilinear(h, x) * self.log_scale.exp()


class GradientReversal(Function):
    """Nothing forward, minus the gradient backward (DANN), in the newer form."""

    @staticmethod
    def forward(x: Tensor, strength: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grads[0], None


class DANN(nn.Module):
    """Classifier with features from which the domain cannot be predicted."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.classes, self.domain = nn.Linear(16, classes), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        return self.classes(h) + self.domain(GradientReversal.apply(h, 0.1))  # type: ignore[no-untyped-call]


class TNet(nn.Module):
    """A transformation of points, near the identity."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv, self.bn = nn.Conv1d(k, 16, 1), nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, k * k)

    def forward(self, x: Tensor) -> Tensor:
        batchsize = x.size()[0]
        x = F.relu(self.bn(self.conv(x)))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 16)
        iden = torch.eye(self.k).flatten().view(1, self.k * self.k).repeat(batchsize, 1).to(x.device)
        return (self.fc(x) + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    """A class of a cloud of points."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stn = TNet(3)
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, classes)

    def forward(self, points: Tensor) -> Tensor:
        trans = self.stn(points)
        x = torch.bmm(points.transpose(2, 1), trans).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.fc(torch.max(x, 2)[0])


class GAT(nn.Module):
    """Attention to the neighbours in a dense graph."""

    def __init__(self, features: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.W = nn.Linear(features, width, bias=False)
        self.a = nn.Parameter(torch.empty(2 * width, 1))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.leakyrelu, self.width = nn.LeakyReLU(0.2), width
        self.out = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        h = self.W(nodes)
        e = torch.matmul(h, self.a[: self.width]) + torch.matmul(h, self.a[self.width :]).transpose(-2, -1)
        e = self.leakyrelu(e)
        attention = torch.where(adjacency > 0, e, -9e15 * torch.ones_like(e))
        attention = F.dropout(F.softmax(attention, dim=-1), 0.2, training=self.training)
        return self.out(F.elu(torch.matmul(attention, h)).mean(1))


class TabTransformer(nn.Module):
    """Categories as words of a transformer; numbers beside them."""

    shift: Tensor

    def __init__(self, sizes: tuple[int, ...], numbers: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.register_buffer(
            "shift", F.pad(torch.tensor(list(sizes)), (1, 0)).cumsum(dim=-1)[:-1], persistent=False
        )
        self.embed = nn.Embedding(sum(sizes), width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(numbers)
        self.mlp = nn.Sequential(
            nn.Linear(width * len(sizes) + numbers, 32), nn.SELU(), nn.Linear(32, classes)
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = self.transformer(self.embed(categories + self.shift))
        return self.mlp(torch.cat((x.flatten(1), self.norm(numbers)), dim=-1))


class GumbelNet(nn.Module):
    """A hard choice of one of a few ways."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.choice, self.ways = nn.Linear(features, 3), nn.Linear(features, 3 * classes)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.gumbel_softmax(self.choice(x), tau=0.7, hard=True)
        return (weights.unsqueeze(-1) * self.ways(x).view(x.size(0), 3, -1)).sum(1)


class Siren(nn.Module):
    """Sines as activations, and Fourier features."""

    B: Tensor

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("B", torch.randn(features, 8))
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.out = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        projected = 2 * torch.pi * x @ self.B
        x = torch.cat([torch.sin(projected), torch.cos(projected)], dim=-1)
        for layer in self.layers:
            x = torch.sin(3.0 * layer(x))
        return self.out(x)


class Sparsemax(nn.Module):
    """A softmax that gives zeros: sorted, summed up, cut off. TabNet's mask."""

    def forward(self, x: Tensor) -> Tensor:
        z, _ = torch.sort(x, dim=-1, descending=True)
        k = torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype)
        total = z.cumsum(-1)
        size = ((1 + k * z) > total).sum(-1, keepdim=True)
        tau = (total.gather(-1, size - 1) - 1) / size.to(x.dtype)
        return torch.clamp(x - tau, min=0)


class TabNet(nn.Module):
    """Steps that look at a few columns each."""

    def __init__(self, features: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(features)
        self.attend = nn.ModuleList([nn.Linear(width, features) for _ in range(2)])
        self.transform = nn.Linear(features, 2 * width)
        self.start, self.mask = nn.Parameter(torch.zeros(width)), Sparsemax()
        self.fc, self.width = nn.Linear(width, classes), width

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x)
        prior, a = torch.ones_like(x), self.start.expand(x.shape[0], -1)
        out: Any = 0
        for attend in self.attend:
            mask = self.mask(attend(a) * prior)
            prior = prior * (1.3 - mask)
            h = F.glu(torch.cat([self.transform(mask * x)] * 2, -1), -1)
            out, a = out + F.relu(h[:, : self.width]), h[:, self.width :]
        return self.fc(out)
