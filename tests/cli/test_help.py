"""Examples in help texts, as a terminal shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from rich.text import Text

from edgefl import __version__
from edgefl.cli.commands import app
from edgefl.cli.federation.broker import broker
from edgefl_server import embedded_broker
from tests.cli.runner import edgefl, runner
from tests.support.errors import BrokerError, ConfigError, refuses


def test_the_version_is_an_option() -> None:
    assert runner().invoke(app, ["--version"]).output == f"edgefl-tiers {__version__}\n"
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
    with refuses(BrokerError, host="0.0.0.0"):
        broker(port=1884, host="0.0.0.0", broker_kind=kind)


@pytest.mark.parametrize(
    ("option", "secret", "variable"),
    [
        ("--broker", "pi-1:s3cret@localhost:1883", "EDGEFL_BROKER_PASSWORD"),
        ("--token", "efl1.s3cret", "EDGEFL_TOKEN"),
    ],
)
def test_a_secret_as_an_argument_is_refused(option: str, secret: str, variable: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=variable) as refused:
        edgefl("device", option, secret, "--id", "pi-1", "--data", tmp_path)
    assert "s3cret" not in refused.value.message


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
    flags = [each.opts[0] for each in command.commands["run"].params if each.opts[0].startswith("--")]  # type: ignore[attr-defined]
    assert [flag for flag in flags if flag not in whole] == []
