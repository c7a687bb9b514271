"""Tables that people can read on 80 columns, with names as they are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, Group
from rich.text import Text

import edgefl
from benchmarks.train_step.command import StepRow, baseline_rows, step_columns
from edgefl.cli import output
from edgefl.cli.federation.serving import _say
from edgefl.cli.models import verify
from edgefl.lab.deployment import Deployment
from edgefl_export.deploy.export import DeployArtifact
from edgefl_server import events

NAME = "somebody.package.models:two"
OUTPUT = "state.momentum.encoder.layers.11.attention.output.dense.weight"


def row(model: str, **values: Any) -> StepRow:
    numbers: dict[str, Any] = {
        name: 1234567 for name, kind in StepRow.__annotations__.items() if kind in ("int", "float")
    } | {"memory_budget": 0}
    fixed = {"model": model, "target": "onnx", "tier": "strong", "model_options": {}, "cpu": "a processor"}
    return StepRow(**{**numbers, "ratio": 1.23456, "max_rel_error": 1.2e-6, **fixed, **values})


def printed(title: str, rows: list[dict[str, Any]], caption: str = "") -> list[str]:
    console = Console(width=80, emoji=False, color_system=None)
    with console.capture() as capture:
        console.print(output.table(title, rows, caption))
    return capture.get().splitlines()


def column(lines: list[str], number: int) -> str:
    """Return the text of a column of the only row, put together again where it was folded."""
    body = lines[next(at for at, line in enumerate(lines) if line.startswith("─")) + 1 :]
    starts = [match.start() for match in re.finditer(r"\S+( \S+)*", body[0])] + [None]
    return "".join(line[starts[number] : starts[number + 1]].strip() for line in body)


def test_a_bench_row_fits_80_columns_and_loses_nothing() -> None:
    rows = [step_columns(row(NAME, length=0, ms=12345.6))]

    lines = printed("train-step", rows)

    assert all(len(line) <= 80 and "…" not in line for line in lines)
    cells = [column(lines, number) for number in range(len(rows[0]))]
    assert cells[0] == NAME and cells[1] == "12,346"


def test_what_a_step_stands_beside_fits_80_columns_too() -> None:
    names = ["ort_training", "et_training", "compile", "jax", "onnxsim", "channels_last"]
    numbers = {f"{name}_{what}": 98765.4 for name in names for what in ("ms", "ms_min")}
    rows = [row(NAME, length=0, **numbers), row("mlp", length=0)]

    lines = printed("beside torch eager", baseline_rows(rows))

    assert all(len(line) <= 80 and "…" not in line for line in lines)
    assert sum(line.count("98,765") for line in lines) == 2 * len(names)
    assert baseline_rows(rows[1:]) == []


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


@pytest.mark.parametrize("evil", ["\x1b]0;title\x07", "\x9b2J", "\u202egnp.exe", "a\rb", "\x1b[31m"])
def test_no_text_steers_the_terminal(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = StringIO()
    console = output.CleanConsole(file=shown, force_terminal=True, width=80, markup=False, color_system=None)
    for each in (evil, Text(evil), output.table(evil, [{evil: evil}], evil), Group(evil, Text(evil))):
        console.print(each)
    console.print(evil, soft_wrap=True)
    assert all(letter.isprintable() or letter == "\n" for letter in shown.getvalue())

    devices = tuple(f"pi-{evil}-{number}" for number in range(2))
    _say(events.Waiting(next_round=1, known=0, needed=2, missing=devices))
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and said.removesuffix("\n").isprintable()


def test_a_narrow_terminal_breaks_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "console", Console(width=80))
    row = {"round": 1, "outcome": "abandoned", "accuracy": 0.2167, "train_loss": 2.195, "reports": 0}
    output.print_table("x", [{**row, "up_bytes": 134457768, "down_bytes": 123780196, "seconds": 26.61}])
    shown = capsys.readouterr().out

    for word in ("accuracy", "abandoned", "134,457,768", "123,780,196"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_objects_that_a_notebook_shows_are_short() -> None:
    assert len(repr(edgefl.federation("mlp", data="digits"))) < 200
    facts = {"model": "mlp", "long": "x" * 10_000}
    assert len(repr(Deployment(DeployArtifact(bytes(100_000), 1, (), 0.0, 1), facts))) < 500


def test_what_people_copy_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = output.CleanConsole(width=40, record=True, markup=False, file=StringIO())
    monkeypatch.setattr(output, "console", narrow)
    digest, path = "0123456789abcdef" * 4, "/runs" * 20
    output.print_table("bundles", [{"tier": "weak", "digest": digest}, {"tier": "half", "digest": digest}])
    narrow.print(path)
    shown = narrow.export_text()

    assert f"digest of weak: {digest}\ndigest of half: {digest}\n{path}\n" in shown
