"""A row of the suite: made by a process of its own, and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models.catalog import named
from benchmarks.models.rows import SuiteSettings, left_out, read, try_architecture
from edgefl.errors import ConfigError
from tests.benchmarks.commands import invoke


@pytest.mark.slow
def test_an_architecture_is_tried_in_a_process_and_its_row_is_kept(tmp_path: Path) -> None:
    out, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    arguments = [
        "models",
        "--only",
        "plain/Two towers",
        "--engine",
        "onnx",
        "--out",
        str(out),
        "--json",
    ]
    first = json.loads(invoke(*arguments).stdout)
    again = json.loads(invoke(*arguments, "--page", str(page)).stdout)

    (row,) = first["results"]
    assert (row["kind"], row["inputs"], row["loss"]) == ("TwoTower", 2, "SquaredError")
    assert row["engines"]["onnx"]["problem"] == "" and 0 < row["engines"]["onnx"]["max_rel_error"] < 1e-4
    assert row["torch_ms"] > 0 and row["parameters"] > 0 and "torch" in row["versions"]
    assert again["results"] == first["results"]  # the very same: it was not made again
    assert (
        "ONNX Runtime: 1 of 1 (100%)" in page.read_text()
        and "| Two towers | `TwoTower` |" in page.read_text()
    )


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended_and_says_where_it_was() -> None:
    row = try_architecture(named("plain/DS-CNN"), SuiteSettings(limit_s=0.1))

    assert all(each.problem.startswith("no end within 0 s, while ") for each in row.engines.values())
    assert not row.works_on("onnx")


@pytest.mark.slow
def test_one_whose_process_fails_says_why() -> None:
    unknown = replace(named("plain/DS-CNN"), name="nobody's")
    row = try_architecture(unknown, SuiteSettings(engines=["onnx"]))

    assert 'there is no architecture "plain/nobody\'s"' in row.engines["onnx"].problem


def test_libraries_that_are_not_installed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.models.rows.installed", lambda library: "" if library == "timm" else "1.0"
    )

    assert left_out([named("timm/GhostNet"), named("plain/DS-CNN")]) == {"timm": 1}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"library": "plain"}\n')

    with pytest.raises(ConfigError, match="holds no rows of the suite"):
        read(tmp_path / "rows.jsonl")
