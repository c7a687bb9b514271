"""Examples in help texts, as a terminal shows them."""

from __future__ import annotations

import pytest

import edgefl
from edgefl.cli.commands import app
from edgefl.cli.federation.broker import broker
from tests.cli.runner import runner


def test_the_version_is_an_option() -> None:
    assert runner().invoke(app, ["--version"]).output == f"edgefl-tiers {edgefl.__version__}\n"
    assert "--version" in runner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("127.0.0.1", "for this machine alone; --host 0.0.0.0 lets others in"),
        ("0.0.0.0", "for everybody who reaches it, without passwords"),
    ],
)
def test_a_broker_says_who_may_come(
    host: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(edgefl, "serve_broker", lambda *_: None)
    broker(port=1884, host=host)
    assert capsys.readouterr().out == f"starting an MQTT broker on {host}:1884, {text}\n"


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
