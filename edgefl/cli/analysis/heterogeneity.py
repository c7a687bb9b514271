"""``edgefl heterogeneity``: how different the users of a federation are, and what that means for the method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli.options import existing, run_folder, writable_file
from edgefl.cli.output import console, print_json, print_table
from edgefl.system.files import write_text

if TYPE_CHECKING:
    from edgefl.analysis.heterogeneity.report import HeterogeneityReport


def heterogeneity(
    source: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG or RUN_FOLDER]", help="federation file (TOML), or a run")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            callback=existing, help="model.safetensors or a checkpoint; default: the run's, or initial ones"
        ),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="inner step size; default: the algorithm's, else 0.01")
    ] = None,
    users: Annotated[int, typer.Option(min=0, help="users whose Hessians are examined; 0: all")] = 5,
    devices: Annotated[
        int, typer.Option(min=0, help="users to spread the data over; 0: as many as the tiers have")
    ] = 0,
    samples: Annotated[int, typer.Option(min=0, help="most samples of a user; 0: all")] = 0,
    data: Annotated[Path | None, typer.Option(help="folder with the dataset's standard files")] = None,
    html: Annotated[
        Path | None, typer.Option(callback=writable_file, help="write one page with pictures here")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Measure how different the users of a federation are.

    It compares their labels, inputs, gradients and Hessians, at one model.

    The most useful number is kappa, the part of a meta-gradient that first-order Per-FedAvg (FO) leaves out: below 0.05 all
    variants coincide, from 0.2 to 0.8 HF differs visibly, and with alpha * lambda_max above 1 FO is unsafe. Each distance is
    printed with the value that chance alone would give. Constants are local estimates at this model; networks do not meet
    the assumptions of the theory everywhere.

    Users are the simulated devices of `edgefl run`: their data is spread again as the federation file says. Give a run's
    folder for its trained model, a federation file for the initial one. Gradients take all of a user's samples, or --samples
    of them; Hessians take --users users, evenly spread over all.

    Examples:

      edgefl heterogeneity federation.toml --alpha 0.01 --html users.html

      edgefl heterogeneity runs/first --json

      edgefl heterogeneity federation.toml --devices 50 --weights runs/first/checkpoints/round-0010.safetensors
    """

    from edgefl.config.reading import check_names

    settings: dict[str, object] = {"data.dir": str(data)} if data else {}
    if source is None or source.suffix == ".toml":
        check_names(source, settings)  # torch, which all that follows loads, takes seconds
    else:
        run_folder(source)
    from edgefl.analysis.heterogeneity import tables
    from edgefl.analysis.heterogeneity.report import as_object, reading
    from edgefl.analysis.heterogeneity.tables import page
    from edgefl.api.analysis import heterogeneity as measured

    title, report = measured(
        source, weights=weights, alpha=alpha, users=users, devices=devices, samples=samples, data=data
    )
    sections = tables.tables(report)
    grouped = tables.groups(report)
    if html is not None:
        write_text(html, page(title, report, sections | {"users by their classes": grouped}, _notes(report)))
    if as_json:
        print_json({"title": title, **as_object(report)})
        return
    console.print(title)
    for name, rows in sections.items():
        print_table(name, list(rows))
    if grouped:
        print_table("users by their classes", list(grouped))
    verdict = reading(report.kappa, max(report.alpha_lambda))
    console.print(verdict, style="bold red" if "unsafe" in verdict else "bold")
    if html is not None:
        console.print(f"page: {html}")


def _notes(report: HeterogeneityReport) -> list[str]:
    setting = report.setting
    return [
        f"alpha {setting.alpha:g}, beta {setting.beta:g}, tau {setting.tau}, batches of {setting.inner}. Hessians of "
        f"{len(report.curvature.users)} of {len(report.counts)} users (numbers "
        f"{', '.join(map(str, report.curvature.users))}), f averaged over these.",
        "Label distances compare class frequencies; they are those of the data where users share the inputs of a class, and "
        "a lower bound elsewhere. Constants are local estimates along one inner step from this model.",
    ]
