"""The command line: a thin layer over the Python API. Each command imports what it needs when it runs."""

from __future__ import annotations

import sys

import typer

from edgefl.cli import (
    bench,
    broker,
    catalog,
    deploy,
    device,
    export,
    heterogeneity,
    personalize,
    plan,
    reproduce,
    run,
    server,
    verify,
)
from edgefl.lab.family import die_with_parent
from edgefl.wire.errors import EdgeflError

app = typer.Typer(
    name="edgefl",
    help="Federated learning on real devices: submodels that fit, compiled with their training algorithm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (
    run,
    broker,
    server,
    device,
    plan,
    export,
    deploy,
    verify,
    catalog,
    bench,
    heterogeneity,
    personalize,
    reproduce,
):
    module.register(app)


def main() -> None:
    """Run a command; an expected error becomes one clear line and its exit code."""
    die_with_parent()
    try:
        app()
    except EdgeflError as error:
        typer.secho(f"error: {error.message}", fg="red", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        typer.secho(
            f"error: {error.strerror or error}: {error.filename or ''}".rstrip(": "), fg="red", err=True
        )
        sys.exit(1)
    except ModuleNotFoundError as error:
        extra = (
            "secure" if error.name == "cryptography" else "server" if error.name in _SERVER_MODULES else ""
        )
        if not extra:
            raise
        typer.secho(
            f"error: this command needs {error.name}: pip install 'edgefl[{extra}]'", fg="red", err=True
        )
        sys.exit(1)


_SERVER_MODULES = {"torch", "onnx", "onnxscript", "amqtt", "sqlalchemy", "pydantic", "psutil", "sklearn"}
