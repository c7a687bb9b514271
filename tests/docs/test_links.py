"""Every relative link of a document leads somewhere: to a file, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.documents import DOCS, DOCUMENTS, ROOT

HOME = DOCS / "index.md"
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


def _linked(page: Path) -> set[Path]:
    return {(page.parent / file).resolve() for file, _ in _LINK.findall(page.read_text()) if file}


def test_the_readme_is_short_and_has_one_picture_and_five_links() -> None:
    readme = (ROOT / "README.md").read_text()
    pictures = re.findall(r"!\[", readme)

    assert len(readme.splitlines()) <= 150
    assert (len(pictures), len(_LINK.findall(readme)) - len(pictures)) == (1, 5)


def test_the_home_page_and_contributing_lead_to_every_page() -> None:
    pages = {path for path in DOCUMENTS if path.parent != ROOT}
    # The page over all results leads to each entry's.
    pages -= set((ROOT / "docs" / "results").glob("*/*.md"))
    linked = set().union(*(_linked(page) for page in (ROOT / "README.md", HOME, ROOT / "CONTRIBUTING.md")))

    assert pages <= linked | {HOME}, "a page that no reader finds"


def test_the_navigation_has_every_page_of_the_site_once() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}

    assert sorted(named) == sorted(page for page in pages if not re.fullmatch(r"results/.+/.+\.md", page))
