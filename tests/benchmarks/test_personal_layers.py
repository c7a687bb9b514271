"""`python -m benchmarks personal-layers`: a table over seeds, from runs that are measured once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.personal_layers import interval
from tests.benchmarks.commands import invoke

QUICK = ("--quick", "--seeds", "2", "--rounds", "1", "--algorithm", "fedavg", "--algorithm", "fedper")


def test_a_table_over_seeds_comes_from_runs_measured_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    ran = invoke("personal-layers", *QUICK, "--out", str(runs), "--json")
    measured = runs.read_text()
    again = invoke("personal-layers", *QUICK, "--out", str(runs), "--markdown")

    assert ran.exit_code == again.exit_code == 0, ran.output
    rows = {row["method"]: row for row in json.loads(ran.stdout)["results"]}
    assert list(rows) == ["FedAvg", "FedAvg, 1 step", "FedAvg, 10 steps", "FedPer"]
    assert all(row["seeds"] == 2 and 0 < row["accuracy"] < 100 for row in rows.values())
    assert rows["FedAvg"]["gain"] is None and rows["FedPer"]["alpha"] is None
    assert rows["FedPer"]["gain"] == pytest.approx(rows["FedPer"]["accuracy"] - rows["FedAvg"]["accuracy"])
    lines = [json.loads(line) for line in measured.splitlines()]
    assert [(each["algorithm"], each["seed"]) for each in lines] == [
        (algorithm, seed) for seed in (1, 2) for algorithm in ("fedavg", "fedper")
    ]
    for line in lines:  # an evaluation round and the evaluation before adaptation read the same rows
        for each in line["adapted"][:1]:
            assert each["steps"] == 0 and each["accuracy"] == pytest.approx(
                line["result"]["accuracy"], abs=1e-4
            )
    assert runs.read_text() == measured
    assert again.stdout.count("\n| scikit-learn digits") == 4
    assert runs.with_suffix(".svg").read_text().count("<rect") > 4


def test_an_interval_is_students() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
