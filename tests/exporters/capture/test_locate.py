"""Whose line an op is told with."""

from __future__ import annotations

from pathlib import Path

import torch

import edgefl_export.capture.locate
from edgefl_export.capture.locate import is_compiler


def test_torch_behind_a_link_is_the_compiler_s(tmp_path: Path) -> None:
    link = tmp_path / "site-packages"
    link.symlink_to(Path(torch.__file__).parents[1])

    assert is_compiler(link / "torch" / "functional.py")
    assert is_compiler(Path(edgefl_export.capture.locate.__file__))
    assert not is_compiler(Path(__file__))
