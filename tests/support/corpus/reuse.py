# mypy: ignore-errors
"""Kind (g): layers with other weights or attributes at each call."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.corpus.building import IMAGE, SEQUENCE, TOKENS, Collection, Net, Rec

_ = Collection()
CASES = _.cases


@_.case("g-reuse", sample=IMAGE)
class DilationSetInLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding="same"), nn.Linear(3, 3)

    def forward(self, x):
        for d in (1, 2, 3):
            self.conv.dilation = (d, d)
            self.conv._reversed_padding_repeated_twice = [d] * 4
            x = x + self.conv(x).tanh()
        return self.head(x.mean((2, 3)))


@_.case("g-reuse", sample=IMAGE)
class StrideChangedBetweenCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.conv, self.head = nn.AvgPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x):
        self.conv.stride = (1, 1)
        fine = self.conv(x)
        self.conv.stride = (2, 2)
        coarse = self.conv(x)
        return self.head(torch.cat([fine.mean((2, 3)), coarse.amax((2, 3))], 1))


@_.case("g-reuse")
class NegativeSlopeByDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
        self.act = nn.LeakyReLU()

    def forward(self, x):
        for depth, f in enumerate(self.f):
            self.act.negative_slope = 0.5 / (depth + 1)
            x = self.act(f(x))
        return x


@_.case("g-reuse")
def batch_norm_with_eps_of_call():
    class Model(Net):
        def forward(self, x):
            self.between.eps = 0.5
            h = self.between(self.a(x))
            self.between.eps = 1e-5
            return self.b(h)

    return Model(nn.BatchNorm1d(8))


@_.case("g-reuse")
def functional_call_with_scaled_weights():
    class Model(Net):
        def forward(self, x):
            weights = {name: each * 1.5 for name, each in self.between.named_parameters()}
            return self.b(torch.func.functional_call(self.between, weights, (self.a(x).tanh(),)))

    return Model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))


@_.case("g-reuse")
class InnerStepByFunctionalCall(Net):
    # The second call takes weights moved by a learned vector.
    def __init__(self):
        super().__init__(nn.Linear(8, 8))
        self.delta = nn.Parameter(0.1 * torch.randn(8, 8))

    def forward(self, x):
        h = self.a(x)
        moved = {"weight": self.between.weight + self.delta, "bias": self.between.bias}
        return self.b(self.between(h) + torch.func.functional_call(self.between, moved, (h,)).tanh())


@_.case("g-reuse")
class HypernetworkWeights(nn.Module):
    # A generator makes the weights of a layer that has none of its own.
    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(5))
        self.hyper, self.main = nn.Linear(5, 27), nn.Linear(8, 3)

    def forward(self, x):
        w = self.hyper(self.code)
        made = {"weight": w[:24].view(3, 8), "bias": w[24:]}
        return torch.func.functional_call(self.main, made, (x,))


@_.case("g-reuse")
def weight_assigned_from_g_and_v():
    # Weight normalisation by hand: a plain attribute in place of the parameter.
    class Model(Net):
        def __init__(self):
            super().__init__(nn.Linear(8, 8, bias=False))
            self.v = nn.Parameter(self.between.weight.detach().clone())
            self.g = nn.Parameter(torch.ones(8, 1))
            del self.between.weight

        def forward(self, x):
            self.between.weight = self.g * self.v / self.v.norm(dim=1, keepdim=True)
            return self.b(self.between(self.a(x)))

    return Model()


@_.case("g-reuse", sample=IMAGE)
def weight_standardised_conv():
    class WSConv(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-3)
            return self._conv_forward(x, w, self.bias)

    return nn.Sequential(WSConv(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@_.case("g-reuse", sample=SEQUENCE)
class CellWithOtherWeightsPerStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNNCell(8, 6), nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.rand(5))

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 6)
        for t in range(5):
            named = {name: each * self.gain[t] for name, each in self.cell.named_parameters()}
            h = torch.func.functional_call(self.cell, named, (x[:, t], h))
        return self.head(h)


@_.case("g-reuse")
class LoraMergedInForward(Net):
    # The low-rank update joins the frozen weight at each call.
    def __init__(self):
        super().__init__(nn.Linear(8, 8).requires_grad_(False))
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2) * 0.1)

    def forward(self, x):
        weight = self.between.weight + self.up @ self.down
        return self.b(F.linear(self.a(x), weight, self.between.bias))


@_.case("g-reuse", sample=SEQUENCE)
class GruByFunctionalCall(Rec):
    def __init__(self):
        super().__init__(nn.GRU(8, 6, batch_first=True))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        named = {name: each * self.scale for name, each in self.rnn.named_parameters()}
        return self.head(torch.func.functional_call(self.rnn, named, (x,))[0].mean(1))


@_.case("g-reuse")
def shared_layer_in_two_modes():
    # One norm: first by the batch, then by its statistics.
    class Model(Net):
        def forward(self, x):
            h = self.between(self.a(x))
            self.between.eval()
            h = h + self.between(h)
            self.between.train()
            return self.b(h)

    return Model(nn.BatchNorm1d(8))


@_.case("g-reuse")
def shared_layer_first_by_statistics():
    # The other order: the norm's statistics move after it has run by them.
    class Model(Net):
        def forward(self, x):
            h = self.a(x)
            self.between.eval()
            known = self.between(h)
            self.between.train()
            return self.b(known - 0.5 * self.between(h).tanh())

    return Model(nn.BatchNorm1d(8))


@_.case("g-reuse")
class HeadsSwappedInForward(nn.Module):
    # The attribute names another layer in each call of the same code.
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.a, self.current = nn.Linear(8, 8), None

    def run(self, h):
        return self.current(h)

    def forward(self, x):
        h, total = self.a(x).tanh(), 0
        for head in self.heads:
            self.current = head
            total = total + self.run(h) ** 2
        self.current = None
        return total


@_.case("g-reuse")
class EnsembleByVmap(nn.Module):
    # Stacked weights of several heads, in forward itself.
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3, 3, 8) * 0.3), nn.Parameter(torch.zeros(3, 3))
        self.template = [nn.Linear(8, 3)]

    def forward(self, x):
        def head(w, b):
            return torch.func.functional_call(self.template[0], {"weight": w, "bias": b}, (x,))

        return torch.vmap(head)(self.w, self.b).tanh().mean(0)


@_.case("g-reuse")
class VmapInSubmodule(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads, self.last = nn.Linear(8, 8), EnsembleByVmap(), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.heads(torch.relu(self.body(x))))


@_.case("g-reuse")
class TeacherByDeepcopy(nn.Module):
    # No gradient reaches the weights through their copy.
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        teacher = copy.deepcopy(self.body)
        return self.last(torch.relu(self.body(x)) + teacher(x))


@_.case("g-reuse", sample=TOKENS)
class TiedTable(nn.Module):
    # The table of the embedding is the last layer's too, and moves by a wide margin.
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(11, 3)

    def forward(self, x):
        h = self.mix(torch.tanh(self.mix(self.embed(x))))
        return self.head(self.out(h).amax(1))
