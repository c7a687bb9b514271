"""Tables that people can read on 80 columns, with names as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from edgefl.bench.train_step.rows import StepRow
from edgefl.cli import output
from edgefl.cli.bench import measure as bench
from edgefl.cli.models import verify

NAME = "somebody.package.models:two"
OUTPUT = "state.momentum.encoder.layers.11.attention.output.dense.weight"


def row(model: str, **values: Any) -> StepRow:
    numbers: dict[str, Any] = {
        name: 1234567 for name, kind in StepRow.__annotations__.items() if kind in ("int", "float")
    }
    fixed = {"model": model, "target": "onnx", "tier": "strong", "model_options": {}, "memory_budget": 0}
    return StepRow(**{**numbers, "ratio": 1.23456, "max_rel_error": 1.2e-6, **fixed, **values})


def printed(title: str, rows: list[dict[str, Any]], caption: str = "") -> list[str]:
    console = Console(width=80, emoji=False, color_system=None)
    with console.capture() as capture:
        console.print(output.table(title, rows, caption))
    return capture.get().splitlines()


def column(lines: list[str], number: int) -> str:
    """The text of a column of the only row, put together again where it was folded."""
    return "".join(line.split("│")[number + 1].strip() for line in lines if line.startswith("│"))


@pytest.mark.parametrize("other", [None, 98765.4])
def test_a_bench_row_fits_80_columns_and_loses_nothing(other: float | None) -> None:
    rows = bench.for_people(
        [row(NAME, ms=12345.6, ort_training_ms=other, ort_training_peak_over_idle_bytes=87 << 20)]
    )

    lines = printed("train-step", rows, "artifacts: none")

    assert all(len(line) <= 80 and "…" not in line for line in lines)
    cells = [column(lines, number) for number in range(len(rows[0]))]
    assert cells[0] == NAME and cells[1] == "12,346"
    assert ("98,765" in cells, "87.0" in cells) == (other is not None, other is not None)


@dataclass
class Report:
    """What a comparison found."""

    errors: dict[str, float] = field(default_factory=lambda: {OUTPUT: 2.5e-7})
    rounding: dict[str, float] = field(default_factory=dict)
    seed: int = 0


def test_the_name_of_the_worst_output_is_whole() -> None:
    check: Any = SimpleNamespace(graph="train", size=123_456_789, problem="", report=Report())

    lines = printed("verify", [verify.for_people(check)])

    assert all(len(line) <= 80 and "…" not in line for line in lines)
    assert column(lines, 5) == OUTPUT and column(lines, 3) == "2.5e-07"


@pytest.mark.parametrize("name", ["mods:two", "mods:two: exporting", "mods:smile:x"])
@pytest.mark.parametrize("console", [output.console, output.errors], ids=["stdout", "stderr"])
def test_no_part_of_a_name_becomes_a_picture(name: str, console: Console) -> None:
    with console.capture() as capture:
        console.print(name, markup=False, highlight=False)
        console.print(output.table(name, [{"model": name}], name))

    assert capture.get().count(name) == 4
