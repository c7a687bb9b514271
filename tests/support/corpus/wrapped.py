# mypy: ignore-errors
"""Section 2: modules that ended in raw exceptions: pruning, parametrizations, scripts, complex weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from edgefl.contract.tensors import TensorSpec
from tests.support.corpus.building import IMAGE, SEQUENCE, Collection, Rec, TwoLayers

_ = Collection()
CASES = _.cases


def dense():
    """Return a small classifier."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


@_.case("n-pruned")
def pruned_random_unstructured():
    # The weight is an attribute made of weight_orig and weight_mask before each call.
    model = dense()
    torch.manual_seed(1)
    prune.random_unstructured(model[0], "weight", 0.4)
    return model


@_.case("n-pruned")
def pruned_structured_and_bias():
    model = dense()
    prune.ln_structured(model[0], "weight", 0.25, n=2, dim=0)
    prune.l1_unstructured(model[0], "bias", 0.5)
    return model


@_.case("n-pruned", sample=IMAGE)
def pruned_convolution():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


@_.case("n-pruned")
def pruned_globally():
    model = dense()
    prune.global_unstructured(
        [(model[0], "weight"), (model[2], "weight")], pruning_method=prune.L1Unstructured, amount=0.5
    )
    return model


@_.case("n-pruned")
def pruned_batch_norm():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    nn.init.uniform_(model[1].weight)
    prune.l1_unstructured(model[1], "weight", 0.5)
    return model


@_.case("n-pruned")
def pruned_and_removed():
    # remove() makes it an ordinary parameter again.
    model = dense()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.remove(model[0], "weight")
    return model


@_.case("n-pruned")
def custom_mask():
    model = dense()
    prune.custom_from_mask(model[2], "weight", torch.tril(torch.ones(3, 8)))
    return model


def quantised(part, args):
    """Set the weight from another parameter, as older normalisations do."""
    part.weight = part.raw * part.raw.abs().mean()


@_.case("n-pruned")
def pre_hook_sets_weight():
    # A home-made reparametrization by a pre-hook.
    model = dense()
    layer = model[0]
    layer.raw = nn.Parameter(layer.weight.detach().clone())
    del layer.weight
    quantised(layer, ())
    layer.register_forward_pre_hook(quantised)
    return model


@_.case("o-param")
def weight_norm_old():
    # The older form: g, v and a pre-hook.
    model = dense()
    nn.utils.weight_norm(model[0], "weight")
    return model


@_.case("o-param", sample=SEQUENCE)
def weight_norm_on_gru():
    return Rec(parametrizations.weight_norm(nn.GRU(8, 6, batch_first=True), "weight_hh_l0"))


@_.case("o-param", sample=SEQUENCE)
def weight_norm_on_lstm_input():
    return Rec(parametrizations.weight_norm(nn.LSTM(8, 6, batch_first=True), "weight_ih_l0"))


@_.case("o-param", sample=IMAGE)
def weight_norm_on_transposed_conv():
    conv = parametrizations.weight_norm(nn.ConvTranspose2d(3, 4, 3), dim=1)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))


@_.case("o-param", "refused")
def orthogonal_weight():
    model = dense()
    parametrizations.orthogonal(model[0], orthogonal_map="cayley")
    return model


class Positive(nn.Module):
    """Keeps a tensor positive."""

    def forward(self, x):
        return nn.functional.softplus(x)


class Symmetric(nn.Module):
    """Makes a matrix symmetric."""

    def forward(self, x):
        return x.triu() + x.triu(1).t()


@_.case("o-param")
def positive_batch_norm_weight():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    parametrize.register_parametrization(model[1], "weight", Positive())
    return model


@_.case("o-param")
def positive_layer_norm_weight():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    parametrize.register_parametrization(model[1], "weight", Positive())
    parametrize.register_parametrization(model[1], "bias", Positive())
    return model


@_.case("o-param")
def two_parametrizations_in_a_row():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrize.register_parametrization(model[0], "weight", Positive())
    return model


@_.case("o-param", sample=TensorSpec((6,), torch.int64, below=11))
class ParametrizedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        parametrize.register_parametrization(self.embed, "weight", Positive())

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


@_.case("p-root", "refused")
def scripted_root():
    return torch.jit.script(dense())


@_.case("p-root", "refused")
def scripted_own_class():
    return torch.jit.script(Scripted())


@_.case("p-root", "refused")
def traced_root():
    return torch.jit.trace(dense(), torch.zeros(2, 8))


@_.case("p-root", "refused")
def scripted_submodule():
    model = dense()
    model[0] = torch.jit.script(nn.Linear(8, 8))
    return model


class Scripted(nn.Module):
    """A class that the script compiler accepts."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x))


@_.case("p-root")
def data_parallel_root():
    return nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


@_.case("p-root")
def data_parallel_inside():
    return nn.Sequential(nn.DataParallel(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3))


@_.case("p-compiled")
def compiled_function_inside():
    @torch.compile(backend="eager")
    def act(h):
        return h * torch.sigmoid(h)

    class Model(TwoLayers):
        def forward(self, x):
            return self.b(act(self.a(x)))

    return Model()


@_.case("p-compiled")
def compiled_root():
    return torch.compile(dense(), backend="eager")


@_.case("p-compiled")
def compiled_in_place():
    # module.compile() leaves the class and changes the call.
    model = dense()
    model.compile(backend="eager")
    return model


@_.case("p-compiled")
class CompiledSubmodule(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.compile(nn.Linear(8, 8), backend="eager"), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x).relu())


@_.case("q-complex", sample=SEQUENCE)
class ComplexRotary(nn.Module):
    # Llama's own code: view_as_complex and a table by torch.polar.
    def __init__(self):
        super().__init__()
        self.q, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        angle = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angle), angle), persistent=False)

    def forward(self, x):
        z = torch.view_as_complex(self.q(x).unflatten(-1, (4, 2)))
        h = torch.view_as_real(z * self.turns).flatten(-2)
        return self.head(h.mean(1).tanh())


@_.case("q-complex", sample=SEQUENCE)
class ComplexRotaryPersistent(ComplexRotary):
    # The table is in the state dictionary.
    def __init__(self):
        super().__init__()
        table = self.turns
        del self.turns
        self.register_buffer("turns", table)


@_.case("q-complex", sample=SEQUENCE)
class ComplexTableMadeInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        angle = torch.outer(torch.arange(x.shape[1]).float(), torch.tensor([1.0, 0.3, 0.1, 0.03]))
        z = torch.view_as_complex(self.q(x).reshape(*x.shape[:2], 4, 2))
        return self.head(
            torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(2).mean(1)
        )


class Turned(nn.Module):
    """Attention of two heads, whose queries and keys a table of complex numbers turns."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)
        angle = torch.outer(torch.arange(9.0), 0.1 ** torch.arange(0, 4, 2).float())
        self.prepare(angle)

    def prepare(self, angle):
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angle), angle), persistent=False)

    def table(self, length):
        return self.freqs_cis[:length]

    def turn(self, q):
        # [B, T, heads, width], as in Llama.
        pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        table = self.table(q.shape[1])[None, :, None]
        return torch.view_as_real(pairs * table).flatten(3).type_as(q)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 4)) for each in self.qkv(x).chunk(3, -1))
        q, k, v = (each.transpose(1, 2) for each in (self.turn(q), self.turn(k), v))
        h = ((q @ k.transpose(2, 3)) / 2).softmax(-1) @ v
        return self.head(h.transpose(1, 2).flatten(2).mean(1))


@_.case("q-complex", sample=SEQUENCE)
class TurnedHeads(Turned):
    pass


@_.case("q-complex", sample=SEQUENCE)
class TurnedByExponential(Turned):
    # The table is an attribute, and heads come before positions.
    def prepare(self, angle):
        self.table_of_angles = torch.exp(1j * angle)

    def turn(self, q):
        pairs = torch.view_as_complex(q.unflatten(-1, (2, 2))).permute(0, 2, 1, 3)
        table = self.table_of_angles.narrow(0, 0, 5).unsqueeze(0).expand(2, -1, -1)
        turned = (pairs * table).transpose(1, 2)
        return torch.view_as_real(turned).reshape(q.shape)


@_.case("q-complex", sample=SEQUENCE)
class TurnedByRealTables(Turned):
    # Complex numbers are joined and taken apart in forward.
    def prepare(self, angle):
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turn(self, q):
        table = torch.complex(self.cos, self.sin)[torch.arange(q.shape[1])].view(1, -1, 1, 2)
        pairs = torch.complex(q[..., :2], q[..., 2:])
        turned = pairs * table.conj() + pairs.conj() * 0.1j
        return torch.cat([turned.real, turned.imag], -1)


@_.case("q-complex", sample=SEQUENCE)
class TurnedByTrainedAngles(Turned):
    # Gradients go into the angles.
    def prepare(self, angle):
        self.rate = nn.Parameter(torch.tensor([1.0, 0.2]))

    def table(self, length):
        angle = torch.arange(length).float()[:, None] * self.rate
        return torch.polar(torch.ones_like(angle), angle) * torch.exp(1j * angle * 0.1)


@_.case("q-complex")
class ComplexWeightAsPairs(nn.Module):
    # What a refusal of complex weights proposes.
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 2)), nn.Linear(8, 3)

    def forward(self, x):
        return self.b((x * torch.view_as_complex(self.w)).abs())


@_.case("q-complex", "refused", sample=SEQUENCE)
class FourierOperator(nn.Module):
    # Complex weights times a spectrum.
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8, dtype=torch.cfloat) / 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1)
        return self.head(torch.fft.irfft(spectrum * self.w, n=5, dim=1).mean(1))


@_.case("q-complex", "refused")
class ComplexParameterMagnitude(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, dtype=torch.cfloat)), nn.Linear(8, 3)

    def forward(self, x):
        return self.b((x * self.w).abs())


@_.case("q-complex", "refused", sample=SEQUENCE)
class SpectrumMagnitude(nn.Module):
    # Complex values only in between.
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.fft.rfft(self.a(x), dim=1).abs().add(0.1).log().mean(1))


@_.case("q-complex", "refused")
class LogDeterminant(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(2, 3)

    def forward(self, x):
        m = self.a(x).unflatten(-1, (4, 4))
        m = m @ m.transpose(-1, -2) + torch.eye(4)
        return self.b(torch.stack([torch.logdet(m), m.diagonal(dim1=-2, dim2=-1).sum(-1)], -1))
