"""Whose code a line is."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from edgefl.models import user_code


def test_torch_behind_a_link_is_no_code_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "site-packages"
    link.symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setattr(torch.__spec__, "origin", str(link / "torch" / "__init__.py"))
    monkeypatch.setattr(user_code, "_ours", runpy.run_path(user_code.__file__)["_ours"])

    assert not user_code.is_user_code(link / "torch" / "functional.py")
    assert not user_code.is_user_code(Path(torch.functional.__file__))
    assert user_code.is_user_code(Path(__file__))
