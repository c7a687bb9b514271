"""A federation that is under way goes on when the server's package is replaced by the next patch release."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.federations import lab_of, small_federation
from edgefl.config import Federation
from edgefl.lab.lab import ServerEvent
from edgefl.system.distribution import PACKAGES, folders, version

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def federation() -> Federation:
    return small_federation(broker="auto")


def next_patch(folder: Path) -> Path:
    """The packages as the next patch release would install them."""
    for source in folders(*PACKAGES):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    *series, patch = version().split(".")
    newer = ".".join([*series, str(int(patch) + 1)])
    project = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{newer}"', project))
    main = folder / "edgefl" / "__main__.py"
    begun = 'import os, pathlib\npathlib.Path(os.environ["EDGEFL_UPGRADED"]).touch()\n'
    main.write_text(f"{begun}{main.read_text()}")
    return folder


def digests(federation: Federation, folder: Path, upgrade: Path | None = None) -> dict[int, str]:
    """Weights after each round. After the first, the server is stopped; its next process is one of ``upgrade``."""
    lab, closed = lab_of(federation, folder), dict[int, str]()
    try:
        lab.start()
        for news in lab.events(patience_s=400):
            if not isinstance(news, ServerEvent) or news.event.get("event") != "roundclosed":
                continue
            closed[news.event["round"]] = news.event["weights_sha256"]
            if upgrade is not None:  # once: a round that a killed server had not told of is told again
                path = os.pathsep.join(filter(None, (str(upgrade), os.environ.get("PYTHONPATH", ""))))
                more = {"EDGEFL_UPGRADED": str(folder / "upgraded"), "PYTHONSAFEPATH": "1"}
                lab.supervisor.replace("server", {"PYTHONPATH": path, **more})
                upgrade = None
        lab.finish()
    finally:
        lab.stop()
    return closed


def test_a_run_goes_on_under_the_next_patch_release(federation: Federation, tmp_path: Path) -> None:
    newer = next_patch(tmp_path / "newer")

    assert digests(federation, tmp_path / "upgraded", newer) == digests(federation, tmp_path / "calm")
    assert (tmp_path / "upgraded" / "upgraded").exists(), "the second server is the newer one"
    told = (tmp_path / "upgraded" / "audit.jsonl").read_bytes()
    assert told.count(b'"event":"started"') == 2
