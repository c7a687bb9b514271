"""Layers that others wrote on top of torch's, and what their modules do when they are put into training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.copies import copy_module
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.statistics import use_batch
from tests.support.errors import ModelError, refuses
from tests.support.gradients import assert_trains_as_torch

SAMPLE = TensorSpec((2, 4, 4))


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation of its own weights behind it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Twice(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 3, 3), norm
        self.second, self.head = nn.Conv2d(3, 3, 1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.head(torch.relu(self.second(x) + x).flatten(1))


class Frozen(Net):
    """Trains with the statistics that it has."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


class Shared(nn.Module):
    """One block, of two layers, at two places of the same stretch."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.blocks = nn.ModuleList([nn.ModuleDict({"own": nn.Linear(6, 6), "block": block}) for _ in "ab"])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        skipped = x
        for each in self.blocks:
            x = torch.tanh(each["block"](each["own"](x))) + skipped
        return self.head(x)


def agrees_in_training(module: nn.Module, spec: ModelSpec | None = None) -> Tensors:
    """Assert that its units train as the module does in torch; return what is fixed after the pass."""
    sample = TensorSpec((6,)) if isinstance(module, Shared | Pair) else SAMPLE
    spec = spec or split(module, sample=sample, classes=3)
    x, y = torch.randn(5, *sample.shape), torch.tensor([0, 1, 2, 0, 1])
    own = copy_module(module).train()
    found, fixed = assert_trains_as_torch(own, spec, F.cross_entropy(own(x), y), {"x": x, "y": y})
    assert {spec.global_names[name] for name, _ in own.named_parameters()} <= set(found)
    for name, buffer in own.named_buffers():
        if name in spec.global_names:
            torch.testing.assert_close(fixed[spec.global_names[name]], buffer)
    return fixed


def test_a_batch_norm_with_code_of_its_own_keeps_it() -> None:
    torch.manual_seed(0)
    module = Net(NormAct(3))
    spec = split(module, sample=SAMPLE, classes=3)

    agrees_in_training(module, spec)

    assert set(spec.global_names) == {n for n in module.state_dict() if "num_batches" not in n}
    x = torch.randn(2, *SAMPLE.shape)
    torch.testing.assert_close(spec.module.eval()(x), module.eval()(x))
    torch.testing.assert_close(use_batch(spec.module)(x), module.train()(x))


class Hooked(nn.BatchNorm2d):
    """A batch norm with hooks that change what it reads and returns."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.3)
        self.register_forward_pre_hook(lambda _layer, args: (args[0] * 2,))
        self.register_forward_hook(lambda _layer, _args, out: out.tanh())


class Functional(nn.Module):
    """Statistics that a module moves by the function itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training, momentum=0.2)


class Native(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return torch.native_batch_norm(x, None, None, self.mean, self.var, self.training, 0.2, 1e-5)[0]


class OfTorch(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x, None, None, self.mean, self.var, self.training, 0.2, 1e-5, False)


def patched() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(3)
    own = norm.forward
    norm.forward = lambda x: own(x).sin()
    return norm


def parametrized() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return norm


NORMS = {
    "twice": lambda: Twice(3),
    "patched": patched,
    "parametrized": parametrized,
    "functional": lambda: Functional(3),
    "native": lambda: Native(3),
    "of torch": lambda: OfTorch(3),
    "synchronised": lambda: nn.SyncBatchNorm(3),
    "without weights": lambda: nn.BatchNorm2d(3, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
}


class Asking(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if isinstance(self.norm, nn.BatchNorm2d):
            x = x * self.norm.num_features
        return self.head(torch.relu(self.second(x) + x).flatten(1))


class Pair(nn.Module):
    """Two batch norms with one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.second.weight = self.first.weight
        self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.middle(self.first(x))))


def _flat(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.Flatten(), nn.Linear(12, 3))


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"norm: {name}": lambda make=make: Net(make()) for name, make in NORMS.items()},
    "hooks of a leaf": lambda: _flat(Hooked(3)),
    "patched leaf": lambda: _flat(patched()),
    "code that asks for the class of a layer": lambda: Asking(nn.BatchNorm2d(3)),
    "dropout in inference mode": lambda: Frozen(nn.Dropout(0.5)),
    "a block at two places of a unit": Shared,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_its_author_wrote_it(name: str) -> None:
    torch.manual_seed(0)
    agrees_in_training(MODULES[name]())


class CumulativeNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, CumulativeNorm, nn.SyncBatchNorm])
def test_a_cumulative_average_is_refused_wherever_the_layer_sits(kind: type[nn.Module]) -> None:
    module = Net(nn.Sequential(kind(3, momentum=None)))

    with refuses(ModelError, module="norm.0"):
        split(module, sample=SAMPLE, classes=3)


def test_a_module_that_keeps_its_statistics_in_training_does_so() -> None:
    torch.manual_seed(0)
    module = Frozen(nn.BatchNorm2d(3))
    module.norm.running_mean.uniform_(-1, 1)
    before = module.norm.running_mean.clone()

    fixed = agrees_in_training(module)

    assert any(torch.equal(value, before) for value in fixed.values() if value.shape == before.shape)


def test_tied_scales_of_batch_norms_are_trained_as_one() -> None:
    torch.manual_seed(0)
    module = Pair()
    spec = split(module, ["second"], sample=TensorSpec((6,)), classes=3)

    agrees_in_training(module, spec)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


def computed(layer: nn.Module) -> nn.Module:
    """The weight is made of another one in each call."""
    layer.scale = nn.Parameter(torch.tensor(2.0))
    layer.kernel = nn.Parameter(layer.weight.detach().clone())
    del layer.weight
    layer.weight = layer.kernel * layer.scale

    def make(own: nn.Module, _args: object) -> None:
        own.weight = own.kernel * own.scale

    layer.register_forward_pre_hook(make)
    return layer


COMPUTED = {
    "pruned": pruned,
    "by a hook": computed,
    "older weight norm": nn.utils.weight_norm,
    "older spectral norm": nn.utils.spectral_norm,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("layer", [lambda: nn.Conv2d(2, 3, 3), lambda: nn.Conv2d(2, 3, (3, 1), bias=False)])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_weight_computed_in_each_call_trains(name: str, layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(COMPUTED[name](layer()), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))

    spec = split(module, sample=SAMPLE, classes=3)
    fixed = agrees_in_training(module, spec)

    assert len(fixed) == len(list(module.buffers()))
    x = torch.randn(2, *SAMPLE.shape)
    torch.testing.assert_close(spec.module.eval()(x), module.eval()(x))


def test_lazy_layers_get_their_shapes_from_the_sample() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )

    spec = split(module, sample=SAMPLE, classes=3)

    assert spec.module.state_dict()["4.weight"].shape == (3, 12)
    assert isinstance(module[4], nn.LazyLinear), "the module itself is left as it was"


class Island(nn.Module):
    """Computes in full precision whatever the device is, as libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(device_type=x.device.type, enabled=False):
            return x.float().softmax(-1)


def test_an_island_of_full_precision_is_none_of_a_device_s_business() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Island(), nn.Linear(4, 3)), torch.randn(5, 4)
    spec = split(model, sample=TensorSpec((4,)), classes=3)

    torch.testing.assert_close(spec.module(x), model(x))
    with torch.autocast("cpu", enabled=False):
        assert not torch.is_autocast_enabled("cpu")


class Config:
    _experts_implementation = "grouped_mm"


class Experts(nn.Module):
    """A mixture of experts as transformers has it: rows by their expert, or each row's weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self._is_expert_parallel = config, False
        self.weight = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        best = x[:, :3].argmax(1)
        if self.config._experts_implementation == "batched_mm":
            return torch.bmm(self.weight[best], x.unsqueeze(-1)).squeeze(-1)
        out = torch.zeros_like(x)
        for number, weight in enumerate(self.weight):
            rows = (best == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, x[rows] @ weight.t())
        return out


def test_experts_of_transformers_read_weights_by_row() -> None:
    config = Config()
    model, x = nn.Sequential(nn.Linear(4, 4), Experts(config), nn.Linear(4, 3)), torch.randn(9, 4)
    spec = split(model, sample=TensorSpec((4,)), classes=3)

    torch.testing.assert_close(spec.module(x), model(x))
    assert config._experts_implementation == "grouped_mm"


# -- recurrent layers of torch as people change them train like torch, weights and buffers over several steps --


E, H, T, RATE = 4, 5, 6, 0.3
OTHERS_RECURRENT_SAMPLE = TensorSpec((T, E))


class OthersRecurrentNet(nn.Module):
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


def others_recurrent_patched(layer: nn.Module) -> nn.Module:
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
    "patched": lambda: others_recurrent_patched(gru()),
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
    module(OTHERS_RECURRENT_SAMPLE.rows(2).zeros())
    spec, own = split(module, sample=OTHERS_RECURRENT_SAMPLE, classes=3), copy_module(module).train()
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


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_as_its_author_wrote_it(name: str) -> None:
    torch.manual_seed(0)
    trains_as_in_torch(OthersRecurrentNet(LAYERS[name]()))


@pytest.mark.filterwarnings("ignore:.*norm:FutureWarning")
@pytest.mark.parametrize(
    "layer", [lambda: hooked(gru()), lambda: nn.utils.spectral_norm(lstm(), "weight_hh_l0")]
)
def test_hooks_of_a_layer_that_no_cut_parts_are_called(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    trains_as_in_torch(nn.Sequential(OthersRecurrentNet(layer())))


def test_copies_leave_the_buffers_of_a_norm_as_they_are() -> None:
    layer = parametrizations.spectral_norm(lstm(), "weight_hh_l0")
    before = {name: value.clone() for name, value in layer.state_dict().items()}

    made = copy_module(copy_module(layer))

    for state in (layer.state_dict(), made.state_dict()):
        assert all(torch.equal(state[name], value) for name, value in before.items())
    x = torch.randn(2, T, E)
    torch.testing.assert_close(made(x)[0], layer(x)[0])
