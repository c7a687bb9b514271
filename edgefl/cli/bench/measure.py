"""``edgefl bench``: measure on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgefl.cli.bench import codecs as bench_codecs
from edgefl.cli.bench import footprint as bench_footprint
from edgefl.cli.bench import models as bench_models
from edgefl.cli.bench import peer as bench_peer
from edgefl.cli.bench import programs as bench_programs
from edgefl.cli.bench.report import print_rows
from edgefl.cli.options import Engine, model_options
from edgefl.cli.output import errors, print_table, progress
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.bench.memory.rows import MemoryRow
    from edgefl.bench.submodels import SubmodelRow
    from edgefl.bench.train_step.rows import StepRow

Match = StrEnum("Match", ["parameters", "macs"])

_HELP = """
Measure speed, memory and size on this machine, on real processes.

Examples:

  edgefl bench memory --json

  edgefl bench round --devices 16 --json

  edgefl bench train-step --model resnet20 --batch 32 --json

  edgefl bench submodels --model resnet18 --json

  edgefl bench aggregate --codec fedbat --json

  edgefl bench encode --codec fedbat --json

  edgefl bench programs --json

  edgefl bench models --library plain

  edgefl bench footprint --json

  edgefl bench peer flower
"""
_SUBMODELS = """
What each kind of submodel costs a device at matched parameter counts.

For each kind and gamma: parameters, MACs, bytes down and up, and on the device's engine, in fresh processes, the peak
memory and the time of a training step, beside the memory that `edgefl plan` predicts. A kind without gamma takes the
cut whose parameters are nearest. ResNet-18 takes some ten minutes; a row is told on stderr as soon as it is measured.

Examples:

  edgefl bench submodels --json

  edgefl bench submodels --model resnet20 --kind width --kind importance --gamma 0.25 --steps 3
"""
_TRAIN_STEP = """
One training step: an exported graph on the device's engine beside torch eager.

Each engine trains in a fresh process, by turns with the others, in blocks of equally many steps. Torch's side is the
model as people write it: torch's own layers, `backward`, `torch.optim.SGD`. Times are medians and minima over all
counted steps. Memory is the peak of resident memory over the same process with its library imported and nothing run:
what torch or onnxruntime load when they are first used counts as what training takes. A model's row is told on stderr
as soon as it is measured. The numbers can stand beside the retired onnxruntime-training, which needs an environment of
its own: `edgefl bench peer ort-training` makes one and prints its interpreter.

With `--et-training` they can stand beside ExecuTorch's own, experimental training export (loss and gradients only), too: it
takes minutes to export and, with convolutions, many seconds a step, of which two are timed after the others are done.

Examples:

  edgefl bench train-step --model resnet20 --batch 32 --target onnx --json

  edgefl bench train-step --model resnet20 --memory-budget 50% --json

  edgefl bench train-step --model bert --lengths 16,64,128      (what a padded batch costs by its bucket)

  edgefl bench train-step --model resnet20 --target executorch --json

  edgefl bench train-step --model resnet20 --target executorch --et-training --json

  edgefl bench train-step --model cnn --model bert --threads 2 --ort-training "$(edgefl bench peer ort-training)"
"""
_Json = Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help=_HELP, no_args_is_help=True)
    group.command("memory")(memory)
    group.command("round")(round_)
    group.command("train-step", help=_TRAIN_STEP)(train_step)
    group.command("submodels", help=_SUBMODELS)(submodels)
    bench_codecs.register(group)
    bench_footprint.register(group)
    bench_models.register(group)
    bench_peer.register(group)
    bench_programs.register(group)
    app.add_typer(group, name="bench")


def memory(
    model: Annotated[str, typer.Option(help="a model with preset tiers")] = "resnet20",
    batch: Annotated[int, typer.Option(min=1, help="samples per local step")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="local steps")] = 10,
    repeat: Annotated[int, typer.Option(min=1, help="repetitions, each with fresh processes")] = 3,
    engine: Annotated[
        list[Engine] | None, typer.Option(help="may be repeated; default: those that are installed")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Peak memory of an agent in training over the same agent idle, per engine and tier."""
    from edgefl.bench.memory.rows import engines, measure

    rows = []
    with progress() as tell:
        for name in [each.value for each in engine] if engine else engines():
            tell(f"{name}: training one round per tier and repetition")
            rows += measure(model=model, batch=batch, steps=steps, repeat=repeat, engine=name)
    if as_json:
        print_rows("memory", rows, as_json)
    else:
        print_table("peak memory in training, over the idle agent", [_memory_columns(row) for row in rows])


def round_(
    devices: Annotated[int, typer.Option(min=1, help="device processes")] = 16,
    model: Annotated[str, typer.Option(help="model whose weights are moved")] = "resnet20",
    rounds: Annotated[int, typer.Option(min=2, help="rounds; the first is not counted")] = 8,
    broker: Annotated[
        str, typer.Option(help="auto (mosquitto where it is installed), mosquitto or amqtt")
    ] = "auto",
    as_json: _Json = False,
) -> None:
    """Time of a round in which devices return their weights at once."""
    from edgefl.bench.round_time import measure

    kind = ("mosquitto" if shutil.which("mosquitto", path=_PATH) else "amqtt") if broker == "auto" else broker
    with progress(f"{rounds} rounds with {devices} devices"):
        row = measure(devices=devices, model=model, rounds=rounds, broker=kind)
    print_rows("round", [row], as_json)


def train_step(
    model: Annotated[
        list[str] | None, typer.Option(help="a model of `edgefl ls models`, may be repeated; default: eight")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    target: Annotated[Engine, typer.Option(help="what is exported and measured")] = Engine.onnx,
    threads: Annotated[int, typer.Option(min=1, help="threads of every engine; a device's default is 1")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="blocks of steps per engine")] = 5,
    tier: Annotated[str, typer.Option(help="the part that is trained; strong is all")] = "strong",
    lengths: Annotated[
        str, typer.Option(metavar="N,N", help="of sequences: the model's is the largest, and a row for each")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the model, values as in JSON; may be repeated")
    ] = None,
    ort_training: Annotated[
        str, typer.Option(metavar="PYTHON", help="interpreter of an environment with onnxruntime-training")
    ] = "",
    et_training: Annotated[
        bool,
        typer.Option("--et-training", help="ExecuTorch's own training export too; takes minutes"),
    ] = False,
    memory_budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE|PERCENT", help="as of `edgefl export`, like 64MiB; % of what is estimated without"
        ),
    ] = "",
    as_json: _Json = False,
) -> None:
    from edgefl.bench.train_step.rows import MODELS, TrainStepSettings, measure
    from edgefl.wire.errors import EdgeflError
    from exporters.memory.recompute import Budget

    settings = TrainStepSettings(
        batch=batch,
        target=target.value,
        threads=threads,
        repeat=repeat,
        tier=tier,
        options=model_options(option or ()) | _whole_length(lengths),
        ort_training=ort_training,
        et_training=et_training,
        memory_budget=Budget.parse(memory_budget) if memory_budget else None,
    )
    rows, failed = [], []
    with progress() as tell:
        for name, length in product(model or MODELS, _shorter(lengths)):
            try:
                rows.append(measure(name, replace(settings, length=length), tell))
                errors.print(_line(rows[-1]), markup=False, highlight=False, soft_wrap=True)
            except EdgeflError as error:  # the other models are worth measuring all the same
                failed.append(error)
                errors.print(
                    f"error: {error.message}", style="red", markup=False, highlight=False, soft_wrap=True
                )
    for row in rows:
        if row.ort_training_error:
            text = f"{row.model}: onnxruntime-training did not run: {row.ort_training_error}"
            errors.print(text, style="yellow", markup=False, highlight=False)
        if row.et_training_error:
            text = f"{row.model}: ExecuTorch's training export did not run: {row.et_training_error}"
            errors.print(text, style="yellow", markup=False, highlight=False)
    if as_json:
        print_rows("train-step", rows, as_json)
    else:
        title = f"train-step: batch {batch}, threads {threads}"
        print_table(title, for_people(rows), _caption(rows))
    if failed:
        raise typer.Exit(failed[0].exit_code)


def submodels(
    model: Annotated[str, typer.Option(help="a model of `edgefl ls models`")] = "resnet18",
    kind: Annotated[
        list[str] | None, typer.Option(help="a kind of submodel, may be repeated; default: all")
    ] = None,
    gamma: Annotated[
        list[str] | None, typer.Option(help="sizes like 1/16 or 0.25, may be repeated; default: 1/64 to 1")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    match: Annotated[
        Match, typer.Option(help="what a size is a share of, for all kinds alike")
    ] = Match.parameters,
    steps: Annotated[int, typer.Option(min=1, help="steps that are timed, after one that is not")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="threads of the engine; a device's default is 1")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the model, values as in JSON; may be repeated")
    ] = None,
    as_json: _Json = False,
) -> None:
    from edgefl.bench.submodels import GAMMAS, SubmodelSettings, build, kinds_of, measure
    from edgefl.bench.submodels import Match as Share
    from edgefl.cli.models.fit import gammas
    from edgefl.wire.errors import EdgeflError

    options = model_options(option or ())
    settings = SubmodelSettings(
        batch=batch, steps=steps, threads=threads, match=cast(Share, match.value), options=options
    )
    spec = build(model, settings)
    rows, failed = [], []
    with progress() as tell:
        for name in kind or kinds_of(spec):
            for share in gammas(gamma or ()) or GAMMAS:
                try:
                    rows.append(measure(spec, name, share, settings, lambda text: tell(f"{model}: {text}")))
                    errors.print(_submodel_line(rows[-1]), markup=False, highlight=False, soft_wrap=True)
                except EdgeflError as error:  # the other sizes are worth measuring all the same
                    failed.append(error)
                    errors.print(
                        f"error: {error.message}", style="red", markup=False, highlight=False, soft_wrap=True
                    )
    if as_json:
        print_rows("submodels", rows, as_json)
    else:
        print_table(f"submodels of {model}: batch {batch}", [_submodel_columns(row) for row in rows])
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _memory_columns(row: MemoryRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    error = row.predicted_error
    return {
        "engine": row.engine,
        "tier": row.tier,
        "peak MB": f"{row.peak_over_idle_bytes / 1e6:.1f}",
        "predicted": "-" if error is None else f"{error:+.0%}",
        "of strong": f"{row.over_strong:.2f}",
        "step ms": row.fastest_step_ms,
        "time ratio": f"{row.time_ratio:.2f}",
        "MB down": f"{row.down_bytes / 1e6:.1f}",
        "MB up": f"{row.up_bytes / 1e6:.1f}",
    }


def _submodel_line(row: SubmodelRow) -> str:
    return (
        f"{row.kind}, {row.size}: {row.parameters:,} parameters, {row.step_ms:g} ms, "
        f"memory {size(row.peak_over_idle_bytes)}, predicted {size(row.predicted_bytes)} ({row.prediction_error:+.1%})"
    )


def _submodel_columns(row: SubmodelRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "submodel": f"{row.kind}, {row.size}",
        "params": f"{row.parameter_share:.1%}",
        "MMAC": f"{row.macs / 1e6:,.1f}",
        "MB down": f"{row.download_bytes / 1e6:.2f}",
        "MB up": f"{row.upload_bytes / 1e6:.2f}",
        "MiB": _mebibytes(row.peak_over_idle_bytes),
        "predicted": f"{row.prediction_error:+.0%}",
        "ms": row.step_ms,
    }


def _lengths(text: str) -> list[int]:
    """``16,64,128`` ascending; ConfigError for anything else."""
    from edgefl.wire.errors import ConfigError

    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise ConfigError(f"--lengths are whole numbers such as 16,64,128, found {text!r}") from error
    if found and found[0] < 1:
        raise ConfigError(f"--lengths begin at 1, found {found[0]}")
    return found


def _whole_length(lengths: str) -> dict[str, Any]:
    """The option of the model: its length is the largest."""
    return {"length": max(found)} if (found := _lengths(lengths)) else {}


def _shorter(lengths: str) -> list[int]:
    """What is measured: each of the lengths, 0 for the model's own."""
    found = _lengths(lengths)
    return [*found[:-1], 0]


def _line(row: StepRow) -> str:
    """What a run that is cut short leaves."""
    return (
        f"{row.model}: {row.ms:g} ms, torch {row.eager_ms:g} ms, ratio {row.ratio:g}, error {row.max_rel_error:.2g}, "
        f"memory {size(row.peak_over_idle_bytes)}, torch {size(row.eager_peak_over_idle_bytes)}"
    )


def for_people(rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """The columns that fit 80 characters, those of the training exports where they ran; ``--json`` has them all."""
    others = any(row.ort_training_ms for row in rows)
    exports = any(row.et_training_ms for row in rows)
    return [
        {
            "model": f"{row.model}, {row.length} tokens" if row.length else row.model,
            "ms": row.ms,
            "eager ms": row.eager_ms,
            **({"ort ms": row.ort_training_ms} if others else {}),
            **({"et ms": row.et_training_ms} if exports else {}),
            "ratio": f"{row.ratio:.2f}",
            "error": f"{row.max_rel_error:.0e}",
            "memory MiB": _mebibytes(row.peak_over_idle_bytes),
            "eager MiB": _mebibytes(row.eager_peak_over_idle_bytes),
            **({"ort MiB": _mebibytes(row.ort_training_peak_over_idle_bytes)} if others else {}),
        }
        for row in rows
    ]


def _mebibytes(count: int | None) -> str:
    from edgefl.system.sizes import mib

    return "-" if count is None else mib(count)


def _caption(rows: Sequence[StepRow]) -> str:
    exports = ", ".join(f"{row.model} {size(row.artifact_bytes)} in {row.export_s:.0f} s" for row in rows)
    return f"exported: {exports}" if rows else ""


_PATH = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/sbin"
