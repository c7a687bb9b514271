"""Code of the tutorials, of the README and of other pages: it runs as it is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import DOCS, ROOT, blocks, content
from tests.support.notebook import run_cells

OWN_MODEL = DOCS / "tutorials" / "own-model.md"
EVALUATE = DOCS / "tutorials" / "evaluate.md"
NEW_METHOD = DOCS / "tutorials" / "new-method.md"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def cells_of(page: Path, folder: Path) -> list[str]:
    """Write the page's files into ``folder``, and return its other blocks of Python."""
    cells = []
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(content(block))
        elif block.language == "python":
            cells.append(block.text)
    return cells


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the Python of a page in ``folder`` as one script."""
    (folder / "page.py").write_text("\n".join(cells_of(page, folder)))
    return subprocess.run(
        [sys.executable, "page.py"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def run_here(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python of a page in ``folder`` in this process, which has imported torch."""
    monkeypatch.chdir(folder)
    exec(compile("\n".join(cells_of(page, folder)), page.name, "exec"), {"__name__": page.stem})


def test_the_model_is_measured_on_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(EVALUATE, tmp_path, monkeypatch)

    text = capsys.readouterr().out
    printed = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[-1].isdigit())
    assert float(printed["the median device"]) > float(printed["nine of ten reach"])
    assert float(text.split()[-1]) > float(printed["nine of ten reach"]) + 0.05, "as the page says of FedPer"
    assert (tmp_path / "digits.onnx").is_file()


@pytest.mark.e2e
@pytest.mark.slow
def test_own_model_and_data(tmp_path: Path) -> None:
    run_cells(cells_of(OWN_MODEL, tmp_path), tmp_path, ENVIRONMENT)

    assert (tmp_path / "pictures.onnx").is_file()


def test_the_tutorial_shows_the_example_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgefl.config import load
    from edgefl.models.zoo.catalog import build_model

    files = {block.file: content(block) for block in blocks(OWN_MODEL) if block.file}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    assert files["mymodel.py"] == (ROOT / "examples" / "mymodel.py").read_text()
    federation = load(Path("federation.toml"))
    spec = build_model(federation.model.name, classes=4, sample_shape=(1, 16, 16))
    assert spec.units == ("stem", "blocks_0", "blocks_1", "blocks_2", "head")


def test_a_new_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first block is the example's file, which another test compares; here it is imported."""
    run_here(NEW_METHOD, tmp_path, monkeypatch)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_model_with_two_inputs_and_its_data(tmp_path: Path) -> None:
    files = {
        block.file: content(block) for block in blocks(DOCS / "models" / "data.md", "python") if block.file
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ran = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert "2 rounds, finished" in ran.stdout


@pytest.mark.e2e
@pytest.mark.slow
def test_the_ten_lines_of_the_readme(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    (lines,) = [block.text for block in blocks(page, "python")]
    done = run_page(page, tmp_path)

    assert len(lines.split("\n\n")[1].splitlines()) <= 10
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.onnx").is_file() and (tmp_path / "quarter.efl").is_file()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("api/index.md", marks=pytest.mark.slow),
        pytest.param("models/losses.md", marks=pytest.mark.slow),
        pytest.param("fleets/statistics.md", marks=pytest.mark.slow),
        pytest.param("install/embedding.md", marks=pytest.mark.slow),
        pytest.param("compiler.md", marks=pytest.mark.slow),
        pytest.param("compiler-inside.md", marks=pytest.mark.slow),
    ],
)
def test_the_python_of_other_pages_runs(page: str, tmp_path: Path) -> None:
    done = run_page(DOCS / page, tmp_path)

    assert done.returncode == 0, done.stderr


def test_the_home_page_has_the_ten_lines_of_the_readme() -> None:
    home, readme = (
        [block.text for block in blocks(page, "python")] for page in (DOCS / "index.md", ROOT / "README.md")
    )

    assert home == readme


def test_every_page_with_python_is_run_somewhere() -> None:
    """The new method, the small device and deployed files have tests of their own; a page that joins them needs one."""
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if any(blocks(page, "python"))}

    assert pages == {
        *(
            "index.md",
            "api/index.md",
            "compiler.md",
            "compiler-inside.md",
            "models/data.md",
            "models/losses.md",
            "fleets/statistics.md",
            "install/embedding.md",
        ),
        *("tutorials/own-model.md", "tutorials/new-method.md", "tutorials/own-device.md"),
        *("tutorials/evaluate.md", "models/deploy.md"),
    }
