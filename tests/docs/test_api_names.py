"""What the reference of the Python API names is there."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
NAMES = re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_names_what_is_there(name: str) -> None:
    found = resolve_name(name)
    assert getattr(found, "__module__", name.rpartition(".")[0]) == name.rpartition(".")[0]
