"""Examples in help texts, as a terminal shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from rich.text import Text

import edgefl
from edgefl.cli.commands import app
from edgefl.cli.federation.broker import broker
from edgefl.errors import BrokerError, ConfigError
from edgefl_server import embedded_broker
from tests.cli.runner import runner


def test_the_version_is_an_option() -> None:
    assert runner().invoke(app, ["--version"]).output == f"edgefl-tiers {edgefl.__version__}\n"
    assert "--version" in runner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("command", [[], ["run"], ["device"], ["key", "show"], ["data", "check"]])
def test_the_short_option_for_help_is_known_everywhere(command: list[str]) -> None:
    short, whole = (runner().invoke(app, [*command, option]) for option in ("-h", "--help"))

    assert (short.exit_code, short.output) == (0, whole.output)


def test_a_broker_says_who_may_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded_broker, "run_amqtt", lambda *_: None)
    broker(port=1884)
    text = "for this machine alone and without passwords"
    assert capsys.readouterr().out == f"starting an MQTT broker on 127.0.0.1:1884, {text}\n"


@pytest.mark.parametrize("kind", ["amqtt", "mosquitto"])
def test_a_broker_without_passwords_is_for_this_machine_alone(kind: str) -> None:
    with pytest.raises(BrokerError, match="listens to its own machine only"):
        broker(port=1884, host="0.0.0.0", broker_kind=kind)


def test_a_password_on_the_command_line_is_refused_and_not_repeated(tmp_path: Path) -> None:
    arguments = ["--broker", "pi-1:s3cret@localhost:1883", "--id", "pi-1", "--data", str(tmp_path)]
    result = runner().invoke(app, ["device", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "EDGEFL_BROKER_PASSWORD" in result.exception.message and "s3cret" not in result.exception.message


def test_a_token_on_the_command_line_is_refused_and_not_repeated(tmp_path: Path) -> None:
    result = runner().invoke(
        app, ["device", "--token", "efl1.s3cret", "--id", "pi-1", "--data", str(tmp_path)]
    )
    assert isinstance(result.exception, ConfigError)
    assert "EDGEFL_TOKEN" in result.exception.message and "s3cret" not in result.exception.message


def test_no_help_text_has_markup() -> None:
    """Brackets would not be shown."""
    groups = [typer.main.get_command(app)]
    shown, expected = list[str](), list[str]()
    while groups:
        command = groups.pop()
        groups += getattr(command, "commands", {}).values()
        for text in filter(None, [command.help, *(getattr(param, "help", "") for param in command.params)]):
            shown.append(Text.from_markup(text).plain)
            expected.append(text.replace("\\[", "["))

    assert shown == expected


def test_help_is_short_and_help_all_has_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    command = typer.main.get_command(app)
    firsts = {name: (each.help or "").split("\n")[0] for name, each in command.commands.items()}  # type: ignore[attr-defined]
    short, whole = (runner().invoke(app, ["run", option]).output for option in ("--help", "--help-all"))

    assert {name: text for name, text in firsts.items() if not 0 < len(text) <= 80} == {}
    assert len(short.splitlines()) <= 40 and "--help-all" in short
    options = command.commands["run"].params  # type: ignore[attr-defined]
    assert [
        each.opts[0] for each in options if each.opts[0].startswith("--") and each.opts[0] not in whole
    ] == []
