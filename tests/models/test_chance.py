"""Dropout written as a function, wherever it lies: a noise input of the unit, and no other change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.models.graph.hidden_dropout import dropping
from edgefl.models.layers.explicit import Dropout
from edgefl.models.layers.visible import visible
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.programs.baselines.sgd import sgd
from edgefl.wire.errors import ModelError
from exporters.capture.trace import capture
from exporters.onnx.model import to_onnx
from tests.models.plain import Dropping
from tests.rings.rows import mostly_slow

SAMPLE = TensorSpec((6,))


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Dropping(6, 6), nn.Linear(6, 6), Dropping(6, 6, deep=True), nn.Linear(6, 5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 6), nn.Sequential(*_layers()[:3]), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.first(x)))


def _noise(spec: ModelSpec) -> list[str]:
    return list(Objective(spec.module, spec.sample).noise(3))


def _dropped(spec: ModelSpec, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return spec.module.train()(x)


def test_a_sequential_keeps_its_children_and_names_and_its_functions_that_drop_read_noise() -> None:
    layers, x = _layers(), torch.randn(3, 6)
    spec = split(layers, sample=SAMPLE, classes=5)

    assert spec.units == ("0", "1", "2", "3")
    assert set(spec.weights) == set(layers.state_dict())
    assert _noise(spec) == ["0.dropout.uniform", "2.layer.dropout.uniform"]
    assert torch.equal(spec.module.eval()(x), layers.eval()(x))
    assert not torch.equal(_dropped(spec, x, 1), _dropped(spec, x, 2))


def test_the_noise_of_a_function_that_drops_decides_what_is_dropped() -> None:
    (spec, x) = split(nn.Sequential(Dropping(6, 5)), sample=SAMPLE, classes=5), torch.randn(2, 6)
    (drop,) = [part for part in spec.module.modules() if isinstance(part, Dropout)]
    drop.uniform = torch.tensor([[0.0, 0.3, 0.2, 0.25, 0.9]] * 2)

    kept = spec.module.eval()(x) / 0.75 * torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])

    torch.testing.assert_close(spec.module.train()(x), kept)


@pytest.mark.parametrize(
    ("cuts",),
    mostly_slow(
        [(("first",),), (("inner",),), (("inner.1",),), (("inner.0", "inner.2"),)],
        [(("inner",),), (("inner.0", "inner.2"),)],
    ),
    ids="+".join,
)
def test_named_cuts_open_what_drops_by_a_function(cuts: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 6)
    spec = split(net, cuts, sample=SAMPLE, classes=5)

    assert len(spec.units) == len(cuts) + 1
    assert len(_noise(spec)) == 2
    assert torch.equal(spec.module.eval()(x), net.eval()(x))


@pytest.mark.parametrize("cuts", [pytest.param(None, marks=pytest.mark.slow), ("inner.1",)])
def test_a_step_that_drops_by_a_function_is_exported(cuts: tuple[str, ...] | None) -> None:
    spec = split(_layers() if cuts is None else Net(), cuts, sample=SAMPLE, classes=5)
    step = sgd(Objective(spec.module, spec.sample), batch=4).phases[0].function

    assert sum(name.startswith("noise.") for name in step.inputs) == 2
    assert to_onnx(capture(step))


def test_what_drops_is_found_where_no_trace_could_follow() -> None:
    class Steered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.none = Dropping(6, 6), Dropping(6, 6, rate=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.none(torch.dropout(x, 0.0, True)) if x.sum() > 1 else self.none(self.drop(x))

    module = visible(nn.Sequential(Steered(), nn.Dropout(0.5)))
    state = torch.get_rng_state()

    assert dropping(module, torch.zeros(2, 6)) == {"0", "0.drop"}
    assert dropping(module, torch.ones(2, 6)) == frozenset()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_rnn_that_drops_between_its_layers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"RNN '0' drops between its layers.*dropout=0\.0"):
        visible(nn.Sequential(nn.RNN(4, 4, num_layers=2, dropout=0.5)))
    with pytest.warns(UserWarning, match="num_layers"):
        single = nn.RNN(4, 4, dropout=0.5)
    assert isinstance(visible(nn.Sequential(single))[0], nn.RNN)


def test_one_dropout_under_two_names_becomes_two_that_drop_apart() -> None:
    drop = nn.Dropout(0.5)
    spec = split(nn.Sequential(nn.Linear(6, 6), drop, nn.Linear(6, 5), drop), sample=SAMPLE, classes=5)

    assert spec.units == ("0", "1", "2", "3")
    assert [type(part) for part in spec.module] == [nn.Linear, Dropout, nn.Linear, Dropout]
    assert [shape.shape for shape in Objective(spec.module, SAMPLE).noise(3).values()] == [(3, 6), (3, 5)]


def test_one_activation_for_all_layers_is_applied_behind_each() -> None:
    relu, x = nn.ReLU(), torch.randn(3, 6)
    layers = nn.Sequential(nn.Linear(6, 6), relu, nn.Linear(6, 5), relu)

    assert torch.equal(
        split(layers, sample=SAMPLE, classes=5).module(x), F.relu(layers[2](F.relu(layers[0](x))))
    )
