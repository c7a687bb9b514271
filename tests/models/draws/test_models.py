"""Models that draw wherever they like train as torch trains them unedited, on the same random numbers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.errors import ExportError, ModelError
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl_export.capture.trace import capture
from tests.models.draws.nets import LARGE, MODELS, ROWS, Noisy, Transformer
from tests.models.draws.torch_numbers import Given

NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in MODELS]


@cache
def _made(name: str) -> tuple[nn.Module, ModelSpec, Objective]:
    torch.manual_seed(0)
    module = MODELS[name][0]()
    spec = split(module, sample=ROWS, classes=4)
    return module, spec, Objective(spec.module, spec.sample)


def _numbers(objective: Objective, size: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(spec.shape, generator=generator) for name, spec in objective.noise(size).items()}


def _loss(
    objective: Objective, weights: dict[str, Tensor], x: Tensor, y: Tensor, noise: dict[str, Tensor]
) -> Tensor:
    params = {name: weights[name] for name in objective.trainable}
    return objective(params, {name: weights[name] for name in objective.fixed}, x, y, noise)[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_torch_does_on_the_same_numbers(name: str) -> None:
    module, spec, objective = _made(name)
    x, y, noise = torch.randn(3, *ROWS.shape), torch.tensor([0, 3, 1]), _numbers(objective, 3)
    numbers = iter(noise.values())

    with Given(lambda shape: next(numbers)):
        wanted = F.cross_entropy(module.train()(x), y)
    gradients = dict(
        zip(dict(module.named_parameters()), torch.autograd.grad(wanted, [*module.parameters()]), strict=True)
    )
    weights = {name: tensor.clone().requires_grad_() for name, tensor in spec.weights.items()}
    loss = _loss(objective, weights, x, y, dict(reversed(noise.items())))
    loss.backward()

    assert next(numbers, None) is None
    torch.testing.assert_close(loss, wanted)
    for own, unit_name in spec.global_names.items():
        torch.testing.assert_close(weights[unit_name].grad, gradients[own], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_draw_has_an_input_of_its_own(name: str) -> None:
    _, spec, objective = _made(name)
    x, y, noise = torch.randn(3, *ROWS.shape), torch.tensor([0, 3, 1]), _numbers(objective, 3)
    found = _loss(objective, spec.weights, x, y, noise)

    assert len(noise) == MODELS[name][1]
    for changed in noise:
        other = {**noise, changed: torch.zeros_like(noise[changed])}
        assert not torch.equal(_loss(objective, spec.weights, x, y, other), found), changed


@pytest.mark.parametrize("name", NAMES)
def test_it_is_cut_and_computes_in_inference_as_its_author_wrote_it(name: str) -> None:
    module, spec, _ = _made(name)
    x = torch.randn(3, *ROWS.shape)

    assert spec.units == MODELS[name][2]
    assert torch.equal(spec.module.eval()(x), module.eval()(x))


@pytest.mark.slow
def test_ports_are_named_by_the_submodule_that_draws() -> None:
    assert list(_made("a head that drops twice")[2].noise(3)) == ["1.dropout.uniform", "1.dropout.uniform_1"]
    assert list(_made("one dropout of the root")[2].noise(3)) == [
        "first.dropout.uniform",
        "second.dropout.uniform",
    ]
    noise = _made("blocks")[2].noise(3)
    assert {name: spec.shape for name, spec in noise.items() if name.startswith("blocks_1")} == {
        "blocks_1.blocks.1.attention.uniform": (3, 2, 5, 5),
        "blocks_1.blocks.1.uniform": (3, 1, 1),
        "blocks_1.blocks.1.uniform_1": (3, 5, 6),
        "blocks_1.blocks.1.uniform_2": (3, 1, 1),
    }
    assert {name: spec.shape for name, spec in _made("a variational code")[2].noise(3).items()} == {
        "code.uniform": (2, 3, 3)
    }


@pytest.mark.parametrize("name", ["blocks", "one dropout of the root"])
def test_a_suffix_has_the_draws_of_its_own_units(name: str) -> None:
    _, spec, objective = _made(name)
    suffix = Objective(spec.part(1, len(spec.units)), spec.boundary(1))
    first = spec.units[0]

    assert suffix.noise(3) == {
        name: port for name, port in objective.noise(3).items() if not name.startswith(f"{first}.")
    }


def test_without_numbers_torch_draws() -> None:
    _, spec, objective = _made("blocks")
    x, y = torch.randn(3, *ROWS.shape), torch.tensor([0, 3, 1])

    assert not torch.equal(*(_loss(objective, spec.weights, x, y, {}) for _ in range(2)))


def test_numbers_that_do_not_fit_are_refused() -> None:
    _, spec, objective = _made("blocks")
    with pytest.raises(ModelError, match="other random numbers than when its inputs were counted"):
        _loss(
            objective,
            spec.weights,
            torch.randn(3, *ROWS.shape),
            torch.tensor([0, 3, 1]),
            _numbers(objective, 4),
        )


def test_a_cut_into_code_that_draws_is_refused_with_its_line() -> None:
    with pytest.raises(ModelError, match=r"rand.* in blocks\.1 draws random numbers.*nets\.py:\d+"):
        split(Transformer(), ["blocks.1.norm"], sample=ROWS, classes=4)


def test_what_has_no_form_as_an_input_is_refused_with_its_line() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.randperm(x.shape[1])] if self.training else x

    spec = split(nn.Sequential(Shuffled(), nn.Flatten(), nn.Linear(30, 4)), sample=ROWS, classes=4)
    step = sgd(Objective(spec.module, spec.sample), batch=4).phases[0].function

    with pytest.raises(ExportError, match=r"randperm.*draws random numbers.*test_models\.py:\d+"):
        capture(step)


class Always(nn.Module):
    """Draws in inference, too."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.randn_like(x))


def test_a_root_that_draws_in_inference_is_refused_with_its_line() -> None:
    root = Always(nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.Linear(8, 4)))
    with pytest.raises(
        ModelError, match=r"randn_like.* in Always .*in inference.*self\.training.*test_models\.py:\d+"
    ):
        split(root, sample=ROWS, classes=4)


def test_a_root_that_draws_may_return_more_than_its_output() -> None:
    class Outputs(Noisy):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"hidden": x, "logits": super().forward(x)}

    module, x = Outputs(), torch.randn(3, *ROWS.shape)
    for outer in (module, nn.Sequential(nn.Identity(), module)):
        spec = split(outer.train(), sample=ROWS, classes=4)

        assert torch.equal(spec.module.eval()(x), module.eval()(x)["logits"])
        assert len(Objective(spec.module, spec.sample).noise(3)) == 1


def test_a_layer_that_draws_in_inference_is_refused_with_its_line() -> None:
    spec = split(nn.Sequential(Always(nn.Identity()), nn.Flatten(), nn.Linear(30, 4)), sample=ROWS, classes=4)
    algorithm = sgd(Objective(spec.module, spec.sample), batch=4)

    assert "noise.0.uniform" in capture(algorithm.phases[0].function).inputs
    with pytest.raises(ExportError, match=r"randn_like.*draws random numbers.*test_models\.py:\d+"):
        capture(algorithm.evaluate)
