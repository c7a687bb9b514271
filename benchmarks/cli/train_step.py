"""The benchmarks ``train-step``, a step on the device's engine beside torch eager, and ``web``, the same in a browser."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli.report import Json, bench, check_choice, installed_python, measured, mebibytes, print_rows
from edgefl.cli.options import Activations, Engine, ModelOptions, parse_memory_budget
from edgefl.cli.output import errors, print_table
from edgefl.setup.federation_options import parse_options
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from benchmarks.train_step.rows import StepRow
    from benchmarks.web.rows import WebRow


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
    option: ModelOptions = None,
    ort_training: Annotated[
        str,
        typer.Option(
            metavar="PYTHON",
            callback=installed_python,
            help="interpreter of an environment with onnxruntime-training",
        ),
    ] = "",
    et_training: Annotated[
        bool,
        typer.Option("--et-training", help="ExecuTorch's own training export too; takes minutes"),
    ] = False,
    jax: Annotated[
        str,
        typer.Option(
            metavar="PYTHON", callback=installed_python, help="interpreter of an environment with JAX"
        ),
    ] = "",
    onnxsim: Annotated[
        str,
        typer.Option(
            metavar="PYTHON",
            callback=installed_python,
            help="interpreter of an environment with onnxsim and onnxruntime",
        ),
    ] = "",
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile too; needs g++, takes minutes to compile")
    ] = False,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="torch eager on images with channels last too")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="try the variants of the step first, and measure the fastest form")
    ] = False,
    own_form: Annotated[
        bool, typer.Option("--own-form", help="the form that any ONNX runtime runs, not the processor's")
    ] = False,
    memory_budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE|PERCENT,...",
            help="as of `edgefl export`, like 64MiB; % of what is estimated without; a row for each",
        ),
    ] = "",
    activations: Annotated[
        Activations, typer.Option(help="as of `edgefl export`: how values wait for the backward pass")
    ] = Activations.float32,
    as_json: Json = False,
) -> None:
    """One training step: an exported graph on the device's engine beside torch eager.

    Each engine trains in a fresh process, by turns with the others, in blocks of equally many steps. Torch's side is the
    model as people write it: torch's own layers, `backward`, `torch.optim.SGD`. Times are medians and minima over all
    counted steps. Memory is the peak of resident memory over the same process with its library imported and nothing run:
    what torch or onnxruntime load when they are first used counts as what training takes. Each model's row is printed to
    stderr as soon as it is measured. The numbers can be compared with the retired onnxruntime-training, which needs an
    environment of its own: `python -m benchmarks peer ort-training` makes one and prints its interpreter.

    The step has the form that suits the processor's instruction sets, as in `edgefl.train_round`: `variant` names it. With
    `--tune` all forms that the exporter knows for this engine are tried first, as on a device (`edgefl tune`), and the
    fastest is measured. `--own-form` measures the one that any ONNX runtime runs.

    `--compile` also measures torch.compile of the same step, which needs g++ (or what CXX names) and compiles for minutes;
    `--channels-last` has torch eager with images in that layout; `--jax` has the step of a convolutional network in JAX, of
    an environment that `python -m benchmarks peer jax` makes; `--onnxsim` has onnxsim's training loop as well, which has
    gradients for few graphs. The first losses of a model without dropout are compared with torch eager's
    (`*_loss_error`). A failure is reported in the row (`*_error`) and ends nothing.

    With `--et-training` they can be compared with ExecuTorch's own, experimental training export (loss and gradients only),
    too: it takes minutes to export and, with convolutions, many seconds a step, of which two are timed after the others are
    done.

    Examples:

      python -m benchmarks train-step --model resnet20 --batch 32

      python -m benchmarks train-step --model resnet20 --memory-budget 90%,50%

    Sequences of several lengths:

      python -m benchmarks train-step --model bert --lengths 16,64,128      (what a padded batch costs by its bucket)

    ExecuTorch:

      python -m benchmarks train-step --model resnet20 --target executorch --json

      python -m benchmarks train-step --model resnet20 --target executorch --et-training --json

    Other libraries:

      python -m benchmarks train-step --model resnet20 --model cnn --compile --channels-last --json

      python -m benchmarks train-step --model resnet20 --model cnn --jax "$(python -m benchmarks peer jax)"

    The retired onnxruntime-training:

      python -m benchmarks train-step --model cnn --model bert --ort-training "$(python -m benchmarks peer ort-training)"
    """

    tokens = _lengths(lengths)
    for part in memory_budget.split(","):
        parse_memory_budget(part.strip())
    check_choice(model or (), option or (), tiers=(tier,))
    from benchmarks.train_step.anchors import ANCHORS, TrainStepSettings
    from benchmarks.train_step.rows import MODELS, measure
    from edgefl_export.memory.recompute import Budget

    settings = TrainStepSettings(
        batch=batch,
        target=target.value,
        threads=threads,
        repeat=repeat,
        tier=tier,
        options=parse_options(option or ()) | ({"length": tokens[-1]} if tokens else {}),
        ort_training=ort_training,
        et_training=et_training,
        jax=jax,
        onnxsim=onnxsim,
        compile=compiled,
        channels_last=channels_last,
        tune=tune,
        own_form=own_form,
        activations=activations.value,
    )
    budgets = [Budget.parse(part.strip()) for part in memory_budget.split(",")] if memory_budget else [None]
    rows, failed = measured(
        list(product(model or MODELS, [*tokens[:-1], 0], budgets)),
        lambda case, tell: measure(case[0], replace(settings, length=case[1], memory_budget=case[2]), tell),
        columns,
    )
    titles = {name: anchor.title for name, anchor in ANCHORS.items()}
    for row, (name, title) in product(rows, titles.items()):
        if problem := getattr(row, f"{name}_error"):
            text = f"{row.model}: {title} did not run: {problem}"
            errors.print(text, style="yellow")
    if as_json:
        print_rows("train-step", rows, as_json)
    else:
        title = f"train-step: batch {batch}, threads {threads}"
        print_table(title, [columns(row) for row in rows], _caption(rows))
        if others := beside(rows):
            print_table("beside torch eager", others)
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _lengths(text: str) -> list[int]:
    """Parse ``16,64,128``; return the lengths ascending.

    The largest is the model's own; the others are measured as shorter ones.
    """
    from edgefl.errors import ConfigError

    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise ConfigError(f"--lengths are whole numbers such as 16,64,128, found {text!r}") from error
    if found and found[0] < 1:
        raise ConfigError(f"--lengths begin at 1, found {found[0]}")
    return found


_BESIDE = {
    "ort_training": "ort training",
    "et_training": "et training",
    "compile": "compile",
    "jax": "JAX",
    "onnxsim": "onnxsim",
    "channels_last": "channels last",
}


def columns(row: StepRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "model": _name(row) + (f", {row.variant}" if row.variant != "default" else ""),
        "ms": row.ms,
        "eager ms": row.eager_ms,
        "ratio": f"{row.ratio:.2f}",
        "error": f"{row.max_rel_error:.0e}",
        "memory MiB": mebibytes(row.peak_over_idle_bytes),
        "eager MiB": mebibytes(row.eager_peak_over_idle_bytes),
    }


def beside(rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """What ran beside the step and torch eager, each in a row of its own; nothing where nothing did."""
    return [
        {
            "model": _name(row),
            "beside": title,
            "ms": ms,
            "fastest ms": getattr(row, f"{name}_ms_min"),
            "of eager": f"{ms / row.eager_ms:.2f}",
        }
        for row, (name, title) in product(rows, _BESIDE.items())
        if (ms := getattr(row, f"{name}_ms")) is not None
    ]


def _name(row: StepRow) -> str:
    budget = f", {size(row.memory_budget)}" if row.memory_budget else ""
    return (f"{row.model}, {row.length} tokens" if row.length else row.model) + budget


def _caption(rows: Sequence[StepRow]) -> str:
    exports = ", ".join(f"{row.model} {size(row.artifact_bytes)} in {row.export_s:.0f} s" for row in rows)
    return f"exported: {exports}" if rows else ""


def web(
    model: Annotated[
        list[str] | None,
        typer.Option(help="a model with preset tiers, may be repeated; default: resnet20, cnn"),
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="a tier, may be repeated; default: all")] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="threads of WebAssembly, may be repeated; default: 1, and 2, which an isolated page may have; "
            "the native side has one",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="blocks of steps for each side")] = 5,
    as_json: Json = False,
) -> None:
    """A training step in headless Chromium (WebAssembly with SIMD) beside Python's agent, which runs the same graph
    natively on one thread: time and memory, for each tier of ResNet-20 and the CNN, weak to strong.

    Both sides take turns in blocks of equally many steps. It needs Chromium, and the page that `make agents-web` builds.

    Examples:

      python -m benchmarks web --json

      python -m benchmarks web --threads 2 --json

      python -m benchmarks web --model cnn --tier weak --repeat 3
    """

    check_choice(model or (), tiers=tier or ())
    from benchmarks.web.rows import MODELS, cases, measure

    chosen = cases(tuple(model or MODELS), tuple(tier or ()))
    bench(
        "web",
        f"a step in Chromium, batch {batch}",
        [(*case, count) for count in threads or _usual() for case in chosen],
        lambda case, tell: measure(*case[:2], batch=batch, threads=case[2], repeat=repeat, say=tell),
        _web_columns,
        as_json,
    )


def _usual() -> list[int]:
    return [1, 2] if (os.cpu_count() or 1) > 1 else [1]


def _web_columns(row: WebRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "tier": row.tier,
        "threads": row.threads,
        "ms": row.ms,
        "native ms": row.native_ms,
        "ratio": f"{row.ratio:.2f}",
        "memory MiB": mebibytes(row.peak_over_idle_bytes),
        "native MiB": mebibytes(row.native_peak_over_idle_bytes),
        "wasm MiB": mebibytes(row.wasm_bytes),
    }
