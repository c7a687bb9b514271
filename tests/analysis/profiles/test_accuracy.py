"""The accuracy of a run, beside which a profile's memory stands."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from edgefl.analysis.profiles.accuracy import accuracy_of, check_same_model, tier_accuracy
from edgefl.config import load, without_devices
from edgefl.setup.data import open_data
from edgefl.setup.model import federation_model
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import write_bundle
from tests.device_runtime import tiny
from tests.device_runtime.profile import made
from tests.support.errors import ConfigError, DataError, refuses


def test_accuracy_of_a_tier_is_that_of_its_last_round(tmp_path: Path) -> None:
    run = made.journal(
        tmp_path / "run",
        [
            ("weak", 1, '{"correct": 1}', ""),
            ("weak", 2, '{"correct": 1, "loss": 1}', ""),
            ("weak", 2, '{"correct": 3}', ""),
            ("strong", 1, '{"correct": 3}', ""),
            ("strong", 2, '{"correct": 0}', "nan"),
            ("other", 2, '{"loss": 2}', ""),
        ],
    )
    assert tiny.BATCH == 4
    assert tier_accuracy(run) == {"weak": 0.5, "strong": 0.75}


def test_accuracy_is_of_the_test_set_where_there_is_one(tmp_path: Path) -> None:
    run = made.journal(tmp_path, [("strong", 1, '{"correct": 3}', "")])
    told = accuracy_of(run)
    assert (told.by_tier, told.axis) == ({"strong": 0.75}, "accuracy on the tier's training samples")

    (run / "bundles" / "strong.efl").unlink()
    text = '[model]\nname = "mlp"\n[data]\nname = "digits"\n[tiers.strong]\n[tiers.weak]\ncut = 1\n'
    (run / "run.toml").write_text(text)
    federation = without_devices(load(run / "run.toml", {}))
    data = open_data(federation)
    spec = federation_model(federation, data)
    weights = {name: value.numpy() for name, value in spec.module.state_dict().items()}
    (run / "model.safetensors").write_bytes(tensors.dump(weights))
    found = accuracy_of(run)

    with torch.inference_mode():
        x = torch.from_numpy(data.read(data.test_x))
        guessed = spec.module.eval()(x).argmax(1).numpy()
    right = float((guessed == data.test_y).mean())
    assert found.axis == "accuracy on the test set"
    assert found.by_tier["strong"] == found.by_tier["weak"] == pytest.approx(right)


def test_data_that_the_run_did_not_have_tell_nothing_of_it(tmp_path: Path) -> None:
    """The run's bundles were made for other samples than those that are found here."""
    run = made.journal(tmp_path, [("strong", 1, '{"correct": 3}', "")], bundle=False)
    (run / "run.toml").write_text('[model]\nname = "mlp"\n[data]\nname = "digits"\n[tiers.strong]\n')
    federation = without_devices(load(run / "run.toml", {}))
    spec = federation_model(federation, open_data(federation))
    weights = {name: value.numpy() for name, value in spec.module.state_dict().items()}
    (run / "model.safetensors").write_bytes(tensors.dump(weights))
    assert accuracy_of(run).axis == "accuracy on the test set"

    (run / "bundles").mkdir()
    write_bundle(tiny.make_bundle(prefix=()), run / "bundles" / "strong.efl")
    found = accuracy_of(run)

    assert (found.by_tier, found.axis) == ({"strong": 0.75}, "accuracy on the tier's training samples")
    assert "are not known to be those of the run" in found.note


def test_only_bundles_of_the_runs_own_model_stand_beside_its_accuracy(tmp_path: Path) -> None:
    run = made.journal(tmp_path, [("strong", 1, '{"correct": 3}', "")])
    own = tiny.make_bundle(prefix=()).manifest
    replace = msgspec.structs.replace

    check_same_model(run, own)
    check_same_model(run, replace(own, tier="other", program="fafed", parameters=own.parameters + 1))
    for other, told in (
        (replace(own, model="resnet20"), f"trained {own.model} .*holds resnet20"),
        (replace(own, data=replace(own.data, classes=77)), "in 77 classes"),
        (replace(own, parameters=own.parameters + 1), rf"tier 'strong' trained {own.parameters:,} entries"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_same_model(run, other)


def test_a_run_without_bundles_is_known_by_its_file(tmp_path: Path) -> None:
    manifest = tiny.make_bundle(prefix=()).manifest
    check_same_model(tmp_path, manifest)  # nothing is known: taken at its word
    (tmp_path / "run.toml").write_text('[model]\nname = "resnet8"\n')
    with refuses(ConfigError, run=str(tmp_path), trained="resnet8", found="tiny"):
        check_same_model(tmp_path, manifest)
    (tmp_path / "run.toml").write_text(f'[model]\nname = "{manifest.model}"\n')
    check_same_model(tmp_path, manifest)


def test_a_folder_without_journal_or_answers_is_a_data_error(tmp_path: Path) -> None:
    with refuses(DataError, path=str(tmp_path), missing="journal.sqlite"):
        tier_accuracy(tmp_path)
    empty = made.journal(tmp_path / "empty", [("weak", 1, '{"correct": 3}', "")], bundle=False)
    with refuses(DataError, path=str(empty), missing="bundles/*.efl"):
        tier_accuracy(empty)
    with refuses(DataError, path=str(tmp_path / "run" / "journal.sqlite")):
        tier_accuracy(made.journal(tmp_path / "run", [("weak", 1, "{}", "")]))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "journal.sqlite").write_bytes(
        b"not a database, but long enough to be read as one" * 50
    )
    with refuses(DataError, path=str(tmp_path / "bad" / "journal.sqlite"), error=...):
        tier_accuracy(tmp_path / "bad")
