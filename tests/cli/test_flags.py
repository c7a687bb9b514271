"""What the library says of an argument, told in flags."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

from edgefl.cli.commands import app
from edgefl.cli.options import EngineChoice, in_flags
from edgefl.wire.bundle.formats import FORMATS

COMMAND = typer.main.get_command(app)
ROOT = Path(__file__).resolve().parents[2]
FLAG = re.compile(r"(?<![\w`-])--[a-z]")


@pytest.mark.parametrize(
    ("arguments", "message", "told"),
    [
        (["run", "--fresh"], "use `fresh` or another `out`", "use --fresh or another --out"),
        (["device", "--id", "x"], "choose other `threads`, `device_id`", "choose other --threads, --id"),
        (["device", "personalize"], "give it by `alpha`", "give it by --alpha"),
        (["profile"], "a smaller `batch`, see `edgefl export`", "a smaller --batch, see `edgefl export`"),
        (["plan"], "`out` is no option of it", "`out` is no option of it"),
    ],
)
def test_an_argument_becomes_the_flag_of_its_command(arguments: list[str], message: str, told: str) -> None:
    assert in_flags(message, COMMAND, arguments) == told


def test_messages_of_the_library_name_arguments_and_no_flags() -> None:
    """But for commands that they advise to run, which stand in back quotes."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:80]}"
        for room in ("edgefl", "exporters", "device_runtime", "server", "reproduce")
        for path in sorted((ROOT / room).rglob("*.py"))
        if not path.is_relative_to(ROOT / "edgefl" / "cli")
        for line, text in _messages(path)
        if FLAG.search(re.sub(r"`[^`]*`", "", text))
    ]
    assert not found, "\n".join(found)


def _messages(path: Path) -> list[tuple[int, str]]:
    """Sentences in the code: no docstrings, and no single words, which are arguments of processes."""
    source = path.read_text(encoding="utf-8")
    if not FLAG.search(source):
        return []
    tree = ast.parse(source)
    whole = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(each) for node in whole for each in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [(node.lineno, "".join(_text(each) for each in node.values)) for node in whole]
    texts += [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
    ]
    return [(line, text) for line, text in texts if " " in text.strip()]


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


def test_an_engine_can_be_chosen_for_each_format() -> None:
    assert [engine.value for engine in EngineChoice] == list(FORMATS)
