"""What is random in a round comes from streams of their own, so that methods are compared on the same batches."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.contract.algorithm import Function
from edgefl_device.data import samples as local
from edgefl_device.data.samples import Batches
from tests.codecs.coding import Coding

SEED, STEPS, SAMPLES, BATCH = 5, 6, 40, 8


def ports(function: Function) -> list[str]:
    return [name for name in function.inputs if name.startswith("noise.")]


def test_batches_are_the_same_whatever_a_method_draws() -> None:
    alone, beside = Batches(SEED, SAMPLES, BATCH), Batches(SEED, SAMPLES, BATCH)
    for step in range(STEPS):
        expected = alone.indices(0, step)
        for number in range(3):
            local.noise(SEED, step, number, (50,), "float32")
        assert np.array_equal(beside.indices(0, step), expected)


@pytest.mark.parametrize("codec", ["fedbat", "signsgd", "fedpaq"])
def test_every_port_of_every_step_draws_anew_and_the_same_for_a_seed(codec: str) -> None:
    algorithm = Coding.of(codec).algorithm
    function = algorithm.finish
    shape, names = (100,), ports(function)
    assert names
    drawn = [
        local.noise(SEED, step, number, shape, "float32")
        for step in range(STEPS)
        for number in range(len(names))
    ]
    assert len({array.tobytes() for array in drawn}) == len(drawn)
    assert np.array_equal(local.noise(SEED, 2, 1, shape, "float32"), drawn[2 * len(names) + 1])
    assert not np.array_equal(local.noise(SEED + 1, 0, 0, shape, "float32"), drawn[0])
