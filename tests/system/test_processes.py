"""Files in the working folder with the names of libraries."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edgefl.algorithms.catalog import build
from edgefl.config.names import name_problems
from edgefl.errors import EdgeflError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.system.processes import child_path, module_command
from tests import installed
from tests.support.commands import run_command, run_python

ROOT = Path(__file__).parents[2]
NAMES = ("client", "random", "queue", "numpy", "torch", "types", "typing", "json", "socket", "rich")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder in which modules named like libraries raise."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the user is imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", installed.clone()["PYTHONPATH"])
    return tmp_path


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "edgefl"], module_command("edgefl")], ids=["by hand", "as a child"]
)
def test_commands_import_no_file_of_the_working_folder(folder: Path, command: list[str]) -> None:
    ran = run_command(*command, "broker", "--help")

    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "last"),
    [
        pytest.param("json", True, id="standard"),
        pytest.param("torch", True, id="required"),
        pytest.param("sympy", True, id="required by torch"),
        pytest.param("markdown_it", True, id="required, under the name of another distribution"),
        pytest.param("utils", False, id="of the user alone"),
    ],
)
def test_a_folder_that_hides_a_library_is_searched_last(name: str, last: bool, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").touch()
    (tmp_path / "no.module.py").touch()
    code = "import sys, edgefl; print(sys.path[-1] == '')"
    ran = run_python("-c", code, cwd=tmp_path, env=installed.clone(), check=True)

    assert ran.stdout == f"{last}\n"


def test_children_find_the_library_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.py").write_text("import random, numpy; print('mine')\n")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    ran = run_command(*module_command("mine"), env={**os.environ, "PYTHONPATH": child_path()})

    assert (ran.stdout, ran.stderr) == ("mine\n", "")


def test_every_python_child_is_started_by_one_function() -> None:
    rooms = ("edgefl", "server", "device_runtime", "exporters", "benchmarks", "reproduce")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    found = [path for path in files if 'sys.executable, "-m"' in path.read_text(encoding="utf-8")]

    # Of the clone, whose folder it is started in, and of a virtual environment.
    assert found == [ROOT / "benchmarks/page.py", ROOT / "benchmarks/peers.py"]


def test_own_code_imports_the_modules_beside_it(folder: Path) -> None:
    package = folder / "ownpackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "widths.py").write_text("HIDDEN = 8\n")
    (package / "net.py").write_text(
        "import random\nfrom torch import nn\nfrom ownpackage import widths\n"
        "def make():\n    from .widths import HIDDEN\n    import besides_the_package as beside\n"
        "    return nn.Sequential(nn.Linear(beside.WIDE, HIDDEN), nn.Linear(widths.HIDDEN, 2))\n"
    )
    (folder / "besides_the_package.py").write_text("WIDE = 4\n")
    (folder / "file.py").write_text("import besides_the_package, queue\nfrom ownpackage.net import make\n")
    before = list(sys.path)

    for name in ("ownpackage.net:make", f"{folder / 'file.py'}:make", "ownpackage/net.py:make"):
        assert build_model(name, sample_shape=(4,), classes=2).name == name
    assert not name_problems({"model": {"name": "ownpackage.net:make"}})
    assert sys.path == before


_EXITS = {
    "exit": "import sys\nsys.exit(3)\n",
    "raise": "raise SystemExit\n",
    "arguments": "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', required=True)\n"
    "parser.parse_args([])\n",
    "in the factory": "def make(*_):\n    quit('no')\n",
}


@pytest.mark.parametrize("source", _EXITS.values(), ids=_EXITS)
@pytest.mark.parametrize("what", ["model", "algorithm"])
def test_own_code_that_exits_is_named(tmp_path: Path, source: str, what: str) -> None:
    file = tmp_path / "leaves.py"
    file.write_text(source)
    name = f"{file}:make"
    spec = build_model("mlp")
    objective = Objective(spec.module, spec.sample, spec.loss)

    with pytest.raises(EdgeflError, match=r"leaves\.py:\d+"):
        build_model(name, sample_shape=(4,), classes=2) if what == "model" else build(name, objective)
