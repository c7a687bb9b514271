"""``edgefl heterogeneity``: how different the users of a federation are, and what that means for the method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from edgefl.cli.output import console, errors, print_json, print_table

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.analysis.heterogeneity.report import HeterogeneityReport
    from edgefl.config import Federation

_HELP = """
Measure how different the users of a federation are: in their labels, inputs, gradients and Hessians, at one model.

The most useful number is kappa, the part of a meta-gradient that first-order Per-FedAvg (FO) leaves out: below 0.05 all
variants coincide, from 0.2 to 0.8 HF differs visibly, and with alpha * lambda_max above 1 FO is unsafe. Beside each
distance stands what chance alone would show. Constants are local estimates at this model; networks do not meet the
assumptions of the theory everywhere.

Users are the simulated devices of `edgefl run`: their data is spread again as the federation file says. Give a run's
folder for its trained model, a federation file for the initial one. Gradients take all of a user's samples, or --samples of
them; Hessians take --users users, evenly spread over all.

Examples:

  edgefl heterogeneity federation.toml --alpha 0.01 --html users.html

  edgefl heterogeneity runs/first --json

  edgefl heterogeneity federation.toml --devices 50 --weights runs/first/checkpoints/round-0010.safetensors
"""


def register(app: typer.Typer) -> None:
    app.command("heterogeneity", help=_HELP)(heterogeneity)


def heterogeneity(
    source: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG or RUN_FOLDER]", help="federation file (TOML), or a run")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="model.safetensors or a checkpoint; default: the run's, or initial ones"),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="inner step size; default: the program's, else 0.01")
    ] = None,
    users: Annotated[int, typer.Option(min=0, help="users whose Hessians are examined; 0: all")] = 5,
    devices: Annotated[
        int, typer.Option(min=0, help="users to spread the data over; 0: as many as the tiers have")
    ] = 0,
    samples: Annotated[int, typer.Option(min=0, help="most samples of a user; 0: all")] = 0,
    data: Annotated[Path | None, typer.Option(help="folder with the dataset's standard files")] = None,
    html: Annotated[Path | None, typer.Option(help="write one page with pictures here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    from edgefl.analysis.heterogeneity import tables
    from edgefl.analysis.heterogeneity.page import page
    from edgefl.analysis.heterogeneity.report import as_object, reading

    federation, run_weights = _source(source, data)
    with errors.status("") as status:
        title, report = _measured(
            federation,
            weights or run_weights,
            (alpha, users, devices, samples),
            lambda text: status.update(Text(text)),
        )
    sections = tables.tables(report)
    grouped = tables.groups(report)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page(title, report, sections | {"users by their classes": grouped}, _notes(report)))
    if as_json:
        print_json({"title": title, **as_object(report)})
        return
    console.print(title, markup=False, highlight=False)
    for name, rows in sections.items():
        print_table(name, list(rows))
    if grouped:
        print_table("users by their classes", list(grouped))
    verdict = reading(report.kappa, max(report.alpha_lambda))
    console.print(verdict, style="bold red" if "unsafe" in verdict else "bold", markup=False, highlight=False)
    if html is not None:
        console.print(f"page: {html}", markup=False, highlight=False)


def _source(source: Path | None, data: Path | None) -> tuple[Federation, Path | None]:
    """The federation, and where a run's folder has trained weights: the finished model, else the newest checkpoint."""
    from edgefl.config import load
    from edgefl.lab.demo import with_demo_defaults
    from edgefl.lab.lab import CONFIG_NAME
    from edgefl.wire.errors import ConfigError

    overrides: dict[str, object] = {"data.dir": str(data.resolve())} if data else {}
    if source is None:
        return load(None, with_demo_defaults(overrides)), None
    if not source.is_dir():
        return load(source, overrides), None
    if not (source / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{source} is not the folder of a run (no {CONFIG_NAME}); name a run or a federation file"
        )
    finished, checkpoints = (
        source / "model.safetensors",
        sorted((source / "checkpoints").glob("*.safetensors")),
    )
    if not finished.is_file() and not checkpoints:
        raise ConfigError(
            f"the run in {source} has no model yet: wait for its first round, or give {source / CONFIG_NAME}"
        )
    return load(source / CONFIG_NAME, overrides), finished if finished.is_file() else checkpoints[-1]


def _measured(
    federation: Federation,
    weights: Path | None,
    asked: tuple[float | None, int, int, int],
    told: Callable[[str], None],
) -> tuple[str, HeterogeneityReport]:
    from edgefl.analysis.heterogeneity.losses import Losses, Shards, shuffled
    from edgefl.analysis.heterogeneity.report import examine
    from edgefl.analysis.heterogeneity.theory import Setting
    from edgefl.data.partition import histograms
    from edgefl.lab.lab import completed, device_names
    from edgefl.objective.objective import Objective
    from edgefl.programs.personal.adapted import STEP
    from edgefl.setup.data import open_data, partition
    from edgefl.setup.model import federation_model
    from edgefl.setup.training import program_of
    from edgefl.submodels.output_side.submodel import OutputSide

    alpha, users, devices, samples = asked
    count = devices or len(device_names(completed(federation)))
    dataset = open_data(federation)
    spec = federation_model(federation, dataset)
    whole = OutputSide(spec, 0)
    program = program_of(federation, whole)
    own = program.hyper.get("alpha", STEP) if program.personalize is not None else STEP
    batch = federation.program.batch
    setting = Setting(
        alpha=own if alpha is None else alpha,
        beta=program.hyper.get("lr", STEP),
        tau=max(1, federation.program.steps),
        inner=batch,
        outer=batch,
        hessian=batch,
        fraction=federation.round.fraction,
        users=count,
    )
    rows = partition(federation, dataset, count)
    seed = federation.federation.seed
    report = examine(
        Losses(Objective.of(whole), _tensors(spec.weights, weights)),
        Shards(dataset, shuffled(rows, most=samples, seed=seed)),
        histograms(dataset.train_y, rows, dataset.classes),
        setting,
        curved=users,
        seed=seed,
        told=told,
    )
    where = str(weights) if weights else "initial weights"
    title = f"{spec.name} ({where}) on {dataset.name}, {count} users, partition {federation.data.partition}"
    return title, report


def _tensors(initial: dict[str, Tensor], path: Path | None) -> dict[str, Tensor]:
    """The weights in ``path``; ConfigError if they are not those of the model."""
    import torch

    from edgefl.wire import tensors
    from edgefl.wire.errors import ConfigError, ProtocolError

    if path is None:
        return initial
    try:
        arrays = tensors.load(path.read_bytes())
    except (FileNotFoundError, ProtocolError) as error:
        raise ConfigError(
            f"{path} holds no weights ({error}); a run leaves model.safetensors in its folder", path=str(path)
        ) from error
    wrong = [n for n, t in initial.items() if n not in arrays or tuple(arrays[n].shape) != tuple(t.shape)]
    if wrong:
        raise ConfigError(
            f"{path} holds weights of another model than the federation's: {wrong[0]} is missing or of another shape; give "
            "the federation file that it was trained with",
            path=str(path),
        )
    return {name: torch.from_numpy(arrays[name].copy()) for name in initial}


def _notes(report: HeterogeneityReport) -> list[str]:
    setting = report.setting
    return [
        f"alpha {setting.alpha:g}, beta {setting.beta:g}, tau {setting.tau}, batches of {setting.inner}. Hessians of "
        f"{len(report.curvature.users)} of {len(report.counts)} users (numbers "
        f"{', '.join(map(str, report.curvature.users))}), f averaged over these.",
        "Label distances compare class frequencies; they are those of the data where users share the inputs of a class, and "
        "a lower bound elsewhere. Constants are local estimates along one inner step from this model.",
    ]
