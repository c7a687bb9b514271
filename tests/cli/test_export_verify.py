"""`edgefl export` and `edgefl verify` need a model and a bundle, not devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgefl.api.model import sample_spec
from edgefl.config import parse, without_devices
from edgefl.errors import BundleError, ConfigError, ModelError
from edgefl.models.zoo.catalog import build_model
from edgefl.setup.model import data_spec, federation_model, samples_like
from edgefl.setup.tiers import completed, device_names
from edgefl.wire.bundle.archive import read_bundle
from edgefl_server.coordinator.roster import TierRule, tier_of
from tests.cli.runner import edgefl
from tests.rings.rows import mostly_slow

WITHOUT_COUNTS = """
[model]
name = "mlp"
options = { hidden = [4] }
[data]
name = "digits"
[tiers.strong]
cut = 0
"""


@pytest.mark.slow
def test_tiers_without_counts_are_exported_and_verified(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(WITHOUT_COUNTS)

    edgefl("export", file, "--out", tmp_path)
    assert read_bundle(tmp_path / "strong.efl").manifest.tier == "strong"
    edgefl("verify", tmp_path / "strong.efl", file)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["bert", "bilstm", "gpt", "lstm_lm", "mlp", "resnet20", "vit"])
def test_shapes_are_the_models_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))  # whatever this machine has, or has not
    own, federation = build_model(name), parse({"model": {"name": name}}, source="the test")

    dataset = samples_like(federation)
    spec = federation_model(federation, dataset)
    assert (spec.sample, spec.classes, spec.label) == (own.sample, own.classes, own.label)
    assert data_spec(dataset) == sample_spec(own, None)


def test_data_in_the_file_say_the_shapes() -> None:
    federation = parse({"model": {"name": "mlp"}, "data": {"name": "digits"}}, source="the test")
    assert samples_like(federation).shape == (1, 8, 8)


def test_a_model_is_exported_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    small = ("length=6", "vocabulary=12", "width=4", "depth=1", "heads=1", "rate=0.0")
    options = [word for option in small for word in ("--option", option)]

    edgefl("export", "--model", "bert", *options, "--tier", "strong", "--out", tmp_path)
    data = read_bundle(tmp_path / "strong.efl").manifest.data
    assert (data.shape, data.dtype, data.below, data.classes) == ((6,), "int64", 12, 2)


def test_a_plain_module_of_ones_own_says_what_it_reads_by_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\ndef make(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, classes))\n"
    )
    with pytest.raises(ModelError, match=r"give the option.* 'sample_shape'"):
        edgefl("export", "--model", f"{file}:make", "--option", "classes=5", "--out", tmp_path)


def test_a_run_still_asks_how_many_devices_it_is_to_start(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(WITHOUT_COUNTS)

    with pytest.raises(ConfigError, match="no tier has a count"):
        edgefl("run", file, "--out", tmp_path / "run")


def test_counts_that_are_given_stay() -> None:
    federation = parse({"tiers": {"strong": {"count": 3}, "weak": {}}}, source="the test")

    assert without_devices(federation) == federation
    assert completed(without_devices(federation)).round.min_devices == 3


def test_verify_names_the_bundles_of_a_folder(tmp_path: Path) -> None:
    for name in ("weak.efl", "strong.efl", "notes.txt"):
        (tmp_path / name).touch()
    listed = f"is a folder; name one of its bundles: {tmp_path}/strong.efl, {tmp_path}/weak.efl"

    with pytest.raises(BundleError, match=re.escape(listed) + "$"):
        edgefl("verify", tmp_path)


def test_verify_says_that_a_folder_has_no_bundles(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=re.escape("there is no bundle (*.efl) in it")):
        edgefl("verify", tmp_path)


@pytest.mark.parametrize("kind", mostly_slow(["width", "importance"], ["width"]))
def test_a_bundle_of_a_part_is_verified_with_its_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(WITHOUT_COUNTS.replace("cut = 0", f'kind = "{kind}"\ngamma = 0.25'))
    edgefl("export", file, "--out", tmp_path)

    edgefl("verify", tmp_path / "strong.efl", file)
    with pytest.raises(ConfigError, match="name the federation file that it was exported with"):
        edgefl("verify", tmp_path / "strong.efl")


def test_tiers_may_share_the_beginning_of_a_name() -> None:
    tables = {"half": {"count": 1}, "half-slow": {"count": 1, "cut": 1}}
    federation = completed(parse({"tiers": tables}, source="the test"))
    rules = [TierRule(name, table.devices) for name, table in federation.tiers.items()]

    assert [tier_of(rules, device, 0) for device in device_names(federation)] == ["half", "half-slow"]
