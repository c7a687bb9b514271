"""The files in ``examples`` and the federation files in documents can be used as they are."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgefl.cli.models.plan import read_device
from edgefl.config import Federation, load
from edgefl.config.reading import parse
from edgefl.data.datasets import digits
from edgefl.lab.faults.schedule import load_schedule
from edgefl.models.zoo.catalog import build_model
from edgefl.setup.model import federation_model, submodel_of
from edgefl_device.policy import read_policy
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
