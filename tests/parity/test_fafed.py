"""FAFED, STEM and the naive method on each engine: every function, and federations of several exchanges."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.adaptive.stem import stem
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.layers.norms import BatchNorm
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data import samples as local
from edgefl_device.data.samples import Batches, LabelSpec
from edgefl_device.round.trainer import RoundResult
from tests.pairs import in_turn, pairs
from tests.parity.forms import checked, engine_of, runner_of, written
from tests.parity.rounds import by_unit, device_round
from tests.support import reference as simulation
from tests.support.bundles import build_bundle
from tests.support.reference import Client, Feed, federated

BATCH, CLASSES, SIDE = 5, 4, 8
MAKERS = {
    "fafed": fafed,
    "fafed, clipped": lambda objective, **given: fafed(objective, clip=0.05, opening_steps=2, **given),
    "fafed, scalar": lambda objective, **given: fafed(objective, second_moment="scalar", **given),
    "fafed, mean": lambda objective, **given: fafed(objective, second_moment="scalar_mean", **given),
    "fafed, norm": lambda objective, **given: fafed(objective, second_moment="adagrad_norm", **given),
    "stem": stem,
    "naive_adaptive": naive_adaptive,
}


def mlp() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            body=nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 12), nn.Tanh()),
            head=nn.Sequential(nn.Dropout(0.3), nn.Linear(12, CLASSES)),
        )
    )


def cnn() -> nn.Sequential:
    """Its convolution has no bias: batch norm takes the bias's gradient away, and g / sqrt(v) of rounding is chance."""
    return nn.Sequential(
        OrderedDict(
            body=nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), BatchNorm(4), nn.ReLU(), nn.MaxPool2d(2)),
            head=nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, CLASSES)),
        )
    )


def objective(model: Callable[[], nn.Sequential]) -> Objective:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Objective(model(), TensorSpec((1, SIDE, SIDE)))


def people(count: int = 2) -> list[Client]:
    generator = torch.Generator().manual_seed(1)
    return [
        Client(
            number,
            torch.randn((12, 1, SIDE, SIDE), generator=generator),
            torch.randint(0, CLASSES, (12,), generator=generator),
        )
        for number in range(count)
    ]


def exported(form: str, algorithm: Algorithm) -> Algorithm:
    """``algorithm`` with all that devices run in their engine; the server stays as it is."""
    return replace(
        algorithm,
        start=_session(form, algorithm.start),
        phases=tuple(replace(phase, function=_session(form, phase.function)) for phase in algorithm.phases),
        finish=_session(form, algorithm.finish),
        opening=tuple(exported(form, each) for each in algorithm.opening),
    )


def _session(form: str, function: Function) -> Function:
    run = runner_of(form, function)

    def fn(given: Tensors) -> Tensors:
        return {name: torch.from_numpy(value) for name, value in run(given).items()}

    return replace(function, fn=fn)


@pytest.mark.parametrize(("name", "form"), in_turn([], rare=["fafed, scalar", "fafed, mean", "fafed, norm"]))
def test_so_is_a_step_whose_second_moment_is_one_number(name: str, form: str) -> None:
    step = MAKERS[name](objective(mlp), batch=BATCH, steps=3).phases[0].function
    checked(form, step, 0)


@pytest.mark.parametrize(
    ("name", "model", "form"),
    in_turn([("fafed", mlp)], rare=[("fafed", cnn), *pairs(["stem", "naive_adaptive"], [mlp, cnn])]),
)
def test_every_function_equals_the_engine(name: str, model: Callable[[], nn.Sequential], form: str) -> None:
    algorithm = MAKERS[name](objective(model), batch=BATCH, steps=3)
    # The two exchanges evaluate with one function.
    functions = {id(each): each for exchange in algorithm.exchanges for each in exchange.functions}
    assert len(functions) == (7 if algorithm.opening else 4)
    for function in functions.values():
        checked(form, function, 0)


@pytest.mark.parametrize(
    ("name", "form"), in_turn([], rare=["fafed, clipped", "fafed, norm", "stem", "naive_adaptive"])
)
def test_a_federation_on_the_engine_is_the_one_in_torch(name: str, form: str) -> None:
    made = objective(cnn)
    algorithm = MAKERS[name](made, batch=BATCH, steps=3, lr=0.01)
    weights = {name: tensor.detach() for name, tensor in made.suffix.state_dict().items()}
    torch_, onnx = (
        list(federated(each, weights, people(), rounds=3, seed=2, trained=made.trainable))
        for each in (algorithm, exported(form, algorithm))
    )
    for one, other in zip(torch_, onnx, strict=True):
        assert _apart(one.weights, other.weights) < 1e-4
        assert _apart(one.server_state, other.server_state) < 1e-4
    assert _apart(torch_[-1].weights, weights) > 1e-3
    moved = {name for name in made.fixed if not torch.equal(torch_[-1].weights[name], weights[name])}
    assert moved == set(made.buffers)


def _apart(one: Tensors, other: Tensors) -> float:
    def relative(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max() / b.abs().max().clamp_min(1e-2))

    return max((relative(one[name], other[name]) for name in one), default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_all_schedules_share_one_graph(form: str) -> None:
    kinds: list[dict[str, object]] = [
        {"schedule": "constant"},
        {"schedule": "decaying", "w": 3.0},
        {"schedule": "theory", "smoothness": 5.0, "devices": 9},
    ]
    made = objective(mlp)
    graphs = {written(form, fafed(made, batch=BATCH, steps=3, **given).phases[0].function) for given in kinds}
    assert len(graphs) == 1
    scalars = [fafed(made, batch=BATCH, steps=3, **given).schedule(5, 10) for given in kinds]
    assert len({tuple(sorted(each.items())) for each in scalars}) == 3


def test_without_the_old_gradient_m_is_a_heavy_ball() -> None:
    """ext = 0, by a scalar of the same graph: m <- gn + (1 - alpha) m."""
    step = fafed(objective(mlp), batch=BATCH, steps=2, alpha=0.1).phases[0].function
    given = step.example(3) | {"hyper.ext": torch.tensor(0.0), "state.alphas": torch.tensor([0.25, 0.5])}
    given |= {"state.step": torch.tensor(0)}
    with_old, without = step(given | {"hyper.ext": torch.tensor(1.0)}), step(given)
    fresh = step(given | {"state.alphas": torch.ones(2)})
    for name in [name for name in without if name.startswith("state.m.")]:
        assert torch.allclose(without[name], fresh[name] + 0.75 * given[name], atol=1e-6)
    assert any(not torch.allclose(with_old[name], without[name], atol=1e-3) for name in without)


# -- FAFED on the device runtime ---------------------------------------------------------------------------


SEED, ROWS = 7, 13
UNITS = ("body", "head")


@cache
def held() -> Objective:
    return objective(cnn)


@cache
def algorithm() -> Algorithm:
    return fafed(held(), batch=BATCH, steps=3, lr=0.05, schedule="decaying", opening_steps=2)


def samples() -> local.LocalData:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, 1, SIDE, SIDE)).astype(np.float32)
    return local.LocalData(x, rng.integers(0, CLASSES, ROWS), "random")


def weights() -> Tensors:
    """The model, and m and v beside it; v is not negative, as the mean of squares."""
    model = {name: tensor.detach() for name, tensor in held().suffix.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    trained = {name: model[name] for name in held().trainable}
    m = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in trained.items()}
    v = {name: 0.01 * torch.rand(tensor.shape, generator=generator) for name, tensor in trained.items()}
    return {**model, **beside("m", m), **beside("v", v)}


def previous(given: Tensors) -> Tensors:
    return {f"previous.{name}": given[name] + 0.01 for name in held().trainable}


def on_device(
    exchange: Algorithm, given: Tensors, carry: Tensors, folder: Path, form: str
) -> tuple[RoundResult, BundleArchive]:
    data = DataSpec(shape=(1, SIDE, SIDE), dtype="float32", classes=CLASSES)
    bundle = build_bundle(exchange, UNITS, model="cnn", tier="all", data=data, format=form)
    contents = by_unit({name: tensor.numpy() for name, tensor in given.items()}, UNITS)
    hyper = dict(exchange.schedule(4, 9))
    made = device_round(bundle, contents, engine_of(form), folder, seed=SEED, hyper=hyper, checkpoint_steps=1)
    fitted = samples().fitted(bundle.manifest.data, LabelSpec.of(bundle.manifest))
    return made.run(fitted, {name: tensor.numpy() for name, tensor in carry.items()}), bundle


def feed_of(draws: str) -> Feed:
    """What the device draws."""
    own, batches = samples(), Batches(SEED, ROWS, BATCH, draws)  # type: ignore[arg-type]

    def feed(function: Function, step: int) -> Tensors:
        rows = batches.indices(0, step)
        given = {
            "batch.0.x": torch.from_numpy(np.asarray(own.x)[rows]),
            "batch.0.y": torch.from_numpy(np.asarray(own.y)[rows]),
        }
        ports = [name for name in function.inputs if name.startswith("noise.")]
        for number, name in enumerate(ports):
            drawn = local.noise(SEED, step, number, function.inputs[name].shape, "float32")
            given[name] = torch.from_numpy(drawn)
        return given

    return feed


@pytest.mark.parametrize(("which", "form"), in_turn(["main"], rare=["opening"]))
def test_an_exchange_on_the_device_is_the_one_in_torch(which: str, tmp_path: Path, form: str) -> None:
    exchange = algorithm() if which == "main" else algorithm().opening[0]
    given = weights()
    carry = previous(given) if which == "main" else {}
    found, bundle = on_device(exchange, given, carry, tmp_path, form)
    expected = simulation.run_round(
        exchange, given, feed_of(bundle.manifest.draws), hyper=exchange.schedule(4, 9), carry=carry
    )
    for device, here in ((found.update, expected.update), (found.carry, expected.carry)):
        assert device.keys() == here.keys()
        for name, value in here.items():
            scale = max(1e-3, float(value.abs().max()))
            assert np.abs(device[name] - value.numpy()).max() <= 1e-4 * scale, name
    assert set(found.carry) == {f"previous.{name}" for name in held().trainable}


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_the_opening_sends_one_tensor_for_each_parameter(tmp_path: Path, form: str) -> None:
    given = weights()
    opening, _ = on_device(algorithm().opening[0], given, {}, tmp_path, form)
    main, bundle = on_device(algorithm(), given, previous(given), tmp_path, form)
    d = sum(given[name].numel() for name in held().trainable)
    statistics = sum(given[name].numel() for name in held().buffers)
    assert sum(array.size for array in opening.update.values()) == d
    assert sum(array.size for array in main.update.values()) == 3 * d + statistics
    assert bundle.manifest.carry_needed and bundle.manifest.carry_exchanges == 1
