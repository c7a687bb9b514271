"""The files in ``examples`` and the federation files in documents can be used as they are."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import edgefl
from edgefl.cli import app
from edgefl.cli.models.plan import read_device
from edgefl.config import Federation, load
from edgefl.config.reading import parse
from edgefl.data.dataset import Array, Dataset
from edgefl.data.datasets import digits
from edgefl.lab.faults.schedule import load_schedule
from edgefl.models.zoo.catalog import build_model
from edgefl.setup.data import open_data, own_data, partition
from edgefl.setup.model import data_spec, federation_model, submodel_of
from edgefl.setup.tiers import completed, device_names
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SoundSpec
from edgefl_device.data.samples import NoBundle
from edgefl_device.data.sources import load as load_data
from edgefl_device.policy import read_policy
from tests.cli.runner import runner
from tests.docs.documents import DOCUMENTS, ROOT, Block, blocks

EXAMPLES = ROOT / "examples"
_OTHERS: Mapping[str, Callable[[Path], object]] = {"policy.toml": read_policy, "faults.toml": load_schedule}
"""Files that are no federation's, by the name in their first line."""
FILES = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in DOCUMENTS
    for number, block in enumerate(blocks(page, "toml"))
]


def test_the_federation_trains_what_it_says() -> None:
    federation = load(EXAMPLES / "federation.toml")
    spec = federation_model(federation, digits())
    tiers = {name: submodel_of(spec, name, table) for name, table in federation.tiers.items()}

    assert sum(table.count for table in federation.tiers.values()) == 4
    assert len(tiers["weak"].prefix) == federation.tiers["weak"].chunks == 2
    assert tiers["strong"].prefix == ()


def test_the_phone_is_a_device_file() -> None:
    device = read_device(EXAMPLES / "phone.toml").device

    assert (device.memory, device.downlink, device.uplink) == (64 << 20, 1e6, 200e3)


@pytest.mark.parametrize("path", sorted((EXAMPLES / "text").glob("*.toml")), ids=lambda path: path.stem)
def test_the_tiers_of_a_federation_of_texts_fit_its_model(path: Path) -> None:
    federation = load(path)
    table = federation.model
    spec = build_model(table.name, length=federation.data.length, **table.options)
    submodels = {name: submodel_of(spec, name, tier) for name, tier in federation.tiers.items()}

    identities = [str(submodel.identity) for submodel in submodels.values()]
    assert len(set(identities)) == len(federation.tiers) >= 3
    assert sum(tier.count for tier in federation.tiers.values()) in (6, 8)


def test_every_example_is_shown_or_named_in_a_document() -> None:
    text = "\n".join(page.read_text() for page in DOCUMENTS)

    assert [file.name for file in EXAMPLES.iterdir() if file.is_file() and file.name not in text] == []


@pytest.mark.parametrize("block", FILES)
def test_a_federation_file_in_a_document_has_no_wrong_key(
    block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    if block.file in _OTHERS:
        path = tmp_path / block.file
        path.write_text(block.text)
        assert _OTHERS[block.file](path)
        return
    tables = tomllib.loads(block.text)

    assert isinstance(parse(tables, source="the document"), Federation)


def test_a_wrong_key_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="aggregat"):
        parse({"aggregat": {"rule": "mean"}}, source="the document")


# -- the federations in ``examples`` ---------------------------------------------------------------------------


MODELS = {"keywords": "dscnn.py:make", "activity": "tcn.py:make"}
SLOW = pytest.param("keywords", marks=pytest.mark.slow)
"""Its sounds take seconds to make."""
PEOPLE = {"keywords": ["--speakers", "10", "--takes", "1"], "activity": ["--count", "10", "--seconds", "6"]}
"""Of the scripts: as few as there can be."""

_WORDS = ("to", "be", "or", "not", "to", "be", "that", "is")
PLAY = "\n\n".join(
    f"{who}:\n{' '.join(f'the {who} says {word} again' for word in _WORDS)}"
    for who in ["First Citizen", "Juliet", "Romeo", "All", "Nurse", "Puck"] * 11
)


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an example's data, made once."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folder = folders[name] = tmp_path_factory.mktemp(name)
            if name in PEOPLE:
                script(EXAMPLES / name / "make_data.py").main([*PEOPLE[name], "--out", str(folder)])
            else:
                (folder / "input.txt").write_text(PLAY)
        return folders[name]

    return make


def federation_of(name: str, data: Path, **more: object) -> Federation:
    """The example's file, with its data elsewhere."""
    settings: dict[str, object] = {"data.dir": str(data)}
    if name in MODELS:
        settings = {
            "model.name": str(EXAMPLES / name / MODELS[name]),
            "data.file": str(data / "held-out.npz"),
            "data.devices_dir": str(data / "devices"),
        }
    return completed(edgefl.load_federation(EXAMPLES / name / "federation.toml", {**settings, **more}))


@pytest.mark.parametrize("name", [SLOW, "activity", "shakespeare"])
def test_three_classes_of_devices_train_parts_of_one_model(name: str, made: Callable[[str], Path]) -> None:
    federation = federation_of(name, made(name))
    spec = federation_model(federation, open_data(federation))
    prefixes = [len(submodel_of(spec, tier, table).prefix) for tier, table in federation.tiers.items()]

    assert [*federation.tiers] == ["strong", "moderate", "weak"]
    assert all(table.count == 2 for table in federation.tiers.values())
    assert 0 == prefixes[0] < prefixes[1] <= prefixes[2]
    assert federation.tiers["moderate"].cut < federation.tiers["weak"].cut < len(spec.units)


@pytest.mark.parametrize("name", ["keywords", "activity", "shakespeare"])
def test_the_file_is_valid_where_the_readme_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / name)

    ran = runner().invoke(app, ["validate", "federation.toml"])
    assert ran.exit_code == 0, ran.output


def features(spec: DataSpec) -> tuple[DataSpec, NoBundle]:
    """As a bundle has it: with the graph that makes features of sounds."""
    if not isinstance(spec.reader, SoundSpec):
        return spec, NoBundle()
    log_mel = edgefl.models.LogMel.of(spec.reader)
    reader = msgspec.structs.replace(spec.reader, features="features")

    class LogMelParts(NoBundle):
        """A bundle of one graph."""

        def features(self, name: str) -> Callable[[Array], Array]:
            return self._log_mel

        def _log_mel(self, waves: Array) -> Array:
            with torch.no_grad():
                found: Array = log_mel(torch.from_numpy(waves)).numpy()
            return found

    return msgspec.structs.replace(spec, reader=reader), LogMelParts()


@pytest.mark.parametrize("name", [SLOW, "activity"])
def test_devices_read_what_the_script_makes(name: str, made: Callable[[str], Path]) -> None:
    federation = federation_of(name, made(name))
    data = open_data(federation)
    spec, parts = features(data_spec(data))

    for path in own_data(federation, device_names(federation)).values():
        own = load_data(path).fitted(spec, parts=parts)
        assert own.rows(np.arange(2)).shape == (2, *data.shape)
        assert (own.facts()["class_counts"] > 0).all() and not own.skipped.count


@pytest.mark.parametrize("name", [SLOW, "activity"])
def test_samples_of_the_server_are_made_alike(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    federation = federation_of(name, made(name))
    device = made(name) / "devices" / "strong-0"
    own_files = sorted(path for path in device.rglob("*") if path.is_file())

    script(EXAMPLES / name / "make_data.py").hold_out(own_files, tmp_path, federation.data.reader)

    data = Dataset.load(tmp_path / "held-out.npz")
    spec, parts = features(data_spec(open_data(federation)))
    own = load_data(device).fitted(spec, parts=parts)
    np.testing.assert_allclose(own.rows(np.arange(len(own))), data.test_x, atol=1e-4)
    assert own.y.tolist() == data.test_y.tolist()


@pytest.mark.slow
def test_no_speaker_is_on_two_devices_or_held_out_and_on_one(made: Callable[[str], Path]) -> None:
    folder = made("keywords")
    devices = [
        {path.name.partition("_")[0] for path in device.rglob("*.wav")}
        for device in sorted((folder / "devices").iterdir())
    ]

    assert len(devices) == 6
    assert sum(map(len, devices)) == len(set().union(*devices)) == 10 - 4


def test_speakers_keep_to_one_device(made: Callable[[str], Path]) -> None:
    federation = federation_of(
        "shakespeare", made("shakespeare"), **{"data.length": 4, "data.vocabulary": 40}
    )
    data = open_data(federation)
    assert data.owners is not None

    speakers = [{*data.owners[part].tolist()} for part in partition(federation, data, 6)]
    perplexity, accuracy = script(EXAMPLES / "shakespeare" / "unigram.py").baseline(federation)

    assert sum(map(len, speakers)) == len(set().union(*speakers)) == 6
    assert 1 < perplexity < 20 and 0.1 < accuracy < 0.5


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", ["keywords", "activity", "shakespeare"])
def test_a_round_of_it_trains_on_every_device(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    few: dict[str, Any] = {"federation.rounds": 1, "algorithm.steps": 2, "algorithm.batch": 4}
    if name == "shakespeare":
        few |= {"data.length": 8}

    run = edgefl.run(federation_of(name, made(name), **few), tmp_path / "run")

    assert [row.reports for row in run.history] == [6]
    assert run.history[0].metrics
    if name == "shakespeare":
        found = edgefl.personalize(run, protocols=["train_support"], batch=4, steps=(0, 1))
        assert len(found.reports[0].users) == 6
    else:
        with pytest.raises(edgefl.EdgeflError, match=r"devices have their own data in .*devices_dir"):
            edgefl.personalize(run)
