"""The command line: a thin layer over the Python API. Each command imports what it needs when it runs.

Most commands load no other one; :mod:`edgefl.cli.commands` has them all.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from edgefl.cli import interrupts

if TYPE_CHECKING:
    import typer

    from edgefl.cli.isolated import SettingsPipe

    app: typer.Typer


def __getattr__(name: str) -> typer.Typer:
    """Return ``app``, the command line with all of its commands, which are imported now."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgefl.cli.commands import app

    return app


def bare_app() -> typer.Typer:
    """Return a command line ``edgefl`` without commands."""
    import typer

    from edgefl.cli.options import version_option

    return typer.Typer(
        name="edgefl",
        callback=version_option,
        help="Federated learning on real devices: submodels that fit, compiled with their training algorithm.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"]},  # commands inherit it
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )


def main() -> None:
    """Run the command in ``sys.argv``. An expected error is printed as one line, and determines the exit code."""
    # Before the imports: most of a command's first second is spent in them.
    with interrupts.exit_on_interrupt():
        from edgefl.system.processes import end_by_signal

        end_by_signal()
        # Children of libraries import nothing from the user's folder either.
        os.environ["PYTHONSAFEPATH"] = "1"
        arguments = sys.argv[1:]
        try:
            with reported_errors(lambda: _command_line(arguments)):
                _run(arguments)
        except SystemExit as end:
            if arguments[:1] == ["deploy"] and not end.code:
                # To free the memory of torch with its exporters takes Python a second.
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            raise


@contextmanager
def reported_errors(command: Callable[[], typer.Typer]) -> Iterator[None]:
    """Open a context that prints an expected error as one line, and exits with its code.

    Args:
        command: function that returns the command line. Its flags replace the names of arguments in a message.
    """
    from edgefl.errors import EdgeflError, StoreError
    from edgefl.system.distribution import install
    from edgefl.system.files import remedy

    try:
        yield
    except (EdgeflError, OSError, ModuleNotFoundError) as error:
        if interrupts.follows_interrupt(error):
            raise
        if isinstance(error, EdgeflError):
            _fail(_in_flags(error.message, command), error.exit_code)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            text = f"{error.filename} cannot be used: {reason}" if error.filename else reason
            advice = remedy(error) or "make room, let it be written, or name another place"
            _fail(f"{text}; {advice}", StoreError.exit_code)
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        if extra != "otel" and sys.argv[1:2] == ["dashboard"]:
            extra = "dashboard"
        _fail(f"this command needs {error.name}: {install(extra)}")


def _run(arguments: list[str]) -> None:
    """Run the command with these ``arguments``; `device` and `server` read their options in a child process."""
    for word in (*arguments[:1], *(each.partition("=")[0] for each in arguments if each.startswith("--"))):
        if word in _REPLACED:
            _fail(f"{word} is gone: use {_REPLACED[word]}", code=2)
    modules = {"device": "edgefl.cli.device.process", "server": "edgefl.cli.federation.serving"}
    module = modules.get(arguments[0] if arguments else "")
    asks = arguments[1:2] in (["--help"], ["-h"]) or not arguments[1:2] or not arguments[1].startswith("-")
    if module is None or asks:
        _read(arguments)
    else:
        from edgefl.cli import isolated

        isolated.run(partial(_read, arguments), module)


def _read(arguments: list[str], settings_pipe: SettingsPipe | None = None) -> None:
    """Read the options and run the command. With ``settings_pipe``, send its settings to the process that runs it
    instead.
    """
    if arguments[:1] not in (["device"], ["dashboard"]):
        from edgefl.cli.federation.web import with_place

        arguments = with_place(arguments)
    _command_line(arguments)(arguments, obj=settings_pipe)


def _command_line(arguments: list[str]) -> typer.Typer:
    """Return the command line that can run ``arguments``. It has only the called command if that is known, which saves
    imports.
    """
    name = arguments[0] if arguments else ""
    if name != "device" and name not in _MODULES:
        return __getattr__("app")
    alone = bare_app()
    if name == "device":
        from edgefl.cli.device.agent import register

        register(alone)
    else:
        from edgefl.cli.options import ShortHelp, help_of

        command = getattr(import_module(f"edgefl.cli.{_MODULES[name]}.{name}"), name)
        alone.command(help=help_of(command), cls=ShortHelp)(command)
    return alone


def _in_flags(message: str, command: Callable[[], typer.Typer]) -> str:
    """Return ``message`` with arguments' names replaced by flags (:func:`edgefl.cli.options.in_flags`).

    The commands are loaded only if the message names an argument.
    """
    if "`" not in message:
        return message
    import typer

    from edgefl.cli.options import in_flags

    return in_flags(message, typer.main.get_command(command()), sys.argv[1:])


def _fail(message: str, code: int = 1) -> NoReturn:
    import typer

    try:
        typer.secho(f"error: {message}", fg="red", err=True)
    except OSError:
        # A log on a full disk. Python's last flush would fail, too, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(code)


_MODULES = {
    **dict.fromkeys(("heterogeneity", "personalize"), "analysis"),
    **dict.fromkeys(("dashboard", "run", "server", "simulate"), "federation"),
    **dict.fromkeys(("check", "deploy", "export", "plan", "profile", "verify"), "models"),
}
"""The folder of each command whose module has its name and no other command."""
_REPLACED = {
    **dict.fromkeys(("bench", "load"), "`python -m benchmarks` in a clone of the repository"),
    **dict.fromkeys(("papers", "reproduce"), "`python -m reproduce` in a clone of the repository"),
    "conformance": "`edgefl-conformance` of the distribution of that name",
    "--program": "--algorithm",
}
"""What replaces commands and options of earlier releases."""
_SERVER = (
    "torch",
    "onnx",
    "onnxscript",
    "onnx_ir",
    "google.protobuf",
    "amqtt",
    "sqlalchemy",
    "immutables",
    "pydantic",
    "psutil",
    "numba",
    "packaging",
    "edgefl_export",
    "edgefl_server",
)
_EXTRAS = {
    **dict.fromkeys(_SERVER, "server"),
    "google": "server",
    "scipy": "analysis",
    **dict.fromkeys(("starlette", "uvicorn", "h11", "anyio"), "mirror"),
    "prometheus_client": "dashboard",
    **dict.fromkeys(("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"), "otel"),
    **dict.fromkeys(("segno", "websockets"), "web"),
}
"""Which extra brings a module."""
