# mypy: ignore-errors
"""Kind (f): subclasses with a forward of their own, and code that asks for the class of a layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from tests.support.corpus.building import IMAGE, SEQUENCE, Collection, Net, Rec

_ = Collection()
CASES = _.cases


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
class IsinstanceBatchNormInLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * 0.5 + x if isinstance(layer, nn.BatchNorm1d) else layer(x)
        return x


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


@_.case("r-ops")
class PlacesInQuantiles(nn.Module):
    # searchsorted of other quantiles for each feature, from both sides.
    def __init__(self):
        super().__init__()
        self.register_buffer("quantiles", torch.randn(8, 5).sort(-1).values)
        self.w, self.a = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 3)

    def forward(self, x):
        columns = x.t().contiguous()
        below = torch.searchsorted(self.quantiles, columns)
        above = torch.searchsorted(self.quantiles, columns, side="right")
        among = torch.bucketize(x, self.quantiles[0], right=True)
        return self.a(self.w[below].mean(0) + self.w[among].sum(1) + above.t()[:, :4])


@_.case("r-ops", sample=TensorSpec((6,), torch.int64, below=11))
class LoadOfExperts(nn.Module):
    # How often each token occurs, and with which weight.
    def __init__(self):
        super().__init__()
        self.embed, self.a = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, x):
        counts = torch.bincount(x.flatten(), minlength=11)
        shares = x.flatten().bincount(x.flatten() * 0.1, 11)
        return self.a((self.embed(x) * (counts[x] + shares[x]).unsqueeze(-1) / x.numel()).sum(1))


@_.case("l-constants", sample=SEQUENCE)
class CausalAttention(nn.Module):
    # torch writes into a copy of the mask.
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
        self.register_buffer("mask", torch.triu(torch.ones(5, 5, dtype=torch.bool), 1))

    def forward(self, x):
        return self.head(self.a(x, x, x, attn_mask=self.mask)[0].mean(1))


@_.case("l-constants")
def shifted_index():
    class Shuffle(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("order", torch.arange(8))

        def forward(self, h):
            order = self.order.clone()
            order[0] = 7
            order += 1
            return h[:, order % 8]

    return Net(Shuffle())
