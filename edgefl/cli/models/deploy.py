"""``edgefl deploy``: a submodel of any size, cut from a trained model, as one ONNX file for inference."""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgefl.cli.output import console, print_json, print_table, progress
from edgefl.cli.paths import existing, writable_file
from edgefl.system.sizes import size
from edgefl.wire.metric_text import number

if TYPE_CHECKING:
    from edgefl.lab.deployment import BnEval

BnEvals = StrEnum("BnEvals", ["frozen", "batch", "moving"])


def deploy(
    weights: Annotated[
        Path,
        typer.Option(
            callback=existing,
            help="the trained model: folder of a run or simulation, its model.safetensors, or a checkpoint",
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="the federation file; default: the one in the folder of the weights")
    ] = None,
    tier: Annotated[str | None, typer.Option(help="cut as this tier of the federation")] = None,
    kind: Annotated[
        str | None, typer.Option(help="a kind of `edgefl ls kinds`; default: the whole model")
    ] = None,
    gamma: Annotated[str | None, typer.Option(help="share of the parameters, like 0.1 or 1/16; any")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="option of the kind as in a federation file, like 'min_keep=4'; may be repeated"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(callback=existing, help="folder with the dataset's standard files")
    ] = None,
    out: Annotated[Path, typer.Option(callback=writable_file, help="the ONNX file")] = Path("model.onnx"),
    bn_eval: Annotated[
        BnEvals,
        typer.Option(
            help="statistics of batch norm: frozen, estimated for this submodel; batch, of each batch; moving, as trained"
        ),
    ] = BnEvals.frozen,
    batch: Annotated[int, typer.Option(min=1, help="samples that go through at a time")] = 1,
    samples: Annotated[
        int | None,
        typer.Option(min=0, help="most samples for the statistics; 0: all of them", show_default="5000"),
    ] = None,
    compact: Annotated[
        bool,
        typer.Option("--compact", help="without the channels that the cut has emptied; computes the same"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Cut a submodel out of a trained model and write it as one ONNX file for inference: weights inside, samples in, logits
    out.

    The size need not have been trained. Batch norm gets statistics of this submodel, estimated in one pass over training
    samples, or over test samples where the server has no others; --bn-eval moving keeps those of training. The whole model
    keeps them too, if all tiers are of kind output_side. The file is compared with torch on test samples; a JSON file of the
    same name describes it. Its accuracy is printed beside the whole model's.

    Examples:

      edgefl deploy --weights runs/x/model.safetensors --kind importance --gamma 0.1 --compact --out phone.onnx

      edgefl deploy --weights runs/x/model.safetensors --tier weak --out weak.onnx --json

      edgefl deploy --weights runs/x/model.safetensors --kind width --gamma 1/16 --bn-eval batch --batch 500
    """

    share, options = _share(gamma), _options(option or [])
    _check(config, weights, tier, kind, options)  # torch, which all that follows loads, takes seconds
    from edgefl.api.deploy import deploy as deployed
    from edgefl.contract.choice import SubmodelChoice
    from edgefl.lab.deployment import checked_file

    file = checked_file(out)
    with progress("cutting and exporting the model"):
        made = deployed(
            weights,
            SubmodelChoice(kind) if kind else None,
            tier=tier,
            gamma=share,
            options=options,
            federation=config,
            data=data,
            bn_eval=cast("BnEval", bn_eval.value),
            batch=batch,
            **({} if samples is None else {"samples": samples}),
            compact=compact,
        )
    made.save(file)
    facts = {"file": str(file)} | dict(made.facts)
    if as_json:
        print_json(facts)
    else:
        _print(facts, file.with_suffix(".json"))


def _check(
    config: Path | None, weights: Path, tier: str | None, kind: str | None, options: dict[str, Any]
) -> None:
    """Raise ConfigError for a name that is in no catalog, and for a tier that the federation file lacks."""
    from edgefl.config.names import name_problems
    from edgefl.config.nearest import nearest
    from edgefl.config.reading import checked
    from edgefl.wire.errors import ConfigError

    if kind and (problems := name_problems({"tiers": {kind: {"kind": kind, "options": options}}})):
        raise ConfigError("; ".join(problem.removeprefix(f"tiers.{kind}.") for problem in problems))
    folders = [weights] if weights.is_dir() else list(weights.resolve().parents)[:2]
    beside = (folder / name for folder in folders for name in ("run.toml", "config.toml"))
    config = config or next((path for path in beside if path.is_file()), None)
    tiers = checked(config).tiers if config else {}
    if tier and tiers and tier not in tiers:
        raise ConfigError(
            f"{config} has no tier {tier!r}; it has {', '.join(tiers)}{nearest(tier, tiers)}", tier=tier
        )


def _share(text: str | None) -> float | None:
    from fractions import Fraction

    from edgefl.wire.errors import ConfigError

    try:
        share = None if text is None else float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ConfigError(f"--gamma is a share such as 0.1 or 1/16, found {text!r}", gamma=text) from error
    if share is not None and not 0.0 < share <= 1.0:
        raise ConfigError(f"--gamma lies in (0, 1], found {text}", gamma=text)
    return share


def _options(texts: list[str]) -> dict[str, Any]:
    from edgefl.config.toml import parse_toml
    from edgefl.wire.errors import ConfigError

    try:
        return parse_toml("\n".join(texts))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--option is KEY=VALUE as TOML writes it (text in quotes), found {', '.join(texts)}: {error}",
            option=texts,
        ) from error


def _print(facts: dict[str, Any], beside: Path) -> None:
    metric = facts["metric"]
    row = {
        "size": size(facts["bytes"]),
        "parameters": facts["parameters"],
        "nonzero": facts["nonzero"],
        metric: number(metric, facts[metric], 2),
        "whole model": number(metric, facts[f"whole_{metric}"], 2),
        "error": f"{facts['max_rel_error']:.1e}",
    }
    print_table(f"{facts['model']} on {facts['data']}", [row])
    console.print(f"{facts['file']}; how to feed it: {beside}")
