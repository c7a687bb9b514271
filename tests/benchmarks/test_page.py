"""The tables of the benchmarks' page: each has its place there, and is written under the command that made it."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from benchmarks import page as benchmarks
from benchmarks.__main__ import command_line

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
        ran = CliRunner().invoke(command_line(table.arguments[:1]), [*table.arguments, "--help"])
        assert ran.exit_code == 0, table.name


def test_a_table_takes_the_place_of_the_last_one_of_such_a_machine() -> None:
    [table] = [each for each in benchmarks.TABLES if each.name == "round-mosquitto"]
    row = {"broker": "mosquitto", "devices": 16, "round_s": 0.5, "round_min_s": 0.4, "server_cpu_s": 0.1}

    def block(processor: str, day: str) -> str:
        machine = {**MACHINE, "processor": processor}
        found = {"machine": machine, "day": day, "results": [row | {"down_bytes": 2e6, "up_bytes": 1e6}]}
        return str(benchmarks.markdown(table, found))

    new = block("Zuse Z3", "2026-01-02")
    assert (
        "`python -m benchmarks round --devices 16 --broker-kind mosquitto`, 2026-01-02, Zuse Z3 (2 cores)"
        in new
    )
    assert "| `mosquitto` | 16 | 0.50 | 0.40 | 0.10 | 2.0 | 1.0 |" in new
    page = "before\n<!-- bench round-mosquitto -->\n<!-- end -->\nafter\n"
    for other in (block("Zuse Z3", "2025-01-01"), block("Apollo AGC", "2025-01-01")):
        page = benchmarks.place(page, table, other)
    placed = benchmarks.place(page, table, new)
    apollo = block("Apollo AGC", "2025-01-01")
    assert placed == f"before\n<!-- bench round-mosquitto -->\n{apollo}\n\n{new}\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="no place"):
        benchmarks.place("nothing", table, new)
