"""Names that the pages of the Python API render exist under the module that they name."""

from __future__ import annotations

import re
from pkgutil import resolve_name

import pytest

from tests.docs.documents import DOCS

NAMES = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_reference_exists(name: str) -> None:
    found = resolve_name(name)
    assert getattr(found, "__module__", name.rpartition(".")[0]) == name.rpartition(".")[0]
