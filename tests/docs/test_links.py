"""Every relative link of a document leads somewhere: to a file, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]+))?\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """What headings are called in links, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for file, anchor in _LINK.findall(_FENCE.sub("", text)):
        target = document.parent / file if file else document
        assert target.exists(), f"{file} does not exist"
        if anchor:
            assert anchor in _anchors(target.read_text()), f"{file}#{anchor}: no such heading"


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    linked = {(ROOT / file).resolve() for file, _ in _LINK.findall(readme) if file}
    pages = {path for path in DOCUMENTS if path.parent != ROOT and path.name != "index.md"}
    # The page over all results leads to each entry's.
    pages -= set((ROOT / "docs" / "results").glob("*/*/README.md"))

    assert len(readme.splitlines()) <= 200
    assert pages <= linked, "a page that nobody finds"
