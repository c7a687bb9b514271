"""One fact has one figure: figures that carry a command agree wherever the documents have them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.docs.documents import DOCUMENTS, ROOT
from tools.benchmark_pictures import pictures

_COMMAND = re.compile(
    r"`((?:python -m (?:benchmarks|reproduce|edgefl_conformance\S*)|edgefl (?:run|simulate)) ?[^`]*)`"
)
_PROCESSOR = re.compile(r"\b(Intel|AMD)\b")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_AMOUNT = re.compile(rf"{_NUMBER.pattern} (?:%|ms|s|KB|MB|KiB|MiB|GiB)\b|(?<!\w){_NUMBER.pattern}(?! ?\w)")

Quantity = tuple[str, str, str, str]
"""Command, processor, row and column of a figure."""


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*`") for cell in line.strip().strip("|").split("|")]


def figures(text: str) -> Iterator[tuple[Quantity, str]]:
    """Yield each figure of a table whose introduction names one command, with its quantity.

    The introduction is the paragraph above the table. A row's name is its leading cells: those without a figure, and as
    many as make it unique in the table.
    """
    blocks = text.split("\n\n")
    for above, table in pairwise(blocks):
        paragraph = " ".join(above.split())
        commands = _COMMAND.findall(paragraph)
        if not table.startswith("|") or len(commands) != 1:
            continue
        header, _, *rows = (_cells(line) for line in table.splitlines() if line.startswith("|"))
        processor = _PROCESSOR.search(paragraph)
        named = max(next((i for i, cell in enumerate(row) if _NUMBER.match(cell)), 1) for row in rows)
        while named < len(header) and len({tuple(row[:named]) for row in rows}) < len(rows):
            named += 1
        for row in rows:
            for column, cell in zip(header[named:], row[named:], strict=True):
                if _NUMBER.match(cell):
                    yield (
                        (commands[0], processor[1] if processor else "", " ".join(row[:named]), column),
                        cell,
                    )


def disagreements(texts: dict[str, str]) -> dict[Quantity, set[str]]:
    """Return the quantities that have several values, with these."""
    values = defaultdict(set)
    for text in texts.values():
        for quantity, value in figures(text):
            values[quantity].add(value)
    return {quantity: found for quantity, found in values.items() if len(found) > 1}


def evidence(readme: str) -> Iterator[tuple[str, str]]:
    """Yield the command and each amount of the README's rows of evidence; "the same" repeats the command above."""
    command = ""
    for row in map(_cells, re.findall(r"^\| .+ \|$", readme.partition("## Evidence")[2], re.MULTILINE)):
        command = row[-1] if row[-1] != "the same" else command
        for amount in _AMOUNT.findall(" ".join(row[1:-1])):
            yield command, amount


def test_a_quantity_of_one_command_and_processor_has_one_value() -> None:
    texts = {str(page): page.read_text() for page in DOCUMENTS}

    assert disagreements(texts) == {}
    assert sum(1 for text in texts.values() for _ in figures(text)) > 300


def test_the_readme_repeats_figures_of_pages_with_their_command() -> None:
    pages = [page.read_text() for page in DOCUMENTS if page != ROOT / "README.md"]
    rows = list(evidence((ROOT / "README.md").read_text()))

    assert len(rows) > 15
    for command, amount in rows:
        name = " ".join(command.split()[: 2 if command.startswith("edgefl") else 4])
        number = _NUMBER.search(amount)
        assert number
        exact = re.compile(rf"(?<![\d.,]){re.escape(number[0])}(?![\d]|[.,]\d)")
        assert any(name in page and exact.search(page) for page in pages), (
            f"{command}: {amount} is on no page"
        )


@pytest.mark.parametrize("name", ["step-time.svg", "step-memory.svg"])
def test_the_pictures_of_the_benchmarks_show_the_table(name: str) -> None:
    """``python -m tools.benchmark_pictures`` draws them."""
    page = ROOT / "docs" / "benchmarks.md"

    assert (page.parent / "pictures" / name).read_text() == pictures(page.read_text())[name]


def test_two_values_of_a_quantity_are_seen() -> None:
    table = "Peaks (`python -m benchmarks memory`, an Intel Xeon):\n\n| tier | peak |\n|---|---|\n| weak | {} MB |\n"

    assert disagreements({"a": table.format(17.3), "b": table.format(17.3)}) == {}
    found = disagreements({"a": table.format(17.3), "b": table.format(13.7)})
    assert found == {("python -m benchmarks memory", "Intel", "weak", "peak"): {"17.3 MB", "13.7 MB"}}
