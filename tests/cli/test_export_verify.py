"""`edgefl export` and `edgefl verify` need a model and a bundle, not devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from edgefl.cli import app
from edgefl.config import parse, without_devices
from edgefl.lab.lab import completed
from edgefl.wire import bundle as bundles
from edgefl.wire.errors import BundleError, ConfigError

WITHOUT_COUNTS = """
[model]
name = "mlp"
options = { hidden = [4] }
[data]
name = "digits"
[tiers.strong]
cut = 0
"""


def edgefl(*arguments: str | Path) -> int:
    """The command's exit code; what it refuses is raised."""
    ran = CliRunner().invoke(app, list(map(str, arguments)))
    if ran.exception and not isinstance(ran.exception, SystemExit | typer.Exit):
        raise ran.exception
    return ran.exit_code


def test_tiers_without_counts_are_exported_and_verified(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(WITHOUT_COUNTS)

    assert edgefl("export", file, "--out", tmp_path) == 0
    assert bundles.read(tmp_path / "strong.efl").manifest.tier == "strong"
    assert edgefl("verify", tmp_path / "strong.efl", file) == 0


def test_a_run_still_asks_how_many_devices_it_is_to_start(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(WITHOUT_COUNTS)

    with pytest.raises(ConfigError, match="no tier has a count"):
        edgefl("run", file, "--out", tmp_path / "run")


def test_counts_that_are_given_stay() -> None:
    federation = parse({"tiers": {"strong": {"count": 3}, "weak": {}}}, source="the test")

    assert without_devices(federation) == federation
    assert completed(without_devices(federation)).round.min_devices == 3


def test_verify_names_the_bundles_of_a_folder(tmp_path: Path) -> None:
    for name in ("weak.efl", "strong.efl", "notes.txt"):
        (tmp_path / name).touch()
    listed = f"is a folder; name one of its bundles: {tmp_path}/strong.efl, {tmp_path}/weak.efl"

    with pytest.raises(BundleError, match=re.escape(listed) + "$"):
        edgefl("verify", tmp_path)


def test_verify_says_that_a_folder_has_no_bundles(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=re.escape("there is no bundle (*.efl) in it")):
        edgefl("verify", tmp_path)
