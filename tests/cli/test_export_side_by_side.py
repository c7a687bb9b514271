"""`edgefl export` compiles bundles in processes side by side; what it writes does not depend on that."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import edgefl
from tests.support.commands import run_python

FEDERATION = """
[model]
name = "mlp"
options = { hidden = [4, 4] }
[data]
name = "digits"
[tiers.strong]
cut = 0
[tiers.weak]
cut = 1
"""


@pytest.mark.slow
def test_two_tiers_side_by_side_are_those_of_one_process(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(FEDERATION)

    # In the test's own process torch has computed gradients, and computes them in no process forked from it.
    ran = run_python(
        "-m",
        "edgefl",
        "export",
        file,
        "--out",
        tmp_path / "out",
        "--json",
        env=os.environ | {"EDGEFL_CACHE": str(tmp_path / "cache")},
    )
    assert ran.returncode == 0, ran.stderr

    here = edgefl.export(file, tmp_path / "here", processes=2)
    written = json.loads(ran.stdout)
    assert [row["compiled"] for row in written] == [True, True]
    assert {row["tier"]: row["digest"] for row in written} == {
        made.bundle.manifest.tier: made.bundle.digest for made in here
    }
