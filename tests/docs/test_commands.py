"""Every command in a document has that name and those options, and every `make` target exists."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from benchmarks.__main__ import COMMANDS, command_line
from edgefl.cli.commands import app
from edgefl.system.distribution import NAME, install
from reproduce.__main__ import app as reproduce_app
from reproduce.catalog import selected
from tests.docs.documents import DOCS, DOCUMENTS, ROOT, commands

PAGES = [page for page in DOCUMENTS if any(commands(page, "edgefl"))]


@cache
def benchmarks() -> Any:
    return typer.main.get_command(command_line())


@cache
def algorithm() -> Any:
    """All commands: typer takes a tenth of a second to build them."""
    return typer.main.get_command(app)


def unknown(words: list[str]) -> Iterator[str]:
    """What of a command line, without the algorithm, does not exist."""
    command, named = (algorithm(), "edgefl") if words[:1] != ["-m"] else (benchmarks(), words[1])
    words = words[2:] if words[:1] == ["-m"] else words
    for word in words[: words.index("--")] if "--" in words else words:  # behind it is another program's
        if word in getattr(command, "commands", {}):
            command, named = command.commands[word], f"{named} {word}"
        elif hasattr(command, "commands") and not word.startswith("-") and " " not in named:
            yield f"{named} {word}"
            return
        elif word.startswith("--"):
            known = {
                option
                for parameter in command.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
            if word.partition("=")[0] not in known | {"--help"}:
                yield f"{named} {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist_with_their_options(page: Path) -> None:
    ours = [words for words in commands(page, "python") if words[:2] == ["-m", "benchmarks"]]
    assert [each for words in (*commands(page, "edgefl"), *ours) for each in unknown(words)] == []


def test_a_wrong_command_and_a_wrong_option_are_seen() -> None:
    assert list(unknown(["train", "--out", "x"])) == ["edgefl train"]
    assert list(unknown(["device", "--id", "x", "--tls"])) == ["edgefl device --tls"]
    assert list(unknown(["device", "personalize", "--curve"])) == []


def test_reproductions_exist_with_their_options() -> None:
    known = {name for each in typer.main.get_command(reproduce_app).params for name in each.opts}
    lines = [
        words[1:] for page in DOCUMENTS for words in commands(page, "python") if "reproduce" in words[:2]
    ]

    assert {word for words in lines for word in words if word.startswith("--")} <= known | {"--help"}
    named = [[word for word in words[1:3] if not word.startswith("--")] for words in lines]
    assert selected([each for names in named for each in (names[1:] if names[:1] == ["data"] else names[:1])])


def test_the_page_of_commands_has_them_all() -> None:
    page = (DOCS / "commands.md").read_text()
    command = algorithm()

    assert [name for name in command.commands if f"edgefl {name}" not in page] == []
    lines = (ROOT / "benchmarks" / "README.md").read_text()
    assert [name for name in COMMANDS if f"`{name}`" not in lines] == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+)(?: [a-z -]+)?:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[0] for page in DOCUMENTS for words in commands(page, "make") if words}
    prose = {name for page in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)`", page.read_text())}

    assert named | prose <= targets


def test_a_dead_link_ends_make_docs() -> None:
    """mkdocs counts the warnings that it shows, so a quiet build is never strict."""
    (build,) = re.findall(r"mkdocs build(.*)", (ROOT / "Makefile").read_text())

    assert build.split() == ["--strict"]


# -- what people are told to install exists: our distribution's name, and extras that pyproject.toml has ---


EXTRAS_ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((EXTRAS_ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [
    EXTRAS_ROOT / "README.md",
    *(EXTRAS_ROOT / "docs").rglob("*.md"),
    *(
        file
        for name in ("edgefl", "exporters", "device_runtime", "server", "reproduce")
        for file in (EXTRAS_ROOT / name).rglob("*.py")
    ),
]
# In Python's strings the bracket is escaped for rich, in messages the extra may be a variable.
_ASKED = re.compile(r"(edgefl[\w-]*|[\"' ]\.)\\*\[([a-z,]+)\\*\]")


def asked_for(text: str) -> list[tuple[str, str]]:
    """(distribution or ".", extra) of each installation in ``text``."""
    return [
        (name.strip("\"' "), extra) for name, extras in _ASKED.findall(text) for extra in extras.split(",")
    ]


def test_names_and_extras_are_seen_in_commands_and_messages() -> None:
    assert asked_for("pip install 'edgefl-tiers\\\\[server,executorch]'") == [
        ("edgefl-tiers", "server"),
        ("edgefl-tiers", "executorch"),
    ]
    assert asked_for(f'pip install ".[server]" and {install("text")}') == [(".", "server"), (NAME, "text")]
    assert asked_for("edgefl = edges[text]") == []


def test_the_distribution_has_the_name_that_is_told() -> None:
    assert PROJECT["name"] == NAME


def test_every_extra_that_is_told_exists() -> None:
    told = {asked: file for file in TEXTS for asked in asked_for(file.read_text())}

    assert told
    for (name, extra), file in told.items():
        assert name in (NAME, "."), f"{file}: {name}[{extra}]"
        assert extra in PROJECT["optional-dependencies"], f"{file}: {name}[{extra}]"


def test_every_extra_that_code_tells_by_name_exists() -> None:
    called = re.compile(r"install\('([a-z]+)'\)")
    told = {extra for file in TEXTS for extra in called.findall(file.read_text())}

    assert told and told <= PROJECT["optional-dependencies"].keys()
