"""``edgefl device build-engine``: compile the ExecuTorch binding ahead of its first use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.output import print_json


def build_engine(
    into: Annotated[
        Path | None,
        typer.Option(help="folder for the file; default: the package, where a device looks first"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Compile the binding of --engine executorch now: in an image, or for a like machine that has no compiler.

    Needs the package executorch and a C++ compiler. Without it, a device compiles the binding when it first needs it.

    Examples:

      edgefl device build-engine

      edgefl device build-engine --into /media/card
    """

    from device_runtime.engine.executorch.build import build_engine as built

    file, version = built(into)
    if as_json:
        print_json({"file": str(file), "executorch": version})
    else:
        typer.echo(f"{file}: the binding to executorch {version}")
