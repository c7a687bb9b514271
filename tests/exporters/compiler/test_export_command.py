"""``edgefl export --memory-budget`` and ``--activations``: options reach the bundle, and a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgefl.cli import app
from edgefl.errors import ConfigError, EdgeflError, ExportError
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.bundle.manifest import Graph

CONFIG = """
[model]
name = "mlp"
options = {{ hidden = [5] }}
[algorithm]
batch = 4
steps = 2
[data]
name = "digits"
[tiers.strong]
count = 1
{budget}
"""


def exported(folder: Path, *options: str, budget: str = "") -> Graph:
    """The step in the bundle that the command writes; raises what the command raises."""
    (folder / "federation.toml").write_text(CONFIG.format(budget=budget))
    ran = CliRunner().invoke(app, ["export", str(folder / "federation.toml"), "--out", str(folder), *options])
    if isinstance(ran.exception, EdgeflError):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return read_bundle(folder / "strong.efl").manifest.graph("train")


def test_the_option_is_written_beside_the_step(
    tmp_path: Path,
) -> None:
    with_it, without = exported(tmp_path, "--memory-budget", "64MiB"), exported(tmp_path)

    assert (with_it.memory_budget, without.memory_budget) == (64 * 2**20, 0)
    assert with_it.blob == without.blob


def test_without_it_the_tier_s_own_budget_holds(tmp_path: Path) -> None:
    assert exported(tmp_path, budget='memory_budget = "65MiB"').memory_budget == 65 * 2**20


def test_the_option_goes_before_the_tier_s_own_budget(tmp_path: Path) -> None:
    step = exported(tmp_path, "--memory-budget", "70 MB", budget='memory_budget = "65MiB"')

    assert step.memory_budget == 70_000_000


@pytest.mark.parametrize("text", ["much", "0", "7 TiB"])
def test_an_option_that_is_no_size_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="48MiB or a share such as 50%"):
        exported(tmp_path, "--memory-budget", text)

    assert not (tmp_path / "strong.efl").exists()


def test_how_values_wait_is_said_by_the_tier_and_by_the_option_before_it(tmp_path: Path) -> None:
    told = 'activations = "float16"'
    assert exported(tmp_path).activations == "float32"
    assert exported(tmp_path, budget=told).activations == "float16"
    assert exported(tmp_path, "--activations", "float32", budget=told).activations == "float32"


def test_a_tier_s_values_cannot_wait_as_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.strong\.activations.*'float32' or 'float16'"):
        exported(tmp_path, budget='activations = "int8"')


def test_a_budget_that_cannot_be_met_writes_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'train' does not fit a memory budget of 1\.0 MiB"):
        exported(tmp_path, "--memory-budget", "1MiB")

    assert not (tmp_path / "strong.efl").exists()
