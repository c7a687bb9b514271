"""``edgefl bench programs``: what a round of each program costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.output import errors, progress

if TYPE_CHECKING:
    from edgefl.bench.programs.rows import ProgramRow


def programs(
    program: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="a program of `edgefl ls programs`, path/to/file.py:factory, or an optimizer of `edgefl ls optimizers`, "
            "which is fedavg with it at the server and takes server_lr; may be repeated; default: all",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="a model of `edgefl ls models`")] = "cnn",
    batch: Annotated[int, typer.Option(min=1, help="samples per local step")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="local steps")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="samples of the device")] = 320,
    threads: Annotated[int, typer.Option(min=1, help="threads of the engine; a device's default is 1")] = 1,
    repeat: Annotated[int, typer.Option(min=0, help="blocks of timed steps per program; 0: counts only")] = 3,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE of the model, values as in JSON; may be repeated", metavar="KEY=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")] = False,
) -> None:
    """Measure the cost of a round on a device for each program, compared with the specifications of the papers.

    One device goes through the program's exchanges in torch: gradients on a batch per local step and per round (and
    Hessian-vector products), floats up, down, kept between rounds and held in training, each for every parameter of the
    model. Moving statistics travel, too, and count as what they are: a model without batch norm gives whole numbers. The
    exported step is timed on the device's engine, by turns with FedAvg's, each in a process of its own. Spec is what the
    specification says of the same: gradients | up down kept.

    Examples:

      edgefl bench programs --json

      edgefl bench programs --program fafed --program per_fedavg:mode=hf --model cnn --batch 50

      edgefl bench programs --repeat 0      (no times)
    """

    from edgefl.bench.programs.rows import ProgramSettings, build, everything, measure
    from edgefl.cli.bench.report import report
    from edgefl.cli.options import model_options
    from edgefl.wire.errors import EdgeflError

    options = model_options(option or ())
    settings = ProgramSettings(batch, steps, samples, repeat, threads, options)
    spec = build(model, settings)
    rows: list[ProgramRow] = []
    failed = []
    with progress() as tell:
        for name in program or everything():
            try:
                program_rows = measure(spec, name, settings, tell)
            except EdgeflError as error:  # the other programs are worth measuring all the same
                failed += [error] if program else []  # of all programs, some are for other models
                word = "error" if program else f"left out {name}"
                errors.print(f"{word}: {error.message}", style="red", soft_wrap=True)
                continue
            rows += program_rows
            for row in program_rows:
                errors.print(_line(row), soft_wrap=True)
    title = f"programs: {model}, batch {batch}, {steps} steps; per parameter of {rows[0].parameters if rows else 0:,}"
    report("programs", title, rows, _columns, as_json, failed)


def _line(row: ProgramRow) -> str:
    """What a run that is cut short leaves."""
    time = "" if row.step_ms is None else f", step {row.step_ms:g} ms, {row.step_ratio:g} of FedAvg's"
    return (
        f"{row.program}, {row.exchange}: {_derivatives(row)} per step, {row.up:g} up, {row.down:g} down, {row.kept:g} kept"
        f"{time}; {_beside(row)}"
    )


def _derivatives(row: ProgramRow) -> str:
    return f"{row.gradients_per_step}" + (f"+{row.products_per_step} HVP" if row.products_per_step else "")


def _beside(row: ProgramRow) -> str:
    if row.as_spec is None:
        return "no figures specified"
    return f"{'as' if row.as_spec else 'NOT as'} specified: {row.spec}"


def _columns(row: ProgramRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "program": row.program if row.exchange == "round" else f"{row.program}, {row.exchange}",
        "grad": _derivatives(row),
        "up": f"{row.up:g}",
        "down": f"{row.down:g}",
        "kept": f"{row.kept:g}",
        "state": f"{row.state:g}",
        "ms": "-" if row.step_ms is None else row.step_ms,
        "ratio": "-" if row.step_ratio is None else f"{row.step_ratio:.2f}",
        "spec": f"{row.spec}{'' if row.as_spec is not False else ' (!)'}",
    }
