"""Ctrl-C ends a command at any time: exit code 130, without a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgefl.cli.interrupts import exit_on_interrupt
from tests.support.commands import run_python
from tests.wire.mqtt.events import PATIENCE_S, wait_until

_COMMAND = """
import os, signal, sys
interrupted_module = sys.argv.pop(1)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted_module:
            os.killpg(0, signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from edgefl.cli import main
main()
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("edgefl.system.processes", "broker --port 0"),
        ("edgefl.cli.options", "simulate federation.toml"),
        ("edgefl.cli.device.process", "device --id a --data . --store st"),
        ("edgefl_server.torch_process.connection", "server --config federation.toml --out run"),
    ],
)
def test_an_interrupt_while_a_command_is_loaded_is_silent(module: str, command: str, tmp_path: Path) -> None:
    # The process that reads a server's options would report a missing one, sooner or later than the interrupt.
    (tmp_path / "federation.toml").touch()
    ended = run_python(
        "-P",
        "-c",
        _COMMAND,
        module,
        *command.split(),
        cwd=tmp_path,
        timeout=PATIENCE_S,
        start_new_session=True,
    )

    assert (ended.returncode, ended.stdout + ended.stderr) == (130, "")


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, action in before.items():
        signal.signal(number, action)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    with pytest.raises(SystemExit, match="130") as ended, exit_on_interrupt():
        yield
    assert isinstance(ended.value.__context__, KeyboardInterrupt)


@pytest.mark.usefixtures("handled")
def test_an_interrupt_that_python_ignores_is_raised_again(capfd: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with ended_by_interrupt():
        Interrupted()
        wait_until(lambda: False, "the interrupt is raised again")
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("handled")
def test_an_error_that_a_library_makes_of_an_interrupt_is_silent() -> None:
    with pytest.raises(SystemExit, match="130"), exit_on_interrupt():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error


@pytest.mark.usefixtures("handled")
def test_an_extension_module_is_initialized_before_an_interrupt_is_raised() -> None:
    initialized: list[bool] = []

    def initialize() -> None:
        signal.raise_signal(signal.SIGINT)
        initialized.append(True)

    class ExtensionFileLoader:
        def exec_module(self) -> None:
            initialize()

    with ended_by_interrupt():
        ExtensionFileLoader().exec_module()
        wait_until(lambda: False, "the interrupt is raised")
    assert initialized
