"""The page of the suite."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.models.architecture import Library
from benchmarks.models.command import markdown_page, share
from benchmarks.models.rows import EngineResult, SuiteRow, read

ABLE = EngineResult(step_ms=1.25, max_rel_error=3e-6, nbytes=10)
COMMAND = "python -m benchmarks models --page page.md"


def row(name: str, library: Library = "plain", **engines: EngineResult) -> SuiteRow:
    return SuiteRow(
        library=library,
        name=name,
        kind="Kind",
        parameters=1234,
        units=3,
        loss="CrossEntropy",
        torch_ms=2.5,
        engines=engines,
        batch=8,
        seconds=9.0,
        load=0.6,
        processor="A processor",
        versions={"torch": "2.13.0"},
    )


def pages(*rows: SuiteRow) -> str:
    return markdown_page({each.path: each for each in rows}, {"timm": 14}, COMMAND)


def test_shares_stand_at_the_top_and_count_what_was_tried() -> None:
    refused = EngineResult(problem="no")
    told = pages(row("DLRM", onnx=ABLE, executorch=refused), row("TCN", onnx=ABLE))

    assert "**ONNX Runtime: 2 of 2 (100%)**; **ExecuTorch: 0 of 1 (0%)**" in told
    assert share([], "onnx") == "not tried"


def test_a_row_has_its_figures_and_the_order_is_the_catalog_s() -> None:
    told = pages(row("Mamba", "transformers", onnx=ABLE), row("TCN", onnx=ABLE), row("DLRM", onnx=ABLE))

    assert "| DLRM | `Kind` | 1,234 | 3 | CrossEntropy | yes |  | 3e-06 | 2.5 | 1.2 |  |" in told
    assert told.index("| TCN |") < told.index("| DLRM |") < told.index("## transformers")


def test_what_cannot_says_why_in_one_line_that_is_no_markdown() -> None:
    both = EngineResult(problem="no form for `aten.x`\nat net.py:3")
    told = pages(row("TCN", onnx=both, executorch=both), row("DLRM", onnx=ABLE, executorch=both))

    assert "* plain, TCN: `no form for 'aten.x' at net.py:3`" in told
    assert "* plain, DLRM: not on ExecuTorch: `no form" in told
    assert "What cannot be trained yet" not in pages(row("TCN", onnx=ABLE))


def test_the_command_the_machine_and_what_is_left_out_are_said() -> None:
    told = pages(row("TCN", onnx=ABLE))

    assert COMMAND in told and "A processor" in told and "torch 2.13.0" in told
    assert "timm was not installed: its 14 architectures are left out." in told


def test_times_of_a_machine_with_other_work_are_called_that() -> None:
    loads = {"TCN": 4.0, "DLRM": None}
    busy = [msgspec.structs.replace(row(name, onnx=ABLE), load=load) for name, load in loads.items()]

    assert "had other work while 2 of the rows were made" in pages(*busy)
    assert "other work" not in pages(row("TCN", onnx=ABLE))


@pytest.mark.parametrize(
    ("name", "rows", "held_out"),
    [("models.md", "architectures.jsonl", False), ("models/held_out.md", "held_out.jsonl", True)],
)
def test_the_page_in_the_documents_is_that_of_its_rows(name: str, rows: str, held_out: bool) -> None:
    docs = Path(__file__).parents[3] / "docs"
    text = (docs / name).read_text()
    (command,) = re.findall(r"```sh\n(.+)\n```", text)
    told = re.sub(r"\n.+ was not installed: .+", "", text)

    assert markdown_page(read(docs / "models" / rows), {}, command, held_out=held_out) == told
