"""``edgefl check``: check whether a model can be trained on devices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.api.progress import reporting
from edgefl.cli.options import Engines, ModelOptions, existing
from edgefl.cli.output import console, print_json, print_table
from edgefl.errors import ConfigError
from edgefl.system.forks import processes_for
from edgefl.system.memory import uncollected_objects
from edgefl.system.sizes import GIB, size

if TYPE_CHECKING:
    from edgefl.api.check import Verdict


def check(
    model: Annotated[
        str, typer.Argument(help="file.py:factory, package.module:factory or a model of `edgefl ls models`")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="whose samples it is for: a dataset's name, its .npz or .csv, or a device's file or folder"
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="column of a .csv or .jsonl that holds the classes; default: label")
    ] = None,
    option: ModelOptions = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="NAME[:KEY=VALUE,...] or FILE.py:FUNCTION; default: the model's own, or the one that fits"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=2, help="rows of a step")] = 8,
    engine: Engines = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object: ok, problem, units, engines, ...")
    ] = False,
) -> None:
    """Try whether a model can be trained on devices.

    It is traced, cut and exported as it comes; each engine runs steps, which are compared with torch.

    Exit code 0: it can be trained on all of them. 1: it cannot, and the verdict says why, with the line of your code and the
    smallest change that helps.

    Examples:

      edgefl check mymodel.py:make --data mine.npz

      edgefl check mymodel.py:make --option classes=5 --option 'sample_shape=[3,32,32]' --engine onnx

      edgefl check resnet20 --json
    """

    from edgefl.api.check_data import samples_of
    from edgefl.config.reading import check_names
    from edgefl.setup.federation_options import FederationOptions, parse_loss, parse_options

    options = parse_options(option or ())
    if label is not None and not (data or "").lower().endswith((".csv", ".jsonl")):
        raise ConfigError(
            "--label names a column: give the .csv or .jsonl that has it by --data, or leave it out"
        )
    table = None if loss is None else parse_loss(loss)
    where = {} if data is None or Path(data).exists() else _place_of(data)
    # torch, which all that follows loads, takes seconds
    settings = FederationOptions(model=model, model_options=option or (), loss=loss).settings
    check_names(None, settings | where)
    samples = None if data is None else samples_of(data, label)
    layout: dict[str, Any] = {}
    if ":" in model and data is None:
        layout = _layout(options)
    with reporting(f"{model}: building the model") as say:
        with uncollected_objects():
            from edgefl.setup.torch_start import load_export, without_dynamo

            load_export() if ":" in model else without_dynamo()
            from edgefl import Model
            from edgefl import check as checked
            from edgefl.contract.choice import LossChoice
        verdict = checked(
            Model(model, options=options, **layout),
            data=samples,
            loss=None if table is None else LossChoice(**table),
            batch=batch,
            engines=[each.value for each in engine or ()],
            progress=say,
            processes=processes_for(2 * GIB),
        )
    if as_json:
        print_json({"ok": verdict.ok, **asdict(verdict)})
    else:
        _print(verdict)
    raise typer.Exit(0 if verdict.ok else 1)


def _place_of(data: str) -> dict[str, object]:
    """Return the setting by key that selects ``data``, the name of a dataset.

    Raises:
        DataError: if it looks like a path.
    """
    if Path(data).suffix or len(Path(data).parts) > 1:
        existing(Path(data))
    return {"data.name": data}


_LAYOUT = {"sample": "sample_shape", "classes": "classes"}
"""What the API takes apart from a factory's options."""


def _layout(options: dict[str, Any]) -> dict[str, Any]:
    """Remove ``sample_shape`` and ``classes`` from ``options``, and return them as keyword arguments.

    Raises:
        ConfigError: if one of the two is missing.
    """
    if missing := [name for name in _LAYOUT.values() if name not in options]:
        raise ConfigError(
            f"a model of your own needs --data, or the shape of a sample and the number of classes; found no {missing[0]}: "
            "add --option 'sample_shape=[1,28,28]' --option classes=10, with your numbers",
            missing=missing,
        )
    return {key: options.pop(name) for key, name in _LAYOUT.items()}


def _print(verdict: Verdict) -> None:
    rows = [
        {
            "engine": each.engine,
            "bundle": size(each.nbytes),
            "step": f"{each.step_ms:.1f} ms",
            "largest error": f"{each.max_rel_error:.1e}",
        }
        for each in verdict.engines
        if not each.problem
    ]
    if rows:
        title = f"{verdict.model}: {verdict.parameters:,} parameters, {verdict.loss}, units {', '.join(verdict.units)}"
        print_table(title, rows)
    console.print(str(verdict))
