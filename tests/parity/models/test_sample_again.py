"""Where frozen units come first, a device gives the trained ones the samples beside what those left of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from edgefl.data.dataset import Dataset
from edgefl.lab.deployment import DeploymentBuilder
from edgefl.submodels.output_side.submodel import OutputSide
from tests.models.test_sample_again import CLASSES, WORDS, last, spec_of, texts
from tests.parity.rounds import exported, in_torch, local_data, on_device


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["onnx", "executorch"])
def test_a_round_behind_a_prefix_gives_the_update_of_torch(form: str, tmp_path: Path) -> None:
    tier = exported(OutputSide(spec_of(last()), 2, 2), batch=4, steps=2, lr=0.1, form=form)
    data = local_data(tier.spec, 10, seed=3)

    result, _ = on_device(tier, data, 5, tmp_path, form)

    expected = in_torch(tier, data, 5)
    assert result.update.keys() == expected.keys()
    for name, array in result.update.items():
        assert np.allclose(array, expected[name].numpy(), atol=1e-5), name
    assert not tier.bundle.manifest.data.others


@pytest.mark.slow
def test_a_deployed_file_reads_the_sample_once() -> None:
    module, x = last(), texts(20).numpy()
    y = np.arange(20) % CLASSES
    spec = spec_of(module)
    data = Dataset.of(x, y, x, y, below=WORDS, classes=CLASSES)
    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}

    made = DeploymentBuilder(spec, data, weights, batch=5).deployment(OutputSide(spec, 0))

    (name,) = made.artifact.inputs
    session = onnxruntime.InferenceSession(made.artifact.model, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = module(torch.from_numpy(x[:5])).numpy()
    np.testing.assert_allclose(session.run(None, {name: x[:5]})[0], expected, atol=1e-5)
