"""A model with two inputs, through a whole round of a device: both engines, the prefix too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch

from edgefl.analysis.personal.evaluate import User, evaluate_user
from edgefl.analysis.personal.report import EvaluationSetting, UserReport
from edgefl.data.dataset import Dataset
from edgefl.lab.deployment import DeploymentBuilder
from edgefl.models.split import split
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_device.data.samples import LabelSpec, LocalData
from edgefl_device.personal.personalize import Adaptation, PersonalizationReport, Personalizer
from edgefl_export.compiler.manifest import check_wiring
from tests.analysis.personal.tiers import BATCH, Tier, made
from tests.models.test_autocut import CLASSES as SAMPLE_AGAIN_CLASSES
from tests.models.test_autocut import VOCABULARY, last, spec_of, texts
from tests.models.test_inputs import CLASSES, LENGTH, TEXT, reader
from tests.pairs import slow
from tests.parity.forms import engine_of
from tests.parity.rounds import Exported, exported, in_torch, local_data, on_device
from tests.support.errors import BundleError, DataError, ExportError, refuses


@cache
def tier(form: str = "onnx") -> Exported:
    spec = split(reader(), sample=TEXT, classes=CLASSES)
    return exported(OutputSide(spec, 2, 2), batch=4, steps=3, lr=0.1, form=form)


def data() -> LocalData:
    return local_data(tier().spec, 10, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", pytest.param("executorch", marks=pytest.mark.slow)])
def test_a_round_behind_a_prefix_gives_the_update_of_torch(form: str, tmp_path: Path) -> None:
    result, _ = on_device(tier(form), data(), 5, tmp_path, form)

    expected = in_torch(tier(form), data(), 5)
    assert result.update.keys() == expected.keys()
    for name, array in result.update.items():
        assert np.allclose(array, expected[name].numpy(), atol=1e-5), name
    ports = [port.name for graph in tier(form).bundle.manifest.of_round for port in graph.inputs_of("batch")]
    assert (
        ports.count("batch.0.attention_mask") == 2
    )  # of the block in the prefix, and of the step; not of the words


def test_another_mask_is_another_update(tmp_path: Path) -> None:
    seen = data()
    mask = np.ones_like(seen.others["attention_mask"])
    first, _ = on_device(tier(), seen, 5, tmp_path / "a")
    second, _ = on_device(tier(), replace(seen, others={"attention_mask": mask}), 5, tmp_path / "b")
    assert any(not np.array_equal(first.update[name], second.update[name]) for name in first.update)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({}, r"no array 'attention_mask', which the model reads of each sample beside x: int64 \(n, 6\)"),
        ({"mask": np.ones((10, LENGTH), np.int64)}, "beside x and y there is mask"),
        (
            {"attention_mask": np.ones((10, 2), np.int64)},
            r"attention_mask is int64 \(10, 2\), the model takes",
        ),
        ({"attention_mask": np.ones((10, LENGTH))}, "attention_mask is float64"),
        (
            {"attention_mask": np.full((10, LENGTH), 2)},
            "attention_mask go from 2 to 2, the model takes whole numbers",
        ),
    ],
)
def test_data_without_what_the_model_reads_are_refused(others: dict[str, np.ndarray], message: str) -> None:
    manifest = tier().bundle.manifest
    with pytest.raises(DataError, match=message):
        replace(data(), others=others).fitted(manifest.data, LabelSpec.of(manifest))


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    manifest, seen = tier().bundle.manifest, data()
    with refuses(DataError, found=99, below=11):
        replace(seen, x=np.where(seen.x == seen.x.max(), 99, seen.x)).fitted(
            manifest.data, LabelSpec.of(manifest)
        )


def test_a_manifest_describes_every_input_that_its_graphs_read(tmp_path: Path) -> None:
    manifest = tier().bundle.manifest
    silent = msgspec.structs.replace(manifest.data, others=())
    with refuses(ExportError, function="train", port="batch.0.attention_mask", stage="a step"):
        check_wiring(msgspec.structs.replace(manifest, data=silent))
    (mask,) = manifest.data.others
    other = msgspec.structs.replace(manifest.data, others=(msgspec.structs.replace(mask, shape=(3,)),))
    with refuses(
        ExportError, function="forward.2", port="batch.0.attention_mask", found=[4, 6], expected=[3]
    ):
        check_wiring(msgspec.structs.replace(manifest, data=other))
    unknown = replace(
        tier(), bundle=replace(tier().bundle, manifest=msgspec.structs.replace(manifest, data=silent))
    )
    with refuses(BundleError, port="batch.0.attention_mask"):
        on_device(unknown, data(), 5, tmp_path)


# -- personal models of several inputs ---------------------------------------------------------------------


@cache
def personal_inputs_tier(cut: int, form: str = "onnx") -> Tier:
    return made(split(reader(), sample=TEXT, classes=CLASSES), form=form, cut=cut)


def personal_inputs_data() -> tuple[LocalData, LocalData]:
    spec = personal_inputs_tier(2).spec
    return local_data(spec, 21, 1), local_data(spec, 13, 2)


def personal_inputs_on_device(
    made: Tier, local: LocalData, later: LocalData, folder: Path
) -> PersonalizationReport:
    device = Personalizer(
        engine=engine_of(made.form), manifest=made.bundle.manifest, blobs=made, folder=folder
    )
    return device.run(made.job(), local, Adaptation(steps=2, curve=(1,), alpha=0.3, test=later))[0]


def personal_inputs_in_torch(made: Tier, local: LocalData, later: LocalData) -> UserReport:
    train, test = ((torch.from_numpy(each.x), torch.from_numpy(each.y)) for each in (local, later))
    others = {
        name: (torch.from_numpy(local.others[name]), torch.from_numpy(later.others[name]))
        for name in local.others
    }
    user = User.of(0, train=train, test=test, others=others)
    return evaluate_user(made.adapter, user, EvaluationSetting(0.3, (1, 2), BATCH))


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "form"), [(2, "onnx"), slow(0, "executorch"), slow(2, "executorch")])
def test_a_device_adapts_with_all_inputs_as_torch_does(cut: int, form: str, tmp_path: Path) -> None:
    found, expected = (
        personal_inputs_on_device(personal_inputs_tier(cut, form), *personal_inputs_data(), tmp_path),
        personal_inputs_in_torch(personal_inputs_tier(cut, form), *personal_inputs_data()),
    )

    assert len(found.curve) == len(expected.curve)
    for mine, theirs in zip(found.curve, expected.curve, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.metrics == pytest.approx(theirs.metrics, abs=1e-5)


def test_another_mask_adapts_to_another_model(tmp_path: Path) -> None:
    local, later = personal_inputs_data()
    seen = replace(local, others={"attention_mask": np.ones_like(local.others["attention_mask"])})

    first, second = (
        personal_inputs_on_device(personal_inputs_tier(2), each, later, tmp_path) for each in (local, seen)
    )

    assert first.before == second.before
    assert first.after.loss != second.after.loss


# -- where frozen units come first, a device gives the trained ones the samples beside what those left of them --


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["onnx", "executorch"])
def test_a_round_that_reads_the_sample_again_equals_torch(form: str, tmp_path: Path) -> None:
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
    y = np.arange(20) % SAMPLE_AGAIN_CLASSES
    spec = spec_of(module)
    data = Dataset.of(x, y, x, y, below=VOCABULARY, classes=SAMPLE_AGAIN_CLASSES)
    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}

    made = DeploymentBuilder(spec, data, weights, batch=5).deployment(OutputSide(spec, 0))

    (name,) = made.artifact.inputs
    session = onnxruntime.InferenceSession(made.artifact.model, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = module(torch.from_numpy(x[:5])).numpy()
    np.testing.assert_allclose(session.run(None, {name: x[:5]})[0], expected, atol=1e-5)
