"""Layers that others wrote on top of torch's, and what their modules do when they are put into training mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.statistics import by_batch
from edgefl.wire.errors import ModelError

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


def agrees_in_training(module: nn.Module, spec: ModelSpec, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The loss's gradient by the module's own names, that of torch; what is fixed after the pass is returned."""
    x, y = torch.randn(5, *shape), torch.tensor([0, 1, 2, 0, 1])
    state = {name: value.clone() for name, value in spec.module.state_dict().items()}
    _, _, found, fixed = gradient(Objective.of(OutputSide(spec, 0)), state, {"batch.0.x": x, "batch.0.y": y})
    own = copy.deepcopy(module).train()
    F.cross_entropy(own(x), y).backward()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(found[spec.global_names[name]], parameter.grad)
    for name, buffer in own.named_buffers():
        if name in spec.global_names:
            torch.testing.assert_close(fixed[spec.global_names[name]], buffer)
    return fixed


def test_a_batch_norm_that_does_more_does_it_still() -> None:
    torch.manual_seed(0)
    module = Net(NormAct(3))
    spec = split(module, sample=SAMPLE, classes=3)

    agrees_in_training(module, spec, SAMPLE.shape)

    assert set(spec.global_names) == {n for n in module.state_dict() if "num_batches" not in n}
    x = torch.randn(2, *SAMPLE.shape)
    torch.testing.assert_close(spec.module.eval()(x), module.eval()(x))
    torch.testing.assert_close(by_batch(spec.module)(x), module.train()(x))


def test_one_that_normalises_twice_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Twice .*F\.batch_norm 2 times"):
        split(Net(Twice(3)), sample=SAMPLE, classes=3)


def test_a_module_that_keeps_its_statistics_in_training_does_so() -> None:
    torch.manual_seed(0)
    module = Frozen(nn.BatchNorm2d(3))
    module.norm.running_mean.uniform_(-1, 1)
    before = module.norm.running_mean.clone()

    fixed = agrees_in_training(module, split(module, sample=SAMPLE, classes=3), SAMPLE.shape)

    assert any(torch.equal(value, before) for value in fixed.values() if value.shape == before.shape)


def test_a_dropout_that_stays_in_inference_mode_drops_nothing() -> None:
    torch.manual_seed(0)
    module = Frozen(nn.Dropout(0.5))

    agrees_in_training(module, split(module, sample=SAMPLE, classes=3), SAMPLE.shape)


def test_a_block_at_two_places_of_a_unit_is_trained_as_one() -> None:
    torch.manual_seed(0)
    module = Shared()

    agrees_in_training(module, split(module, sample=TensorSpec((6,)), classes=3), (6,))


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_torch_s_older_norms_of_weights_are_refused_and_the_newer_are_not(norm: str) -> None:
    older = Net(nn.BatchNorm2d(3))
    older.second = getattr(nn.utils, norm)(older.second)
    with pytest.raises(ModelError, match=f"'second'.*parametrizations.{norm}"):
        split(older, sample=SAMPLE, classes=3)
    newer = Net(nn.BatchNorm2d(3))
    newer.second = getattr(nn.utils.parametrizations, norm)(newer.second)
    assert len(split(newer, sample=SAMPLE, classes=3).units) > 1


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
