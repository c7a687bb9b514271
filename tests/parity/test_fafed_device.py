"""FAFED on the device runtime: both exchanges, with what the device keeps and what the server keeps beside the model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data import samples as local
from edgefl_device.data.samples import Batches, LabelSpec
from edgefl_device.round.trainer import RoundResult
from tests.pairs import in_turn
from tests.parity.forms import engine_of
from tests.parity.rounds import by_unit, device_round
from tests.parity.test_fafed import BATCH, CLASSES, SIDE, cnn, objective
from tests.support import reference as simulation
from tests.support.bundles import build_bundle
from tests.support.reference import Feed

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
) -> tuple[RoundResult, Bundle]:
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
