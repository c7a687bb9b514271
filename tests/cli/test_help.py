"""Examples in help texts, as a terminal shows them."""

from __future__ import annotations

import pytest

from edgefl.cli.commands import app
from tests.cli.runner import runner


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("run", ["'edgefl-tiers[executorch]'", "my/file.py:mine:lr=0.1"]),
        ("profile", ["needs edgefl-tiers[server]"]),
    ],
)
def test_examples_are_shown_as_they_are_typed(command: str, texts: list[str]) -> None:
    """Nothing of them is taken for markup or an emoji."""
    shown = runner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})

    for text in texts:
        assert text in " ".join(shown.output.split())
