"""Every citation of a paper's specification leads to a section, a numbered item or an invariant of a file in docs/specs.

Code and tests cite ``fafed.md 8.11``, ``fiarse.md A9``, ``embracingfl.md 8, row 12``, ``per_fedavg.md 6.6 a`` and
``invariants 2 to 6 of fafed.md``, or name the paper: ``FIARSE invariants 1 to 8``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "docs" / "specs"
FOLDERS = ("edgefl", "exporters", "device_runtime", "server", "reproduce", "tests", "examples")
PAPERS = {
    "EmbracingFL": "embracingfl",
    "FAFED": "fafed",
    "FedBAT": "fedbat",
    "FIARSE": "fiarse",
    "Per-FedAvg": "per_fedavg",
}

_PLACE = r"(?:[A-Z]\d+|\d+(?:\.\d+)*)\b(?: [a-h](?: to [a-h])?\b)?"
_BETWEEN = r"(?:[,;]? (?:and |to )?(?:end of )?(?:(?P<w>sections?|rows?|invariants?) )?)"
_AFTER = re.compile(rf"\b(\w+)\.md((?:{_BETWEEN.replace('?P<w>', '?:')}{_PLACE})+)")
_NUMBERS = r"I?\d+(?:(?:, | and | to |-)I?\d+)*"
_BEFORE = re.compile(rf"\b[Ii]nvariants? ({_NUMBERS}) of (\w+)\.md")
_NAMED = re.compile(rf"\b({'|'.join(PAPERS)}) (?:invariants? )({_NUMBERS})|\b(EmbracingFL) (I\d+(?:, I\d+)*)")
_NAMELESS = re.compile(
    r"\b[Ss]pec(?:ification)?(?:,? section)? \d|\b8-A\d|[^\w`]\((?:[2-9]\.\d{1,2})\)[.:;,]"
)


@dataclass(frozen=True)
class Specification:
    """What of a file can be cited: ``sections`` (rows like 8.11 too), ``items`` (A9, I5, R3), ``rows`` of section 8's
    table, ``invariants`` of section 7, and ``letters`` such as "6.6 a".
    """

    sections: frozenset[str]
    items: frozenset[str]
    rows: frozenset[str]
    invariants: frozenset[int]
    letters: frozenset[str]

    def has(self, kind: str, place: str) -> bool:
        if kind.startswith("row"):
            return place in self.rows
        if kind.startswith("invariant"):
            return int(place.lstrip("I")) in self.invariants
        number, _, letters = place.partition(" ")
        known = number in self.items if number[0].isalpha() else number in self.sections
        return known and all(
            f"{number} {letter}" in self.letters for letter in re.findall(r"\b[a-h]\b", letters)
        )


@cache
def specification(name: str) -> Specification | None:
    """None if there is no such file."""
    file = SPECS / f"{name}.md"
    if not file.is_file():
        return None
    text = file.read_text()
    by_section = dict(re.findall(r"^## (\d+)\.? .*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    headings = re.findall(r"^#{2,4} (\d+(?:\.\d+)*)\.? ", text, re.MULTILINE)
    items = re.findall(r"^(?:\| |\*\*)([A-Z]\d+)\b", text, re.MULTILINE)
    invariants = re.findall(r"^(?:\| I?(\d+) \||(\d+)\. )", by_section.get("7", ""), re.MULTILINE)
    return Specification(
        frozenset(headings) | frozenset(re.findall(r"^\| (\d\.\d+) \|", text, re.MULTILINE)),
        frozenset(items),
        frozenset(re.findall(r"^\| (\d+) \|", by_section.get("8", ""), re.MULTILINE)),
        frozenset(int(one or other) for one, other in invariants),
        frozenset(_letters(text)),
    )


def _letters(text: str) -> Iterator[str]:
    for number, body in re.findall(r"^### (\d+\.\d+) (.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        yield from (f"{number} {letter}" for letter in re.findall(r"^\*\*\(([a-h])\)", body, re.MULTILINE))


@dataclass(frozen=True)
class Citation:
    file: str
    kind: str
    place: str


def citations(text: str) -> Iterator[Citation]:
    """Of docstrings and comments, those that are broken over two lines too."""
    text = re.sub(r"\s*\n\s*(?:#\s*)?", " ", text)
    for file, places in _AFTER.findall(text):
        kind = ""
        for word, place in re.findall(rf"(sections?|rows?|invariants?)?\s*({_PLACE})", places):
            kind = word or kind
            yield Citation(file, kind, place)
    for numbers, file in _BEFORE.findall(text):
        yield from _invariants(file, numbers)
    for name, numbers, other, items in _NAMED.findall(text):
        yield from _invariants(PAPERS[name or other], numbers or items)


def _invariants(file: str, numbers: str) -> Iterator[Citation]:
    for number in re.findall(r"I?\d+", numbers):
        yield Citation(file, "invariant", number)


def unresolved(text: str) -> list[str]:
    """What a text cites in vain, and what it cites without a name."""
    vain = []
    for each in citations(text):
        spec = specification(each.file)
        if spec is None and (ROOT / "docs" / f"{each.file}.md").is_file():
            continue  # another document, whose links are tested
        if spec is None or not spec.has(each.kind, each.place):
            vain.append(f"{each.file}.md {each.kind} {each.place}".replace("  ", " "))
    return vain + [f"no file is named: {match.group().strip()}" for match in _NAMELESS.finditer(text)]


def sources() -> list[Path]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if file != Path(__file__).resolve() and "README" not in file.name]


def prose(source: str) -> str:
    """Docstrings, comments and other strings of more than a word; code has numbers in brackets, too."""
    return "\n".join(re.findall(r'"""(?:.|\n)*?"""|#[^\n]*|"[^"\n]* [^"\n]*"', source))


def test_every_citation_leads_somewhere() -> None:
    vain = {
        str(file.relative_to(ROOT)): found
        for file in sources()
        if (found := unresolved(prose(file.read_text())))
    }
    assert vain == {}


def test_there_are_citations_of_every_specification() -> None:
    cited = {each.file for file in sources() for each in citations(prose(file.read_text()))}

    assert {file.stem for file in SPECS.glob("*.md")} <= cited
    assert {file.stem for file in SPECS.glob("*.md")} == set(PAPERS.values())


@pytest.mark.parametrize("paper", PAPERS.values())
def test_a_specification_has_what_it_is_cited_for(paper: str) -> None:
    spec = specification(paper)
    assert spec is not None
    assert {str(number) for number in range(1, 10)} <= spec.sections
    assert spec.invariants == frozenset(range(1, max(spec.invariants) + 1)), "the list of invariants has gaps"


@pytest.mark.parametrize(
    "text",
    [
        "as in fedbat.md 9.9",
        "nobody.md 2",
        "fiarse.md A99",
        "(fiarse.md 8.3,\n    R9)",
        "embracingfl.md 8, row 99",
        "per_fedavg.md 6.4 b",
        "invariants 2 to 60 of fafed.md",
        "FIARSE invariants 1 and 77",
        "see spec 2.7",
        "the paper's switch (8.6).",
    ],
)
def test_a_citation_in_vain_is_found(text: str) -> None:
    assert unresolved(text)


@pytest.mark.parametrize(
    "text",
    [
        "fafed.md 8.11, 2.3 and section 7",
        "fiarse.md 8.3, R3 and A9",
        "embracingfl.md 8, row 12",
        "per_fedavg.md 6.6 a to g",
        "EmbracingFL I8, I9",
        "FedBAT invariants 20-23 (fedbat.md 7)",
        "invariants 1, 2 and 9 of fafed.md, section 7",
    ],
)
def test_a_good_one_is_not(text: str) -> None:
    assert list(citations(text))
    assert unresolved(text) == []
