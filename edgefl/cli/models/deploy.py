"""``edgefl deploy``: a submodel of any size, cut from a trained model, as one file for inference."""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgefl.api.progress import reporting
from edgefl.cli.options import existing, writable_file
from edgefl.cli.output import console, print_json, print_table
from edgefl.errors import ConfigError, ExportError
from edgefl.system.memory import uncollected_objects
from edgefl.system.sizes import size
from edgefl.wire.text import metric_value
from edgefl_export.deploy.target import files_of, refuse_existing, target_of

if TYPE_CHECKING:
    from edgefl.lab.deployment import BnEval

BnEvals = StrEnum("BnEvals", ["frozen", "batch", "moving"])
Quantizations = StrEnum("Quantizations", ["none", "int8", "float16"])
Backends = StrEnum("Backends", ["xnnpack", "portable"])


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
    gamma: Annotated[str | None, typer.Option(help="share of the parameters, like 0.1 or 1/16")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="option of the kind as in a federation file, like 'min_keep=4'; may be repeated",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(callback=existing, help="folder with the dataset's standard files")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            callback=writable_file,
            help="the file: .onnx; .pte for ExecuTorch; .safetensors for torch, with a loader",
        ),
    ] = Path("model.onnx"),
    force: Annotated[bool, typer.Option("--force", help="replace existing files")] = False,
    bn_eval: Annotated[
        BnEvals,
        typer.Option(
            help="statistics of batch norm: frozen, estimated for this submodel; batch, of each batch; moving, as trained"
        ),
    ] = BnEvals.frozen,
    batch: Annotated[int, typer.Option(min=1, help="samples of one call")] = 1,
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="any number of samples in one call")
    ] = False,
    quantize: Annotated[
        Quantizations,
        typer.Option(
            help="int8, calibrated on training samples, or on test samples if there are none; float16"
        ),
    ] = Quantizations.none,
    with_preprocessing: Annotated[
        bool,
        typer.Option(
            "--with-preprocessing",
            help="resizing, channel order and scale of images, log-mels of sounds, mean and deviation of columns inside "
            "the file",
        ),
    ] = False,
    opset: Annotated[
        int | None, typer.Option(help="opset of an .onnx file", show_default="18, for ONNX Runtime 1.14")
    ] = None,
    backend: Annotated[
        Backends,
        typer.Option(help="kernels of a .pte file: XNNPACK, and portable ones for the rest; portable alone"),
    ] = Backends.xnnpack,
    samples: Annotated[
        int | None,
        typer.Option(
            min=0, help="maximum number of samples for the statistics; 0: all of them", show_default="5000"
        ),
    ] = None,
    compact: Annotated[
        bool,
        typer.Option("--compact", help="without the channels that the cut has emptied; computes the same"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Write a trained model, or a submodel of it, for inference.

    It is one file: weights inside, samples in, logits out.

    The suffix of --out decides the format: .onnx, .pte (ExecuTorch) or .safetensors. The file is loaded by its stock
    runtime and compared with torch on test samples. Its own metadata and a JSON file of the same name describe inputs,
    preprocessing and classes. Existing files are refused without --force.

    The size need not have been trained. Batch norm gets statistics of this submodel, estimated in one pass over training
    samples, or over test samples where the server has no others; --bn-eval moving keeps those of training. The whole model
    keeps them too, if all tiers are of kind output_side.

    The accuracy printed is measured from the file, beside the whole model's and that before quantization; latency (median
    of one call) and peak memory are measured in its runtime on this machine.

    Examples:

      edgefl deploy --weights runs/x/model.safetensors --kind importance --gamma 0.1 --compact --out phone.onnx

      edgefl deploy --weights runs/x/model.safetensors --tier weak --out weak.onnx --json

      edgefl deploy --weights runs/x --out model.pte --quantize int8

      edgefl deploy --weights runs/x --with-preprocessing --dynamic-batch --out model.onnx
    """

    share, options = _share(gamma), _options(option or [])
    wishes: dict[str, Any] = {
        "batch": batch,
        "dynamic_batch": dynamic_batch,
        "quantize": quantize.value,
        "opset": opset,
        "backend": backend.value,
        "preprocessing": with_preprocessing,
    }
    target = target_of(out, **wishes)
    files = files_of(out)
    if not force:
        refuse_existing(files)
    from edgefl_export.deploy.measuring import FileMeasurement

    trained = weights / "model.safetensors" if weights.is_dir() else weights
    if trained.resolve() in [file.resolve() for file in files]:
        raise ConfigError(f"--out is the trained model {trained}: choose another file", path=str(trained))
    _check(config, weights, tier, kind, options)  # torch, which all that follows loads, takes seconds
    with FileMeasurement(target) as measurement:  # its process loads the runtime meanwhile
        from edgefl.setup.torch_start import load_export

        with uncollected_objects():
            load_export()
            from edgefl.api.deploy import DeployOptions
            from edgefl.api.deploy import deploy as deployed
            from edgefl.contract.choice import SubmodelChoice

        made = deployed(
            weights,
            SubmodelChoice(kind or "", options) if kind or options else None,
            tier=tier,
            gamma=share,
            federation=config,
            data=data,
            bn_eval=cast("BnEval", bn_eval.value),
            options=DeployOptions(format=target.format, compact=compact, **wishes),
            **({} if samples is None else {"samples": samples}),
        )
        made.save(out, force=force)
        failure = None
        try:
            with reporting("measuring the file"):
                made = made.measured(measurement, out)
            made.save_facts(out)
        except ExportError as error:
            failure = ExportError(f"{out} is written, but not measured: {error.message}")
    facts = {"file": str(out)} | dict(made.facts)
    if as_json:
        print_json(facts)
    else:
        _print(facts, files)
    if failure:
        raise failure


def _check(
    config: Path | None, weights: Path, tier: str | None, kind: str | None, options: dict[str, Any]
) -> None:
    """Check names before torch is loaded.

    Raises:
        ConfigError: for an unknown kind or option, and for a tier that the federation file lacks.
    """
    from edgefl.config.names import name_problems
    from edgefl.config.reading import checked
    from edgefl.wire.text import suggest

    if kind and (problems := name_problems({"tiers": {kind: {"kind": kind, "options": options}}})):
        raise ConfigError("; ".join(problem.removeprefix(f"tiers.{kind}.") for problem in problems))
    folders = [weights] if weights.is_dir() else list(weights.resolve().parents)[:2]
    beside = (folder / name for folder in folders for name in ("run.toml", "config.toml"))
    config = config or next((path for path in beside if path.is_file()), None)
    tiers = checked(config).tiers if config else {}
    if tier and tiers and tier not in tiers:
        raise ConfigError(
            f"{config} has no tier {tier!r}; it has {', '.join(tiers)}{suggest(tier, tiers)}", tier=tier
        )


def _share(text: str | None) -> float | None:
    from fractions import Fraction

    try:
        share = None if text is None else float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ConfigError(f"--gamma is a share such as 0.1 or 1/16, found {text!r}", gamma=text) from error
    if share is not None and not 0.0 < share <= 1.0:
        raise ConfigError(f"--gamma lies in (0, 1], found {text}", gamma=text)
    return share


def _options(texts: list[str]) -> dict[str, Any]:
    from edgefl.config.text import parse_toml

    try:
        return parse_toml("\n".join(texts))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--option is KEY=VALUE as TOML writes it (text in quotes), found {', '.join(texts)}: {error}",
            option=texts,
        ) from error


def _print(facts: dict[str, Any], files: tuple[Path, ...]) -> None:
    metric = facts["metric"]
    before = f"unquantized_{metric}"
    row = {
        "size": size(facts["bytes"]),
        "parameters": facts["parameters"],
        metric: metric_value(metric, facts[metric], 2),
        **({"unquantized": metric_value(metric, facts[before], 2)} if before in facts else {}),
        "whole": metric_value(metric, facts[f"whole_{metric}"], 2),
        "error": f"{facts['max_rel_error']:.1e}",
    }
    if "latency_ms" in facts:
        row |= {"latency": f"{facts['latency_ms']:.3g} ms", "memory": size(facts["peak_bytes"])}
    print_table(f"{facts['model']} on {facts['data']}", [row])
    for note in facts.get("notes", ()):
        console.print(f"note: {note}")
    runtime = facts["runtime"]
    console.print(
        f"{facts['file']} for {runtime['name']} {runtime['least']} or later; how to feed it: {files[1]}"
    )
    for loader in files[2:]:
        console.print(f"{loader} loads it: load()")
