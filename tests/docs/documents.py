"""The repository's documents and what is in them: links' targets, blocks of code, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BESIDE = [ROOT / folder / "README.md" for folder in ("benchmarks", "conformance", "examples", "reproduce")]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *_BESIDE])
SPECS = DOCS / "specs"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``file`` is what its first line names (``# mymodel.py``), or empty."""

    language: str
    text: str
    file: str


def blocks(document: Path, language: str = "") -> Iterator[Block]:
    """Those of one language, or all, in their order."""
    for name, text in _BLOCK.findall(document.read_text()):
        if language in ("", name):
            first = _FILE.match(text)
            yield Block(name, text, first[1] if first else "")


def content(block: Block) -> str:
    """Of a file, without the line that names it."""
    return block.text.partition("\n")[2] if block.file else block.text


def commands(document: Path, algorithm: str) -> Iterator[list[str]]:
    """The words behind ``program`` in each line of shell that begins with it."""
    for block in blocks(document, "sh"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == [algorithm]:
                yield [word for word in words[1:] if word not in ("&", ">")]
