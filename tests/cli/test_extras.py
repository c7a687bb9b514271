"""Commands in an installation for devices alone: errors name missing packages and the extras that contain them."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from edgefl.cli import reported_errors
from edgefl.cli.commands import app
from tests.support.commands import run_python

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = {
    extra: [found[0] for each in requirements if (found := re.match(r"[\w.-]+", each))]
    for extra, requirements in PROJECT["optional-dependencies"].items()
}
"""Names of the distributions of each extra."""
OWN_MESSAGES = {"device", "executorch", "images", "objects", "postgres", "ray", "text", "tracking", "dev"}
"""Extras for features, not for commands: their errors name the feature."""


def modules_of(distribution: str) -> set[str]:
    """Return the top-level packages of an installed distribution."""
    parts = {each.parts[0] for each in metadata.files(distribution) or () if each.name == "__init__.py"}
    found = {name for name in parts if name.isidentifier() and not name.startswith("_")}
    assert found, distribution
    return found


INSIDE_TORCH = {"functorch", "torchgen"}
"""Packages of torch's distribution that edgefl does not import."""
MODULES = {
    module: extra
    for extra, distributions in EXTRAS.items()
    if extra not in OWN_MESSAGES
    for distribution in distributions
    if distribution != PROJECT["name"]
    for module in modules_of(distribution) - INSIDE_TORCH
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_the_error_names_a_missing_module_and_an_extra_with_it(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), reported_errors(lambda: app):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    told = re.search(
        r"this command needs (\S+): pip install 'edgefl-tiers\[(\w+)\]'", capsys.readouterr().err
    )
    assert told and told[1] == module
    assert module in {each for distribution in EXTRAS[told[2]] for each in modules_of(distribution)}


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--rounds", "1"],
        ["server", "--config", "federation.toml", "--out", "out"],
        ["run"],
        ["plan", "mlp"],
        ["export", "federation.toml"],
        ["replay", "out"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_without_the_packages_of_a_server_prints_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text('[model]\nname = "mlp"\n')
    without = f"import sys; sys.modules.update(dict.fromkeys({sorted(MODULES)}))"
    ran = run_python("-c", f"{without}; from edgefl.cli import main; main()", *words, cwd=tmp_path)

    assert ran.returncode == 1
    assert re.fullmatch(r"error: this command needs \S+: pip install 'edgefl-tiers\[server\]'\n", ran.stderr)
