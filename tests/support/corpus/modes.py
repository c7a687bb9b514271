# mypy: ignore-errors
"""Kind (a): parts in inference mode while the rest trains. All of them train like torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.corpus.building import IMAGE, SEQUENCE, Collection, TwoLayers

_ = Collection()
CASES = _.cases


class Tuned(nn.Module):
    """An encoder between two trained layers, its result averaged over the sequence."""

    def __init__(self, encoder: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.enc = encoder
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enc(self.embed(x))
        h = h[0] if isinstance(h, tuple) else h
        return self.head(h.mean(1) if h.dim() == 3 else h)


def frozen(module: nn.Module) -> nn.Module:
    """Return ``module`` in inference mode and without gradients."""
    return module.eval().requires_grad_(False)


@_.case("a-mode", sample=SEQUENCE)
def frozen_gru_dropout() -> nn.Module:
    # The layer's own dropout between its two levels is off.
    return Tuned(frozen(nn.GRU(8, 8, 2, dropout=0.5, batch_first=True)))


@_.case("a-mode", sample=SEQUENCE)
def lstm_eval_but_trained() -> nn.Module:
    # In inference mode, and its weights still train.
    model = Tuned(nn.LSTM(8, 8, 2, dropout=0.4, batch_first=True, bidirectional=True), 16)
    model.enc.eval()
    return model


@_.case("a-mode", sample=SEQUENCE)
def frozen_rnn_relu_dropout() -> nn.Module:
    return Tuned(frozen(nn.RNN(8, 8, 2, nonlinearity="relu", dropout=0.5, batch_first=True)))


class Attending(nn.Module):
    """Self-attention with residual."""

    def __init__(self) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.att(x, x, x, need_weights=False)[0])


@_.case("a-mode", sample=SEQUENCE)
def frozen_attention_dropout() -> nn.Module:
    # The rate goes to scaled_dot_product_attention, not to a Dropout layer.
    return Tuned(frozen(Attending()))


@_.case("a-mode", sample=SEQUENCE)
def attention_eval_by_train_override() -> nn.Module:
    # The usual idiom of fine-tuning: train() leaves the encoder in inference mode.
    class Model(Tuned):
        def train(self, mode: bool = True) -> Model:
            super().train(mode)
            self.enc.eval()
            return self

    return Model(Attending()).train()


@_.case("a-mode", sample=SEQUENCE)
def decoder_layer_eval() -> nn.Module:
    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x, x.flip(1))
            return out

    return Tuned(frozen(Decoding()))


@_.case("a-mode", sample=SEQUENCE)
def two_layers_of_encoder_eval() -> nn.Module:
    # Only the lower layers of a stack are frozen, as in gradual unfreezing.
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    for each in stack.layers[:2]:
        each.eval().requires_grad_(False)
        each.dropout.p = each.dropout1.p = 0.4
    return Tuned(stack)


class FunctionalDrop(nn.Module):
    """Dropout by function, with the module's own flag."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.a(x)), 0.4, self.training)
        out: Tensor = self.b(F.dropout(h, p=0.2, training=self.training, inplace=False))
        return out


@_.case("a-mode")
def functional_dropout_eval() -> nn.Module:
    return Tuned(FunctionalDrop().eval())


class Branching(nn.Module):
    """Other arithmetic in training, without any draw."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h * 0.5 if self.training else torch.tanh(h)


@_.case("a-mode")
def branch_on_training_eval() -> nn.Module:
    return Tuned(Branching().eval())


@_.case("a-mode")
def twins_in_two_modes() -> nn.Module:
    # Two objects of one class, one of them in inference mode: a cache by class mixes them up.
    model = nn.Sequential(nn.Linear(8, 8), Branching(), Branching(), nn.Linear(8, 3))
    model[1].eval()
    return model


@_.case("a-mode")
def functional_rrelu_eval() -> nn.Module:
    # The mean slope in inference, a drawn one in training.
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act = nn.Linear(8, 8), nn.RReLU(0.1, 0.6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.act(self.a(x))
            return out

    return Tuned(Leaky().eval())


class Images(nn.Module):
    """A convolutional backbone and a trained head."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x).mean((2, 3)))
        return out


@_.case("a-mode", sample=IMAGE)
def instance_norm_statistics_eval() -> nn.Module:
    # Keeps running statistics: inference reads them, training does not.
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    model = Images(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()))
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)
    model.backbone.eval()
    return model


@_.case("a-mode", sample=IMAGE)
def group_norm_and_dropout2d_eval() -> nn.Module:
    return Images(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Dropout2d(0.5)).eval())


@_.case("a-mode", sample=IMAGE)
def batch_norm_eval_deep_inside() -> nn.Module:
    # One norm, three levels down, keeps its statistics; its neighbour moves.
    inner = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )
    inner[1].running_mean.uniform_(-1, 1)
    inner[1].eval()
    return Images(nn.Sequential(nn.Sequential(inner), nn.ReLU()))


@_.case("a-mode")
def spectral_norm_parametrization_eval() -> nn.Module:
    # In inference mode the power iteration rests: u and v stay.
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8), n_power_iterations=2)
    return Tuned(nn.Sequential(layer, nn.Tanh()).eval())


@_.case("a-mode")
def spectral_norm_parametrization_trains() -> nn.Module:
    # In training mode u and v move with every call.
    return Tuned(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))


@_.case("a-mode")
def old_spectral_norm_eval() -> nn.Module:
    return Tuned(nn.utils.spectral_norm(nn.Linear(8, 8)).eval())


class StochasticDepth(nn.Module):
    """Residual block that is left out at random in training, scaled in inference."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.f = rate, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.f(x))
        if self.training:
            h = h * (torch.rand(len(x), 1) > self.rate) / (1 - self.rate)
        return x + h


@_.case("a-mode")
def stochastic_depth_eval() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), StochasticDepth(0.5), StochasticDepth(0.3), nn.Linear(8, 3))
    for block in (model[1], model[2]):
        block.eval()
    return model


@_.case("a-mode")
def train_override_with_condition() -> nn.Module:
    # Only norms stay in inference mode, found by type, as detection code does.
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
            self.body[1].running_var.fill_(3.0)

        def train(self, mode: bool = True) -> Detector:
            super().train(mode)
            for each in self.modules():
                if isinstance(each, nn.BatchNorm1d | nn.Dropout):
                    each.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            return out

    return Detector().train()


@_.case("a-mode")
def bilinear_alpha_dropout_eval() -> nn.Module:
    class SelfNormal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop = nn.Bilinear(8, 8, 8), nn.AlphaDropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(F.selu(self.a(x, x)))

    return Tuned(SelfNormal().eval())


@_.case("a-mode")
def mode_by_attribute() -> nn.Module:
    # `training` is set by hand, without eval().
    model = Tuned(FunctionalDrop())
    model.enc.training = False
    return model


@_.case("a-mode", sample=SEQUENCE)
def sdpa_rate_by_mode() -> nn.Module:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            rate = 0.4 if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
            return out.transpose(1, 2).flatten(2)

    return Tuned(Causal().eval())


@_.case("a-mode")
def gumbel_gate_eval() -> nn.Module:
    # Draws Gumbel noise only in training.
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.experts = nn.Linear(8, 2), nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            s = self.score(x)
            gate = F.gumbel_softmax(s, tau=0.5) if self.training else s.softmax(-1)
            return torch.einsum("be,bek->bk", gate, self.experts(x).unflatten(-1, (2, 8)))

    return Tuned(Gate().eval())


@_.case("a-mode")
class DrawnAndUsedInTraining(TwoLayers):
    # Inference draws the same numbers and reads none of them.
    def forward(self, x):
        h = self.a(x)
        mixed = torch.where(torch.rand_like(h) < 0.2, 0.5 * h, h)
        return self.b(mixed if self.training else 0.9 * h)
