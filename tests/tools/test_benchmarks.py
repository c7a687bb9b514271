"""The tables of the benchmarks' page: each has its place there, and is written under the command that made it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgefl.cli import app

TOOL = Path(__file__).resolve().parents[2] / "tools" / "benchmarks.py"
_SPEC = importlib.util.spec_from_file_location("benchmarks", TOOL)
assert _SPEC is not None and _SPEC.loader is not None
benchmarks = sys.modules["benchmarks"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(benchmarks)

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "packages": {"onnxruntime": "1", "torch": "2", "executorch": "3"},
}


def test_each_table_has_one_place_in_the_page_and_each_place_a_table() -> None:
    places = re.findall(r"<!-- bench (\S+) -->", benchmarks.PAGE.read_text())

    assert sorted(places) == sorted(table.name for table in benchmarks.TABLES)


def test_each_command_takes_its_arguments() -> None:
    for table in benchmarks.TABLES:
        ran = CliRunner().invoke(app, ["bench", *table.arguments, "--help"])
        assert ran.exit_code == 0, table.name


def test_a_table_takes_the_place_of_the_last_one() -> None:
    [table] = [each for each in benchmarks.TABLES if each.name == "round-mosquitto"]
    row = {"broker": "mosquitto", "devices": 16, "round_s": 0.5, "round_min_s": 0.4, "server_cpu_s": 0.1}
    found = {"machine": MACHINE, "day": "2026-01-02", "results": [row | {"down_bytes": 2e6, "up_bytes": 1e6}]}
    block = benchmarks.written(table, found)

    assert "`edgefl bench round --devices 16 --broker mosquitto`, 2026-01-02, a processor (2 cores)" in block
    assert "| `mosquitto` | 16 | 0.50 | 0.40 | 0.10 | 2.0 | 1.0 |" in block
    page = "before\n<!-- bench round-mosquitto -->\nold\n<!-- end -->\nafter\n"
    assert benchmarks.placed(page, table, block) == page.replace("old", block)
    with pytest.raises(ValueError, match="no place"):
        benchmarks.placed("nothing", table, block)
