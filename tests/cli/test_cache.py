"""``edgefl cache``, and the commands that compile each bundle once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgefl.cli import app
from edgefl_export.compiler.cache import BundleCache
from tests.cli.runner import runner

CONFIG = """
[model]
name = "mlp"
options = { hidden = [4] }
[data]
name = "random"
train_samples = 8
test_samples = 8
[algorithm]
batch = 2
[tiers.strong]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path / "kept"))
    (tmp_path / "federation.toml").write_text(CONFIG)
    return tmp_path


def export(folder: Path, out: str) -> tuple[list[dict[str, object]], str]:
    arguments = ["export", str(folder / "federation.toml"), "--out", str(folder / out), "--json"]
    done = runner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return msgspec.json.decode(done.stdout), done.stderr


def test_the_cache_is_used_listed_and_cleared(folder: Path) -> None:
    [first], told = export(folder, "first")
    assert first["compiled"] is True and "1 compiled" in told
    [second], told = export(folder, "second")
    assert second["compiled"] is False and "1 from the cache" in told and "kept" in told
    assert (folder / "first" / "strong.efl").read_bytes() == (folder / "second" / "strong.efl").read_bytes()

    listed = msgspec.json.decode(runner().invoke(app, ["cache", "--json"]).stdout)
    [entry] = listed["bundles"]
    assert listed["folder"] == str(folder / "kept") and listed["bytes"] == entry["bytes"] > 0
    assert (entry["model"], entry["tier"], entry["algorithm"], entry["format"]) == (
        "mlp",
        "strong",
        "sgd",
        "onnx",
    )
    shown = runner().invoke(app, ["cache"], env={"COLUMNS": "200"}).stdout
    assert "1 bundle," in shown and "strong" in shown and "mlp" in shown

    cleared = msgspec.json.decode(runner().invoke(app, ["cache", "--clear", "--json"]).stdout)
    assert cleared == {"folder": str(folder / "kept"), "removed": 1, "bytes": entry["bytes"]}
    assert BundleCache.of_user().entries() == []
    assert export(folder, "third")[0][0]["compiled"] is True


def test_an_empty_cache_and_a_damaged_bundle_are_told(folder: Path) -> None:
    assert "0 bundles" in runner().invoke(app, ["cache"]).stdout
    (folder / "kept").mkdir()
    (folder / "kept" / "x.efl").write_bytes(b"no zip")
    assert "damaged" in runner().invoke(app, ["cache"]).stdout
    [entry] = msgspec.json.decode(runner().invoke(app, ["cache", "--json"]).stdout)["bundles"]
    assert entry["whole"] is False
    assert "removed 1 bundle," in runner().invoke(app, ["cache", "--clear"]).stdout
