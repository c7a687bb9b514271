"""The table of covered ops says what the parity tests cover."""

from __future__ import annotations

from pathlib import Path

from tests.parity.ops import table


def test_the_table_of_ops_lists_exactly_the_tested_cases() -> None:
    found = [line.rpartition("| ")[0] for line in _rows()]
    expected = [table.row(*row).removesuffix("|") for row in table.rows()]

    assert found == expected, "run: python -m tests.parity.ops.table"


def test_the_table_names_onnx_ops_for_each_row() -> None:
    for line in _rows():
        assert line.split(" | ")[-1].strip(" |"), line


def test_every_file_of_cases_is_in_the_table() -> None:
    files = {path.stem.removeprefix("test_") for path in Path(table.__file__).parent.glob("test_*.py")}

    assert files - {"scatter"} == set(table.FAMILIES)


def _rows() -> list[str]:
    lines = table.PATH.read_text().splitlines()
    return lines[lines.index("|---|---|---|---|") + 1 :]
