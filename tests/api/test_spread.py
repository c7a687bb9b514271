"""How samples are spread over devices, told before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.analysis.heterogeneity.labels import frequencies_of, label_report, mean_pairwise
from edgefl.analysis.spread import DataSpread, picture, table
from edgefl.config import parse
from edgefl.data.datasets import digits
from edgefl.setup.data import partition
from tests.cli.runner import runner
from tests.support.errors import DataError, refuses

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
    with refuses(DataError, samples=1437, clients=1000):
        edgefl.spread(shards, devices=1000)


def test_the_command_prints_draws_and_gives_json(file: Path, tmp_path: Path) -> None:
    from edgefl.cli import app

    command = ["data", "spread", str(file), "--devices", "30", "--svg", str(tmp_path / "spread.svg")]
    command += ["--csv", str(tmp_path / "spread.csv")]
    ran = runner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert "and 10 devices more" in ran.output and "classes: 2 to 2" in ran.output
    assert "partition labels, seed" in (tmp_path / "spread.svg").read_text()
    found = json.loads(runner().invoke(app, [*command, "--json"]).output)
    rows = (tmp_path / "spread.csv").read_text().splitlines()
    assert rows[0] == "device,samples,0,1,2,3,4,5,6,7,8,9" and len(rows) == 31
    assert rows[1] == ",".join(map(str, [0, found["samples"][0], *found["counts"][0]]))
    assert 0 < found["size_deviation"] < 1
    assert len(found["counts"]) == 30 and sum(found["samples"]) == 1437


def test_samples_without_classes_are_counted_and_drawn_as_bars() -> None:
    found = DataSpread(dataset="plays", partition="owners", seed=0, samples=(7, 300))
    assert (found.fewest, found.most, found.middle, found.classes_held) == (7, 300, 153.5, ())
    assert "<title>1: 300</title>" in picture(found)


def test_natural_clients_are_counted(tmp_path: Path) -> None:
    place = tmp_path / "tinyshakespeare"
    place.mkdir()
    play = [f"{who}:\nspeaks {number} " + "on and on " * 9 for number in range(3) for who in ("A", "B", "C")]
    (place / "input.txt").write_text("\n\n".join(play))
    tables = {"data": {"name": "shakespeare", "dir": str(tmp_path), "length": 8}}
    found = edgefl.spread(parse(tables, source="a test"), devices=2)

    assert found.partition == "owners" and sorted(found.owners) == [1, 2]
    assert table(found).splitlines()[1] == f"0,{found.samples[0]},{found.owners[0]}"


def test_thousands_of_devices_are_compared_without_a_table_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (40, 5)) + 1
    frequencies = frequencies_of(counts)

    assert mean_pairwise(frequencies) == pytest.approx(label_report(counts).mean_pairwise)
    assert mean_pairwise(rng.dirichlet(np.ones(10), 20_000)) > 0.0
