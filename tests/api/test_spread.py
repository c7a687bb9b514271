"""How samples are spread over devices, told before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import edgefl
from edgefl.analysis.spread import Spread, picture
from edgefl.config import parse
from edgefl.data.datasets import digits
from edgefl.setup.data import partition
from edgefl.wire.errors import DataError
from tests.cli.runner import runner

FILE = """
[model]
name = "mlp"
[data]
name = "digits"
partition = "labels"
labels_per_device = 2
[tiers.strong]
cut = 0
count = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "federation.toml"
    path.write_text(FILE)
    return path


def test_the_spread_is_that_of_a_run(file: Path) -> None:
    found = edgefl.spread(file)
    federation = edgefl.load_federation(file)
    parts = partition(federation, digits(), 5)

    assert found.samples == tuple(map(len, parts)) and sum(found.samples) == 1437
    assert found.classes_held == (2,) * 5 and found.classes == tuple("0123456789")
    assert [sum(column) for column in zip(*found.counts, strict=True)] == [
        int((digits().train_y == label).sum()) for label in range(10)
    ]
    assert found.distance_to_mean is not None and 0.5 < found.distance_to_mean < 1.0
    assert edgefl.spread(federation) == found
    assert edgefl.spread(file, devices=7, seed=1).counts != edgefl.spread(file, devices=7).counts


def test_alike_devices_are_close_and_what_cannot_be_had_is_refused() -> None:
    tables = {"data": {"name": "digits", "partition": "iid"}, "federation": {"seed": 0}}
    found = edgefl.spread(parse(tables, source="a test"), devices=3)
    assert found.distance_between is not None and found.distance_between < 0.1
    shards = parse({"data": {"name": "digits", "partition": "shards"}}, source="a test")
    with pytest.raises(DataError, match="1437 samples cannot give 1000 clients 2 each"):
        edgefl.spread(shards, devices=1000)


def test_the_command_prints_draws_and_gives_json(file: Path, tmp_path: Path) -> None:
    from edgefl.cli import app

    command = ["data", "spread", str(file), "--devices", "30", "--svg", str(tmp_path / "spread.svg")]
    ran = runner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert "and 10 devices more" in ran.output and "classes: 2 to 2" in ran.output
    assert "partition labels, seed" in (tmp_path / "spread.svg").read_text()
    found = json.loads(runner().invoke(app, [*command, "--json"]).output)
    assert len(found["counts"]) == 30 and sum(found["samples"]) == 1437


def test_samples_without_classes_are_counted_and_drawn_as_bars() -> None:
    found = Spread(dataset="plays", partition="owners", seed=0, samples=(7, 300))
    assert (found.fewest, found.most, found.middle, found.classes_held) == (7, 300, 153.5, ())
    assert "<title>1: 300</title>" in picture(found)
