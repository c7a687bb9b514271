"""Recurrent layers of torch as people change them train like torch, weights and buffers over several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from edgefl.contract.tensors import TensorSpec
from edgefl.models.copies import copy_module
from edgefl.models.split import split
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide

E, H, T, RATE = 4, 5, 6, 0.3
SAMPLE = TensorSpec((T, E))


class Net(nn.Module):
    """Asks for the class of its layer, as code does that takes any."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(E, E), rnn, nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.rnn(torch.tanh(self.first(x)))
        if isinstance(self.rnn, nn.LSTM | nn.GRU | nn.RNN):
            out = out[0]
        return self.head(out[:, -1])


class Scaled(nn.GRU):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Any:
        out, last = super().forward(input, hx)
        return out.tanh() * 2, last


class Normed(nn.LSTM):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.norm = nn.LayerNorm(self.hidden_size)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        out, last = super().forward(input, hx)
        return self.norm(out), last


class ByHand(nn.LSTM):
    """Steps of its own over the weights of torch's layer."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        h = c = input.new_zeros(input.shape[0], self.hidden_size)
        states = []
        for x in input.unbind(1):
            inside = F.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            i, f, g, o = (F.linear(x, self.weight_ih_l0, self.bias_ih_l0) + inside).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1), (h, c)


def patched(layer: nn.Module) -> nn.Module:
    own = layer.forward
    layer.forward = lambda x: (own(x)[0].sin(), None)
    return layer


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda _layer, args: (args[0] * 2,))
    layer.register_forward_hook(lambda _layer, _args, out: (out[0] * 3, out[1]))
    return layer


def scaled_inside(layer: nn.Module) -> nn.Module:
    """A recurrent weight that a pre-hook computes, as AWD-LSTM has it."""
    raw = nn.Parameter(layer.weight_hh_l0.detach().clone())
    del layer._parameters["weight_hh_l0"]
    layer.register_parameter("weight_hh_l0_raw", raw)
    layer.weight_hh_l0 = raw * 0.5

    def make(own: nn.Module, _args: object) -> None:
        own.weight_hh_l0 = own.weight_hh_l0_raw * 0.5

    layer.register_forward_pre_hook(make)
    return layer


def lstm(**options: Any) -> nn.LSTM:
    return nn.LSTM(E, H, batch_first=True, **options)


def gru(**options: Any) -> nn.GRU:
    return nn.GRU(E, H, batch_first=True, **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lstm,
    "subclass of gru": lambda: Scaled(E, H, batch_first=True),
    "layer norm inside": lambda: Normed(E, H, batch_first=True),
    "by hand": lambda: ByHand(E, H, batch_first=True),
    "patched": lambda: patched(gru()),
    "weight norm": lambda: parametrizations.weight_norm(lstm(), "weight_hh_l0"),
    "weight norm of a second layer": lambda: parametrizations.weight_norm(gru(num_layers=2), "weight_ih_l1"),
    "spectral norm": lambda: parametrizations.spectral_norm(lstm(), "weight_hh_l0"),
    "spectral norm of rnn": lambda: parametrizations.spectral_norm(
        nn.RNN(E, H, batch_first=True), "weight_ih_l0"
    ),
    "older weight norm": lambda: nn.utils.weight_norm(lstm(), "weight_hh_l0"),
    "pruned": lambda: prune.l1_unstructured(lstm(), "weight_hh_l0", 0.5),
    "by a hook": lambda: scaled_inside(lstm()),
    "projected": lambda: lstm(num_layers=2, proj_size=3, bidirectional=True),
    "without biases": lambda: nn.RNN(E, H, 2, nonlinearity="relu", bias=False, batch_first=True),
}


def trains_as_in_torch(module: nn.Module) -> None:
    module(SAMPLE.rows(2).zeros())
    spec, own = split(module, sample=SAMPLE, classes=3), copy_module(module).train()
    objective, optimizer = Objective.of(OutputSide(spec, 0)), torch.optim.SGD(own.parameters(), lr=RATE)
    state = {name: value.clone() for name, value in spec.weights.items()}
    y = torch.tensor([0, 1, 2, 0, 1])
    for _ in range(3):
        x = torch.randn(5, T, E)
        _, _, gradients, moved = gradient(objective, state, {"batch.0.x": x, "batch.0.y": y})
        state |= {name: state[name] - RATE * each for name, each in gradients.items()} | moved
        optimizer.zero_grad()
        F.cross_entropy(own(x), y).backward()
        optimizer.step()
    right = own.state_dict()
    assert set(spec.global_names) == set(right)
    for name, value in right.items():
        torch.testing.assert_close(state[spec.global_names[name]], value, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_as_its_author_wrote_it(name: str) -> None:
    torch.manual_seed(0)
    trains_as_in_torch(Net(LAYERS[name]()))


@pytest.mark.filterwarnings("ignore:.*norm:FutureWarning")
@pytest.mark.parametrize(
    "layer", [lambda: hooked(gru()), lambda: nn.utils.spectral_norm(lstm(), "weight_hh_l0")]
)
def test_hooks_of_a_layer_that_no_cut_parts_are_called(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    trains_as_in_torch(nn.Sequential(Net(layer())))


def test_copies_leave_the_buffers_of_a_norm_as_they_are() -> None:
    layer = parametrizations.spectral_norm(lstm(), "weight_hh_l0")
    before = {name: value.clone() for name, value in layer.state_dict().items()}

    made = copy_module(copy_module(layer))

    for state in (layer.state_dict(), made.state_dict()):
        assert all(torch.equal(state[name], value) for name, value in before.items())
    x = torch.randn(2, T, E)
    torch.testing.assert_close(made(x)[0], layer(x)[0])
