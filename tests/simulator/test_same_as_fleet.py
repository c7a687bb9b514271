"""A simulated federation ends with the weights of the real one: same rounds, same clients, over a broker and in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl.api.simulate import Simulation, simulate
from edgefl.config import load
from edgefl.wire.mqtt.address import Address
from tests.conftest import BrokerProcess
from tests.e2e.inside import Engines, Trained, train
from tests.rings.rows import mostly_slow
from tests.simulator.torch_engine import torch_engines

ROUNDS = 2
TINY = """
[model]
name = "mlp"
options = { hidden = [8, 8] }
[algorithm]
name = "ALGORITHM"
batch = 8
steps = 2
[data]
name = "digits"
train_samples = 90
test_samples = 50
[limits]
checkpoint_steps = 100
"""
MIXED = """
[tiers.strong]
count = 2
[tiers.weak]
cut = 1
count = 1
[tiers.half]
kind = "width"
gamma = 0.5
count = 1
"""
ALIKE = """
[tiers.all]
count = 3
"""
CASES = {
    "mixed tiers, some of them, int8 down": TINY.replace("ALGORITHM", "sgd")
    + MIXED
    + '[round]\nfraction = 0.5\nweighting = "samples"\n[downlink]\nencoding = "int8"\n',
    "noise, and a codec of its own": TINY.replace("ALGORITHM", "sgd") + ALIKE + '[codec]\nname = "fedpaq"\n',
    "kept on clients, state at the server": TINY.replace("ALGORITHM", "scaffold") + ALIKE,
    "a private head, trained in turn with the rest": TINY.replace("ALGORITHM", "fedrep")
    + MIXED.replace("cut = 1", "cut = 0"),
    "a second round that is undone": TINY.replace("ALGORITHM", "sgd").replace(
        "steps = 2", "steps = 2\nlr = 1.0"
    )
    + ALIKE
    + "[round]\nrollback_loss = 1.01\n",
    "values that wait in halves": TINY.replace("ALGORITHM", "sgd")
    .replace("[8, 8]", "[1024]")
    .replace("= 8", "= 16")
    + ALIKE
    + 'activations = "float16"\n',
}


def twice(
    folder: Path, config: str, broker: Address, federation: str, **engines: Engines
) -> tuple[Trained, Simulation]:
    """Over the broker, and simulated."""
    real = train(folder / "real", config, broker, federation, ROUNDS, **engines)
    told: dict[str, object] = {
        "federation.name": federation,
        "federation.rounds": ROUNDS,
        "federation.seed": 7,
    }
    told |= (
        {"simulation.together": 1} if engines else {}
    )  # as devices do: several at a time are rounded otherwise
    return real, simulate(load(folder / "real.toml", told), folder / "simulated", device="cpu")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "case",
    mostly_slow(
        sorted(CASES),
        (
            "mixed tiers, some of them, int8 down",
            "noise, and a codec of its own",
            "kept on clients, state at the server",
        ),
    ),
)
def test_in_torch_the_bits_agree(case: str, broker: BrokerProcess, federation: str, tmp_path: Path) -> None:
    """All that a simulation leaves out, broker, chunks, stores and the server's threads, changes no bit."""
    real, simulated = twice(tmp_path, CASES[case], broker.address, federation, engines=torch_engines)

    expected = load_file(real.folder / "model.safetensors")
    assert simulated.model.keys() == expected.keys()
    for name, weights in expected.items():
        assert np.array_equal(simulated.model[name], weights), name


# What the rest of the cases adds beside the bits above are functions on an engine, each of which tests/parity has.
@pytest.mark.sample(1)
@pytest.mark.e2e
@pytest.mark.parametrize(
    "case",
    mostly_slow(sorted(CASES), ("mixed tiers, some of them, int8 down", "a second round that is undone")),
)
def test_simulated_rounds_agree(case: str, broker: BrokerProcess, federation: str, tmp_path: Path) -> None:
    real, simulated = twice(tmp_path, CASES[case], broker.address, federation)

    expected = load_file(real.folder / "model.safetensors")
    assert simulated.model.keys() == expected.keys()
    for name, weights in expected.items():
        np.testing.assert_allclose(simulated.model[name], weights, atol=1e-5, err_msg=name)
    told = [(row.outcome, row.reports) for row in simulated.history]
    assert told == [(outcome, reports) for outcome, reports, _ in real.outcomes]
    assert told[-1][0] == ("abandoned" if "undone" in case else "closed")
    assert [row.up_float32_bytes for row in simulated.history] > [0] * ROUNDS
