# mypy: ignore-errors
"""Kinds (f) and (g): subclasses and isinstance branches; layers with other weights or attributes at each call."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.corpus.building import IMAGE, SEQUENCE, Collection

_ = Collection()
CASES = _.cases


class Rec(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, rnn, width=6):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Net(nn.Module):
    """Two layers with a part between them."""

    def __init__(self, between):
        super().__init__()
        self.a, self.between, self.b = nn.Linear(8, 8), between, nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.between(self.a(x)))


@_.case("f-class", sample=SEQUENCE)
def isinstance_lstm_takes_cell_state():
    class Model(Rec):
        def forward(self, x):
            _, last = self.rnn(x)
            if isinstance(self.rnn, nn.LSTM):
                last = last[1]
            return self.head(last[-1])

    return Model(nn.LSTM(8, 6, batch_first=True))


@_.case("f-class", sample=SEQUENCE)
def type_is_gru():
    # An exact comparison of classes.
    class Model(Rec):
        def forward(self, x):
            out, last = self.rnn(x)
            return self.head(last[-1] * 2 if type(self.rnn) is nn.GRU else out.mean(1))

    return Model(nn.GRU(8, 6, batch_first=True))


@_.case("f-class")
def isinstance_batch_norm_in_loop():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) * 0.5 + x if isinstance(layer, nn.BatchNorm1d) else layer(x)
            return x

    return Model()


@_.case("f-class")
def isinstance_norm_base_class():
    # By the private base of all batch norms.
    class Model(Net):
        def forward(self, x):
            h = self.between(self.a(x))
            return self.b(h.tanh() if isinstance(self.between, nn.modules.batchnorm._BatchNorm) else h)

    return Model(nn.BatchNorm1d(8))


@_.case("f-class", sample=SEQUENCE)
def lstm_subclass_scales_output():
    class Scaled(nn.LSTM):
        def forward(self, x, hx=None):
            out, last = super().forward(x, hx)
            return out * 3, last

    return Rec(Scaled(8, 6, batch_first=True))


@_.case("f-class", sample=SEQUENCE)
def gru_subclass_residual():
    class Residual(nn.GRU):
        def forward(self, x, hx=None):
            out, last = super().forward(x, hx)
            return x + out, last

    return Rec(Residual(8, 8, batch_first=True), 8)


@_.case("f-class", sample=SEQUENCE)
def gru_subclass_own_state():
    # A learned initial state.
    class Learned(nn.GRU):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            self.h0 = nn.Parameter(torch.randn(1, 1, 6))

        def forward(self, x):
            return super().forward(x, self.h0.expand(1, x.shape[0], 6).contiguous())

    return Rec(Learned(8, 6, batch_first=True))


@_.case("f-class", sample=SEQUENCE)
def lstm_subclass_with_layer_norm():
    # The subclass has a submodule of its own.
    class Normed(nn.LSTM):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            self.norm = nn.LayerNorm(6)

        def forward(self, x, hx=None):
            out, last = super().forward(x, hx)
            return self.norm(out), last

    return Rec(Normed(8, 6, batch_first=True))


@_.case("f-class")
def batch_norm_subclass_with_activation():
    class Active(nn.BatchNorm1d):
        def forward(self, x):
            return F.leaky_relu(super().forward(x), 0.2)

    return Net(Active(8))


@_.case("f-class")
def batch_norm_subclass_own_arithmetic():
    # Batch statistics with a correction of its own, and running ones by another rule.
    class Slow(nn.BatchNorm1d):
        def forward(self, x):
            mean, var = x.mean(0), x.var(0, unbiased=True)
            if self.training:
                with torch.no_grad():
                    self.running_mean.lerp_(mean, 0.3)
                    self.running_var.lerp_(var, 0.3)
            return (x - mean) / (var + 0.1).sqrt() * self.weight + self.bias

    return Net(Slow(8))


@_.case("f-class")
def layer_norm_subclass_without_mean():
    class RMS(nn.LayerNorm):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    return Net(RMS(8))


@_.case("f-class", sample=IMAGE)
def frozen_batch_norm_class():
    # torchvision's FrozenBatchNorm: buffers only.
    class Frozen(nn.BatchNorm2d):
        def forward(self, x):
            scale = self.weight * (self.running_var + self.eps).rsqrt()
            return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]

    norm = Frozen(4)
    norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)
    norm.requires_grad_(False)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@_.case("f-class")
def dropout_subclass_that_scales():
    # Overrides dropout with something else.
    class Scale(nn.Dropout):
        def forward(self, x):
            return x * (1 - self.p)

    return Net(Scale(0.4))


@_.case("f-class")
def embedding_bag_subclass():
    class Bag(nn.EmbeddingBag):
        def forward(self, x):
            return super().forward(x) * self.weight.norm()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = Bag(9, 8, mode="sum"), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.bag((x.abs() * 3).long() % 9))

    return Model()


@_.case("f-class", sample=SEQUENCE)
def attributes_of_lstm_read():
    # Code asks the layer for its sizes and flags.
    class Model(Rec):
        def forward(self, x):
            n = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
            zero = x.new_zeros(n, x.shape[0], self.rnn.hidden_size)
            _, (h, c) = self.rnn(x, (zero + 0.5, zero))
            return self.head(h[-1] + c[-1])

    return Model(nn.LSTM(8, 6, 2, batch_first=True))


@_.case("g-reuse", sample=IMAGE)
def dilation_set_in_loop():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 3, 3, padding="same"), nn.Linear(3, 3)

        def forward(self, x):
            for d in (1, 2, 3):
                self.conv.dilation = (d, d)
                self.conv._reversed_padding_repeated_twice = [d] * 4
                x = x + self.conv(x).tanh()
            return self.head(x.mean((2, 3)))

    return Model()


@_.case("g-reuse", sample=IMAGE)
def stride_changed_between_calls():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.conv, self.head = nn.AvgPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 3)

        def forward(self, x):
            self.conv.stride = (1, 1)
            fine = self.conv(x)
            self.conv.stride = (2, 2)
            coarse = self.conv(x)
            return self.head(torch.cat([fine.mean((2, 3)), coarse.amax((2, 3))], 1))

    return Model()


@_.case("g-reuse")
def negative_slope_by_depth():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
            self.act = nn.LeakyReLU()

        def forward(self, x):
            for depth, f in enumerate(self.f):
                self.act.negative_slope = 0.5 / (depth + 1)
                x = self.act(f(x))
            return x

    return Model()


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
def inner_step_by_functional_call():
    # The second call takes weights moved by a learned vector.
    class Model(Net):
        def __init__(self):
            super().__init__(nn.Linear(8, 8))
            self.delta = nn.Parameter(0.1 * torch.randn(8, 8))

        def forward(self, x):
            h = self.a(x)
            moved = {"weight": self.between.weight + self.delta, "bias": self.between.bias}
            return self.b(self.between(h) + torch.func.functional_call(self.between, moved, (h,)).tanh())

    return Model()


@_.case("g-reuse")
def hypernetwork_weights():
    # A generator makes the weights of a layer that has none of its own.
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.code = nn.Parameter(torch.randn(5))
            self.hyper, self.main = nn.Linear(5, 27), nn.Linear(8, 3)

        def forward(self, x):
            w = self.hyper(self.code)
            made = {"weight": w[:24].view(3, 8), "bias": w[24:]}
            return torch.func.functional_call(self.main, made, (x,))

    return Model()


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
def cell_with_other_weights_per_step():
    class Model(nn.Module):
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

    return Model()


@_.case("g-reuse")
def lora_merged_in_forward():
    # The low-rank update joins the frozen weight at each call.
    class Model(Net):
        def __init__(self):
            super().__init__(nn.Linear(8, 8).requires_grad_(False))
            self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2) * 0.1)

        def forward(self, x):
            weight = self.between.weight + self.up @ self.down
            return self.b(F.linear(self.a(x), weight, self.between.bias))

    return Model()


@_.case("g-reuse", sample=SEQUENCE)
def gru_by_functional_call():
    class Model(Rec):
        def __init__(self):
            super().__init__(nn.GRU(8, 6, batch_first=True))
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            named = {name: each * self.scale for name, each in self.rnn.named_parameters()}
            return self.head(torch.func.functional_call(self.rnn, named, (x,))[0].mean(1))

    return Model()


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
def heads_swapped_in_forward():
    # The attribute names another layer in each call of the same code.
    class Model(nn.Module):
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

    return Model()
