"""The command line: a thin layer over the Python API. Each command imports what it needs when it runs.

``edgefl device`` and ``edgefl dashboard`` load no other command; all of them are registered in :mod:`edgefl.cli.commands`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from edgefl.cli.device import isolated
from edgefl.system.distribution import install
from edgefl.system.parent import end_by_signal
from edgefl.wire.errors import EdgeflError

if TYPE_CHECKING:
    import typer

    app: typer.Typer


def __getattr__(name: str) -> typer.Typer:
    """``app``, the command line with all its commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgefl.cli.commands import app

    return app


def bare_app() -> typer.Typer:
    """``edgefl`` without its commands."""
    import typer

    from edgefl.cli.version import version_option

    return typer.Typer(
        name="edgefl",
        callback=version_option,
        help="Federated learning on real devices: submodels that fit, compiled with their training algorithm.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )


def main() -> None:
    """Run a command; an expected error becomes one clear line and its exit code."""
    end_by_signal()
    try:
        _run(sys.argv[1:])
    except EdgeflError as error:
        _fail(_in_flags(error.message), error.exit_code)
    except OSError as error:
        _fail(_told(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        _fail(f"this command needs {error.name}: {install(extra)}")


def _told(error: OSError) -> str:
    """The file, what is wrong with it, and what to do."""
    from edgefl.system.files import remedy

    text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return f"{text}; {remedy(error)}".removesuffix("; ")


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["dashboard"]:
        _dashboard()()
    elif arguments[:1] != ["device"]:
        from edgefl.cli.commands import app
        from edgefl.cli.federation.beside import with_place

        app(with_place(arguments))
    elif arguments[1:2] == ["--help"] or not arguments[1:2] or not arguments[1].startswith("-"):
        _device()()
    else:
        isolated.run(_device)


def _device() -> typer.Typer:
    """The command line with this command alone."""
    from edgefl.cli.device import agent as device

    alone = bare_app()
    device.register(alone)
    return alone


def _dashboard() -> typer.Typer:
    """The command line with this command alone: other commands need the server's packages."""
    from edgefl.cli.federation import dashboard

    alone = bare_app()
    dashboard.register(alone)
    return alone


def _in_flags(message: str) -> str:
    """As :func:`edgefl.cli.flags.in_flags`; only a message that names an argument loads the commands."""
    if "`" not in message:
        return message
    import typer

    from edgefl.cli.flags import in_flags

    arguments = sys.argv[1:]
    alone = {"device": _device, "dashboard": _dashboard}.get(arguments[0])
    known = alone() if alone is not None else __getattr__("app")
    return in_flags(message, typer.main.get_command(known), arguments)


def _fail(message: str, code: int = 1) -> None:
    import typer

    try:
        typer.secho(f"error: {message}", fg="red", err=True)
    except OSError:  # a log on a full disk: the exit code is all that is left to say it, and the last flush would change it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(code)


_SERVER = ("torch", "onnx", "onnxscript", "amqtt", "sqlalchemy", "pydantic", "psutil", "exporters", "server")
_EXTRAS = {
    **dict.fromkeys(_SERVER, "server"),
    "scipy": "analysis",
    **dict.fromkeys(("starlette", "uvicorn", "anyio"), "mirror"),
    "prometheus_client": "dashboard",
    "opentelemetry": "otel",
}
"""Which extra brings a module."""
