"""A simulated federation ends with the weights of the real one: same rounds, same clients, over a broker and in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgefl.api.simulate import simulate
from edgefl.config import load
from tests.conftest import BrokerProcess
from tests.e2e.inside import train

ROUNDS = 2
TINY = """
[model]
name = "mlp"
options = { hidden = [8, 8] }
[program]
name = "PROGRAM"
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
    "mixed tiers, some of them, int8 down": TINY.replace("PROGRAM", "sgd")
    + MIXED
    + '[round]\nfraction = 0.5\nweighting = "samples"\n[downlink]\nencoding = "int8"\n',
    "noise, and a codec of its own": TINY.replace("PROGRAM", "sgd") + ALIKE + '[codec]\nname = "fedpaq"\n',
    "kept on clients, state at the server": TINY.replace("PROGRAM", "scaffold") + ALIKE,
    "values that wait in halves": TINY.replace("PROGRAM", "sgd")
    .replace("[8, 8]", "[1024]")
    .replace("= 8", "= 16")
    + ALIKE
    + 'activations = "float16"\n',
}


@pytest.mark.e2e
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_simulated_round_is_a_round_over_a_broker(
    case: str, broker: BrokerProcess, federation: str, tmp_path: Path
) -> None:
    real = train(tmp_path / "real", CASES[case], broker.address, federation, ROUNDS)
    told = {"federation.name": federation, "federation.rounds": ROUNDS, "federation.seed": 7}
    file = tmp_path / "real.toml"
    simulated = simulate(load(file, told), tmp_path / "simulated", device="cpu")

    expected = load_file(real.folder / "model.safetensors")
    assert simulated.model.keys() == expected.keys()
    for name, weights in expected.items():
        np.testing.assert_allclose(simulated.model[name], weights, atol=1e-5, err_msg=name)
    assert [row.reports for row in simulated.history] == [reports for _, reports, _ in real.outcomes]
    assert [row.up_float32_bytes for row in simulated.history] > [0] * ROUNDS
