"""The baseline of `python -m benchmarks train-step` computes what the measured model computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.torch_layers import check_torch_layers, to_torch_layers
from benchmarks.train_step.baselines import TrainStepSettings
from benchmarks.train_step.command import measure
from benchmarks.train_step.eager import built
from edgefl.errors import EdgeflError, ModelError
from edgefl.models.copies import trainable_copy
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.layers.recurrent import BiLstm, Gru, Lstm


class Rows(nn.Module):
    """Rows of an image (B, 1, T, 6) -> the mean of torch's hidden states, and the last state of an LSTM or GRU."""

    def __init__(self, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0] if self.layers.batch_first else x[:, 0].transpose(0, 1)
        out, last = self.layers(x)
        h = last[0] if isinstance(last, tuple) else last
        mean = out.mean(1 if self.layers.batch_first else 0)
        result: Tensor = self.head(torch.cat((mean, h[-1]), dim=1))
        return result


def _rows(layers: nn.LSTM | nn.GRU) -> nn.Module:
    module = Rows(layers)
    module(torch.zeros(2, 1, 5, 6))
    return module


def gru(classes: int = 3) -> nn.Module:
    """A user's factory."""
    return _rows(nn.GRU(6, 4, 2, batch_first=True, dropout=0.2, bidirectional=True))


def lstm(classes: int = 3) -> nn.Module:
    """Another one, with torch's default order of dimensions."""
    return _rows(nn.LSTM(6, 4))


def no_weights(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Softmax(dim=1))


@pytest.mark.parametrize("make", [gru, lstm])
def test_a_users_recurrent_layers_stay_torchs_own(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    written = make()
    x = torch.randn(4, 1, 5, 6)
    module = nn.Sequential(trainable_copy(written))

    back = to_torch_layers(module)

    kinds = [type(part) for part in back.modules()]
    assert type(written.get_submodule("layers")) in kinds
    assert back[0].layers.batch_first is written.get_submodule("layers").batch_first
    torch.testing.assert_close(back.eval()(x), written.eval()(x))
    check_torch_layers(module, x)


@pytest.mark.slow
def test_a_users_recurrent_model_is_measured() -> None:
    options = {"classes": 3, "sample_shape": [1, 5, 6]}

    row = measure(f"{__name__}:lstm", TrainStepSettings(batch=2, repeat=1, options=options))

    assert row.ms > 0 and row.eager_ms > 0 and row.max_rel_error < 1e-4


@pytest.mark.parametrize(
    "module",
    [
        Lstm(6, 4, layers=2, dropout=0.5, bidirectional=True),
        Gru(6, 4, layers=2, dropout=0.5),
        BiLstm(6, 4, 5),
    ],
    ids=lambda module: type(module).__name__,
)
def test_our_recurrent_layers_keep_their_values(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1, 1, generator=generator)

    check_torch_layers(nn.Sequential(module), torch.randn(3, 5, 6, generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet8", "bilstm"])
def test_models_of_the_zoo_pass_the_check(model: str) -> None:
    submodel = built(model, {}, "strong")

    check_torch_layers(submodel.suffix, submodel.boundary.rows(3).zeros())


class Sum(Lstm):
    """A layer that is called otherwise than the one it descends from."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0].sum(dim=1)


class Twice(Lstm):
    """The same shape, other values."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.run(x)[0]


@pytest.mark.parametrize(("wrong", "found"), [(Sum, "give (2, 5, 4)"), (Twice, "differ by 0.5")])
def test_a_baseline_that_computes_something_else_is_not_timed(wrong: type[Lstm], found: str) -> None:
    with pytest.raises(ModelError) as raised:
        check_torch_layers(nn.Sequential(wrong(6, 4)), torch.ones(2, 5, 6))

    assert found in raised.value.message and "nothing fair to measure against" in raised.value.message


def test_frozen_parameters_stay_frozen() -> None:
    module = nn.Sequential(BatchNorm(3), Lstm(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    module[1].requires_grad_(False)

    assert sum(parameter.requires_grad for parameter in to_torch_layers(module).parameters()) == 2


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3))
    x = torch.arange(12.0).view(4, 3)

    check_torch_layers(module, x)
    back = to_torch_layers(module)
    back(x)
    assert torch.equal(back[0].running_mean, torch.zeros(3))
    assert not torch.equal(back[1].running_mean, torch.zeros(3))


def test_a_model_without_weights_has_nothing_to_train() -> None:
    options = {"classes": 3, "sample_shape": [1, 1, 3]}

    with pytest.raises(ModelError, match="nothing to train"):
        measure(f"{__name__}:no_weights", TrainStepSettings(batch=2, repeat=1, options=options))


@pytest.mark.slow
def test_a_process_that_ends_is_told_in_a_line_and_its_log_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "no number")

    with pytest.raises(EdgeflError) as raised:
        measure("mlp", TrainStepSettings(batch=2, repeat=1, options={"size": 4}))

    assert "ended: " in raised.value.message and "\n" not in raised.value.message
    assert "PYTHONHASHSEED" in str(raised.value.details["log"])
