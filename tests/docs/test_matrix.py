"""The attack matrix names tests that there are, and has a test or a limit in each cell."""

from __future__ import annotations

import re

from tests.docs.documents import DOCS, ROOT

PAGE = (DOCS / "security.md").read_text()
HOSTILE = ROOT / "tests" / "e2e" / "hostile"


def _rows(heading: str) -> list[list[str]]:
    text = PAGE.split(heading, 1)[1].split("\n\n", 2)[-1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_every_cell_is_a_promise_with_a_test_or_a_limit() -> None:
    matrix, named = _rows("## Attack matrix"), {row[0] for row in _rows("Tests by the names")}
    used = set()
    for who, *cells in matrix:
        assert len(cells) == 6, who
        for cell in cells:
            tests = {name for each in re.findall(r"\*([^*]+)\*", cell) for name in each.split(", ")}
            assert tests or "limit" in cell, (who, cell)
            used |= tests
    assert len(matrix) == 6 and used == named


def test_the_tests_are_there() -> None:
    for name, what in _rows("Tests by the names"):
        text = ""
        for word in re.findall(r"`([^`]+)`", what):
            if word.endswith(".py"):
                path = ROOT / word if "/" in word else HOSTILE / word
                assert path.is_file(), (name, word)
                text = path.read_text()
            else:
                assert f"def {word}(" in text, (name, word)
