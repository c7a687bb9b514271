"""``edgefl tune``: the forms of a bundle's graphs that this machine runs fastest. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.output import console, errors, print_json, print_table

if TYPE_CHECKING:
    from edgefl_device.round.autotune import TuningResult


def tune(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a bundle's file (.efl)")],
    threads: Annotated[
        int, typer.Option(min=0, help="most threads of the engine, fewer are tried too; 0: its processors")
    ] = 0,
    store: Annotated[
        Path | None,
        typer.Option(help="folder of a device's store, to keep what was found; the device must not run"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, by graph")] = False,
) -> None:
    """Find the fastest form of each graph on this machine.

    A bundle may hold a graph in several forms: one that any ONNX runtime runs, and others that some processors run faster,
    such as convolutions on a blocked layout. Each is run on the same random inputs, one that fails or gives something else
    is left out, and the others are timed. `edgefl device --tune` does the same in its first round; with --store it is
    done ahead.

    Examples:

      edgefl tune bundles/strong.efl

      edgefl tune bundles/strong.efl --threads 4 --store ~/.edgefl/demo/pi-3
    """

    from edgefl.api.tune import tune as tried

    found = tried(bundle, threads=threads, store=store)
    if as_json:
        print_json(found)
        return
    if not found:
        errors.print(f"{bundle} has no variants: its graphs are run as they are")
        return
    rows = [_row(name, form, choice) for name, choice in found.items() for form in choice.ms]
    print_table(str(bundle), rows)
    for name, choice in found.items():
        if choice.threads_ms:
            told = ", ".join(f"{count}: {ms:.4g} ms" for count, ms in sorted(choice.threads_ms.items()))
            console.print(f"{name} with {choice.threads} threads ({told})")
        for form, why in choice.dropped.items():
            console.print(f"{name} as {form} is left out: {why}")


def _row(name: str, form: str, choice: TuningResult) -> dict[str, Any]:
    return {
        "graph": name,
        "form": form or "its own",
        "step ms": choice.ms[form],
        "of its own": round(choice.ms[form] / choice.ms[""], 2),
        "taken": "yes" if form == choice.variant else "",
    }


def build_engine(
    out: Annotated[
        Path | None,
        typer.Option(help="folder for the file; default: the package, where a device looks first"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Compile the binding of --engine executorch now.

    Use it to prepare a system image, or a file for an equal machine that has no compiler.

    Needs the package executorch and a C++ compiler. Without this command, a device compiles the binding when it first
    needs it.

    Examples:

      edgefl device build-engine

      edgefl device build-engine --out /media/card
    """

    from edgefl_device.engine.executorch.build import build_engine as built

    file, version = built(out)
    if as_json:
        print_json({"file": str(file), "executorch": version})
    else:
        typer.echo(f"{file}: the binding to executorch {version}")
