"""The page of the suite."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.models.architecture import LIBRARIES, Library
from benchmarks.models.catalog import ARCHITECTURES, HELD_OUT, chosen, named
from benchmarks.models.command import markdown_page, share
from benchmarks.models.held_out.plain import PLAIN as OTHERS_CODE
from benchmarks.models.plain import PLAIN
from benchmarks.models.rows import EngineResult, SuiteRow, SuiteSettings, left_out, read, try_architecture
from edgefl.errors import ConfigError
from tests.benchmarks.commands import invoke

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


# -- A row of the suite: made by a process of its own, and kept --------------------------------------------


@pytest.mark.slow
def test_an_architecture_is_tried_in_a_process_and_its_row_is_kept(tmp_path: Path) -> None:
    out, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    arguments = ["models", "--only", "plain/Two towers", "--engine", "onnx", "--out", str(out), "--json"]
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

    assert 'no architecture "plain/nobody\'s"' in row.engines["onnx"].problem


def test_libraries_that_are_not_installed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.models.rows.installed", lambda library: "" if library == "timm" else "1.0"
    )

    assert left_out([named("timm/GhostNet"), named("plain/DS-CNN")]) == {"timm": 1}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"library": "plain"}\n')

    with pytest.raises(ConfigError, match="holds no rows of the suite"):
        read(tmp_path / "rows.jsonl")


# -- which architectures there are, and how they are asked for ---------------------------------------------


def test_there_are_sixty_that_others_wrote_each_with_a_name_of_its_own() -> None:
    assert len({each.path for each in ARCHITECTURES}) == len(ARCHITECTURES)
    assert sum(each.library != "plain" for each in ARCHITECTURES) >= 60
    assert {each.library for each in ARCHITECTURES} == set(LIBRARIES)


@pytest.mark.slow
def test_they_are_listed_without_the_libraries_that_make_them() -> None:
    script = (
        "import sys; import benchmarks.models.catalog; "
        "print(sorted({'transformers', 'torchvision', 'timm'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"


def test_a_pattern_is_of_a_name_a_class_or_a_path_in_any_case() -> None:
    def paths(*only: str) -> list[str]:
        return [each.path for each in chosen(only)]

    assert paths("bert") == ["transformers/BERT"]
    assert paths("*MaskedLM") == ["transformers/BERT, masked words"]
    assert paths("plain/u-net*", "mamba") == ["plain/U-Net, pixels", "transformers/Mamba"]
    assert chosen(libraries=["plain"]) == list(PLAIN)
    assert named("transformers/Mamba").kind == "MambaForCausalLM"


def test_a_pattern_that_matches_nothing_is_told_with_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match="no architecture matches 'resnet99'; choose among: plain/LSTM tagger"
    ):
        chosen(["resnet99"])
    with pytest.raises(ConfigError, match="no architecture 'plain/none'"):
        named("plain/none")


def test_those_held_out_are_others() -> None:
    paths = {each.path for each in HELD_OUT}

    assert len(paths) == len(HELD_OUT) and paths.isdisjoint(each.path for each in ARCHITECTURES)
    assert {each.library for each in HELD_OUT} == set(LIBRARIES)
    assert {each.path for each in chosen(held_out=True)} == paths
    assert named("timm/EVA-02") in HELD_OUT


@pytest.mark.parametrize("architecture", [*PLAIN, *OTHERS_CODE], ids=lambda each: each.name)
def test_plain_code_is_what_it_is_said_to_be(architecture) -> None:  # type: ignore[no-untyped-def]
    assert type(architecture.make()).__name__ == architecture.kind
