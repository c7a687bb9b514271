"""A folder of the user's whose files have the names of libraries and of our folders, each of which raises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import installed
from tests.e2e.runs import TINY
from tests.support.commands import run_command
from tests.support.notebook import run_cells

NAMES = (
    *("server", "client", "data", "model", "train", "utils", "types", "random", "queue", "numpy", "torch"),
    *("exporters", "device_runtime", "sympy", "jinja2"),
)
FEDERATION = (
    TINY.replace('"e2e"', '"named-like-libraries"\nrounds = 1') + "[tiers.whole]\ncut = 0\ncount = 2\n"
)
SIMULATES = """
import edgefl

print(edgefl.__file__, len(edgefl.simulate("federation.toml", out="out").curves["accuracy"]))
"""
SHOWS = "edgefl.simulate('federation.toml', out='out', resume=True)"
PLACES = """
import json
import mine
from pathlib import Path
from edgefl.models.user_code import is_user_code
from edgefl.models.zoo.catalog import build_model
from edgefl.system.distribution import PACKAGES, folders
from edgefl.errors import EdgeflError
from edgefl_device.sandbox.confine import _package_folders
from edgefl_export.capture.locate import is_compiler
from edgefl_export.compiler.cache import source_digest

try:
    build_model("mine:make", sample_shape=(4,), classes=2)
    blamed = ""
except EdgeflError as error:
    blamed = error.message
ours = {folder.name: folder for folder in folders(*PACKAGES)}
readable = list(map(Path, _package_folders()))
print(json.dumps({
    "blamed": blamed.replace(str(Path.cwd()), ""),
    "packages": sorted(ours),
    "user code": [name for name, folder in ours.items() if is_user_code(folder / "__init__.py")],
    "mine": is_user_code(Path(mine.__file__)) and not is_compiler(Path(mine.__file__)),
    "compiler": [name for name, folder in ours.items() if is_compiler(folder / "__init__.py")],
    "readable": [name for name, folder in ours.items() if any(folder.is_relative_to(each) for each in readable)],
    "digest": source_digest(),
}))
"""


@pytest.fixture(scope="module", params=["clone", pytest.param("wheel", marks=pytest.mark.slow)])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return (
        installed.clone() if request.param == "clone" else installed.wheel(tmp_path_factory.mktemp("wheel"))
    )


def write_modules(folder: Path) -> None:
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the user is imported')\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_modules(tmp_path)
    (tmp_path / "federation.toml").write_text(FEDERATION)
    return tmp_path


def ran(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    ended = run_command(*command, cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def where(environment: dict[str, str]) -> Path:
    return Path(environment["PYTHONPATH"].split(":")[0], "edgefl", "__init__.py")


@pytest.mark.slow  # tests/api/test_event_loop.py runs another script beside these files
def test_a_script_simulates(folder: Path, environment: dict[str, str]) -> None:
    (folder / "script.py").write_text(SIMULATES)

    assert ran([sys.executable, "script.py"], folder, environment).split() == [str(where(environment)), "1"]


@pytest.mark.parametrize("name", ["simulate", pytest.param("run", marks=[pytest.mark.e2e, pytest.mark.slow])])
def test_the_command_line_trains(folder: Path, environment: dict[str, str], name: str) -> None:
    command = [sys.executable, "-m", "edgefl", name, "federation.toml", "--out", "out", "--json"]
    events = [json.loads(line) for line in ran(command, folder, environment).splitlines()]

    assert [each["reports"] for each in events if "reports" in each] == [2]


def test_a_notebook_simulates_and_shows_one_display_for_a_call(
    folder: Path, environment: dict[str, str]
) -> None:
    simulated, resumed = run_cells((SIMULATES, SHOWS), folder, environment)

    text = "".join(each.text for each in simulated if each.get("name") == "stdout")
    assert text.split() == [str(where(environment)), "1"]
    (display,) = [each.data["text/plain"] for each in simulated if each.output_type == "display_data"]
    assert "round 1: accuracy" in display and "1/1" in display and len(display.splitlines()) <= 2
    shown = resumed[-1].data
    assert shown["text/html"].startswith("<table>") and "<td>1</td>" in shown["text/html"]
    assert len(shown["text/plain"].splitlines()) <= 5


@pytest.mark.slow
def test_code_is_found_alike_in_a_clone_and_in_a_wheel(tmp_path: Path) -> None:
    """Whose line an error names, what the sandbox may read, and the digest of the sources."""
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(4, 2)(nn)\n")
    (tmp_path / "places.py").write_text(PLACES)
    (tmp_path / "wheel").mkdir()
    command = [sys.executable, "places.py"]
    cloned = json.loads(ran(command, tmp_path, installed.clone()))
    wheel = json.loads(ran(command, tmp_path, installed.wheel(tmp_path / "wheel")))

    assert "mine.py:4" in cloned["blamed"] and cloned["mine"] and cloned["user code"] == []
    assert cloned["readable"] == ["edgefl", "edgefl_device"] and cloned["compiler"] == ["edgefl_export"]
    assert wheel == cloned
