"""``edgefl verify``: compare the graphs of a bundle with torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.output import console, print_json, print_table
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.wire.bundle.manifest import Manifest
    from edgefl_export.compiler.verify import BundleCheck, GraphCheck


def verify(
    bundle: Annotated[Path, typer.Argument(help="the bundle's file")],
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="the federation file it was exported with")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="compare with this model instead of the one the bundle names")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the random inputs")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: ok, problems, graphs")] = False,
) -> None:
    """Compare every graph of a bundle with torch.

    A bundle holds graphs and no code. The functions behind them are built again from the federation file that the bundle was
    exported with. Without one, they come from the model, algorithm and units that the bundle names, with default options.
    Each graph then runs in the runtime of its format (onnxruntime, or ExecuTorch's own; that one needs the extra
    `executorch`) on random inputs beside its function in torch: loss, gradients (as momentum), new weights and
    statistics, all outputs. Where rounding decides (kinks of deep models), an output may be as far from float64 as
    torch's own float32 is; the column "rounding" has that distance. Exit code 0: everything agrees. 1: something differs.
    Others: it cannot be read or compared.

    Examples:

      edgefl verify bundles/weak.efl

      edgefl verify bundles/weak.efl federation.toml --json
    """

    from edgefl.config.reading import check_names

    if config:
        check_names(config, {"model.name": model} if model else {})  # torch, loaded below, takes seconds
    from edgefl.api.bundle import Bundle
    from edgefl.config import load

    read = Bundle.load(bundle)
    federation = load(config, {"model.name": model} if model else {}) if config else None
    check = read.verify(federation, model=model or "", seed=seed)
    if as_json:
        print_json(_object(bundle, read.manifest, check))
    else:
        _print(read.manifest, check)
    raise typer.Exit(0 if check.ok else 1)


def _row(check: GraphCheck) -> dict[str, Any]:
    output_errors = check.report.errors if check.report else {}
    worst = max(output_errors, key=lambda name: output_errors[name], default=None)
    return {
        "graph": check.graph,
        "bytes": check.size,
        "ok": not check.problem,
        "max_rel_error": output_errors[worst] if worst else None,
        "worst_output": worst,
        "rounding": max(check.report.rounding.values(), default=None) if check.report else None,
        "seed": check.report.seed if check.report else None,
        "problem": check.problem,
        "errors": dict(output_errors),
    }


def for_people(check: GraphCheck) -> dict[str, Any]:
    """Return the table row of a graph's comparison by column, short enough for 80 characters.

    The longest column is last.
    """
    row = _row(check)
    return {
        "graph": row["graph"],
        "size": size(row["bytes"]),
        "ok": row["ok"],
        "error": _short(row["max_rel_error"]),
        "rounding": _short(row["rounding"]),
        "worst output": row["worst_output"],
    }


def _short(value: float | None) -> str | None:
    return f"{value:.1e}" if value else None if value is None else "0"


def _object(path: Path, manifest: Manifest, check: BundleCheck) -> dict[str, Any]:
    return {
        "bundle": str(path),
        "model": manifest.model,
        "tier": manifest.tier,
        "algorithm": manifest.program,
        "ok": check.ok,
        "problems": list(check.problems),
        "graphs": [_row(item) for item in check.graphs],
    }


def _print(manifest: Manifest, check: BundleCheck) -> None:
    title = f"{manifest.model}, tier {manifest.tier}, algorithm {manifest.program}: beside torch"
    print_table(title, [for_people(item) for item in check.graphs])
    for text in (*check.problems, *(item.problem for item in check.graphs if item.problem)):
        console.print(f"differs: {text}", style="red")
    if check.ok:
        console.print("every graph agrees with torch", style="green")
    else:
        console.print(
            "if its model or its algorithm was edited since, export it again; if it was exported with other "
            "options, name its "
            "federation file: edgefl verify BUNDLE CONFIG"
        )
