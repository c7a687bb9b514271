"""The house as its files say it: every package has its layer, nothing names a machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "edgefl": "edgefl",
    "edgefl_export": "exporters/edgefl_export",
    "edgefl_device": "device_runtime/edgefl_device",
    "edgefl_server": "server/edgefl_server",
}
# The home folders and scratch folders of people's and machines' own.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:home|root|Users|work|mnt|scratch)/[\w.]|\b[A-Z]:\\Users\\")


def committed() -> list[PurePosixPath]:
    """The files that git knows."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout, or there is no git")
    return [PurePosixPath(name) for name in listed.stdout.split("\0") if name]


def rooms_of(files: list[PurePosixPath], package: str) -> set[str]:
    """The packages and modules directly below ``package``, by their dotted names."""
    inside = [file.relative_to(FOLDERS[package]) for file in files if file.is_relative_to(FOLDERS[package])]
    below = {file.parts[0] for file in inside if file.suffix == ".py"}
    return {f"{package}.{PurePosixPath(name).stem}" for name in below} - {f"{package}.__init__"}


def layers() -> list[str]:
    """Every room of the ``layers`` contract, as often as it stands there."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["type"] == "layers")
    return [room.strip(" ()") for layer in contract["layers"] for room in re.split(r"[|:]", layer)]


@pytest.mark.parametrize("package", FOLDERS)
def test_every_room_stands_in_the_layers_exactly_once(package: str) -> None:
    listed = [room for room in layers() if room.split(".")[0] == package]

    assert sorted(listed) == sorted(rooms_of(committed(), package))


def test_the_layers_have_rooms_of_the_four_packages_only() -> None:
    assert {room.split(".")[0] for room in layers()} == set(FOLDERS)


def test_nothing_names_a_path_of_one_machine() -> None:
    named = [
        f"{file}: {match.group()}"
        for file in committed()
        if file.suffix not in (".bin", ".efl", ".gz", ".png") and (ROOT / file).is_file()
        for match in MACHINE_PATH.finditer((ROOT / file).read_text(encoding="utf-8"))
    ]

    assert named == []


@pytest.mark.parametrize("folder", ["home", "root", "Users", "work"])
def test_a_path_of_a_machine_is_seen(folder: str) -> None:
    assert MACHINE_PATH.search(f'open("/{folder}/somebody/data")')
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/page")


def test_the_command_of_a_device_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['edgefl', 'device', '--help']\n"
        "import edgefl.cli\n"
        "try:\n"
        "    edgefl.cli.main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(sorted({'torch', 'onnx', 'executorch', 'sqlalchemy', 'amqtt'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert "--until-done" in ended.stdout and ended.stdout.splitlines()[-1] == "[]"


# -- modules that code names in strings, such as those of processes that it starts -------------------------


MODULE_NAMES_FOLDERS = {
    "edgefl": ROOT,
    "edgefl_export": ROOT / "exporters",
    "edgefl_device": ROOT / "device_runtime",
    "edgefl_server": ROOT / "server",
    "benchmarks": ROOT,
    "reproduce": ROOT,
    "edgefl_conformance": ROOT / "conformance",
}
"""The folder that holds each package."""
_QUOTED = re.compile(rf"[\"'](?:{'|'.join(MODULE_NAMES_FOLDERS)})\.")
_MODULE = re.compile(rf"({'|'.join(MODULE_NAMES_FOLDERS)})(\.[a-z_][a-z0-9_]*)+(:[A-Za-z_]\w*)?")


def test_modules_that_are_named_in_strings_exist() -> None:
    names = {
        name: path
        for package, folder in MODULE_NAMES_FOLDERS.items()
        for path in (folder / package).rglob("*.py")
        for name in _named(path)
    }

    assert "benchmarks.workers.step" in names
    assert {name: path for name, path in names.items() if not _exists(name)} == {}


def _named(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if _QUOTED.search(text) else ():
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if _MODULE.fullmatch(node.value) and not node.value.endswith(".md"):
            yield node.value.partition(":")[0]


def _exists(name: str) -> bool:
    package, *inside = name.split(".")
    path = MODULE_NAMES_FOLDERS[package].joinpath(package, *inside)
    return path.is_dir() or path.with_suffix(".py").is_file()
