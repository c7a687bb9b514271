"""Folders of a user: where they are, and what is said where this user has no home."""

from pathlib import Path

import pytest

from edgefl.data import datasets
from edgefl.errors import ConfigError
from edgefl.wire import folders
from edgefl_export.compiler.cache import BundleCache


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a container whose user has no entry: ``Path.home`` cannot tell."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "EDGEFL_CACHE", "EDGEFL_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    return monkeypatch


def test_without_a_home_each_folder_says_what_to_set(homeless: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no folder for compiled bundles: .* Set HOME, or EDGEFL_CACHE"):
        BundleCache.of_user()
    with pytest.raises(
        ConfigError, match=r"no folder for what a device keeps: .* Set HOME, or name a folder"
    ):
        folders.store("demo", "phone")
    with pytest.raises(ConfigError, match=r"no folder for downloads: .*EDGEFL_DATA"):
        datasets.download_folder()


def test_without_a_home_what_a_variable_names_is_taken(homeless: pytest.MonkeyPatch, tmp_path: Path) -> None:
    homeless.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert BundleCache.of_user().folder == tmp_path / "edgefl" / "bundles"
    homeless.setenv("EDGEFL_CACHE", str(tmp_path / "own"))
    assert BundleCache.of_user().folder == tmp_path / "own"


def test_without_a_home_data_are_found_by_name(homeless: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert datasets.load("auto").name == datasets.digits().name
    homeless.setenv("EDGEFL_DATA", str(tmp_path))
    assert datasets.places(None) == (tmp_path,)
