"""``python -m benchmarks``, from a clone of the repository."""

from __future__ import annotations

import typer

from benchmarks.cli import codecs, fleet, load, measure, models, simulate, train_step
from edgefl.cli import interrupts, reported_errors
from edgefl.cli.options import help_of

_HELP = """
Measure speed, memory and size on this machine, on real processes.

Examples:

  python -m benchmarks memory --json

  python -m benchmarks round --devices 16 --json

  python -m benchmarks train-step --model resnet20 --batch 32 --json

  python -m benchmarks submodels --model resnet18 --json

  python -m benchmarks aggregate --codec fedbat --json

  python -m benchmarks encode --codec fedbat --json

  python -m benchmarks algorithms --json

  python -m benchmarks models --library plain

  python -m benchmarks footprint --json

  python -m benchmarks mirror --bytes 2GiB --json

  python -m benchmarks buffered --json

  python -m benchmarks web --json

  python -m benchmarks peer flower
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (
    measure.memory,
    measure.round,
    measure.submodels,
    measure.footprint,
    codecs.aggregate,
    codecs.encode,
    codecs.algorithms,
    fleet.dashboard,
    fleet.faults,
    fleet.fuzz,
    fleet.fleet,
    fleet.coordinator,
    fleet.mirror,
    models.models,
    simulate.peer,
    simulate.simulate,
    simulate.buffered,
    train_step.train_step,
    train_step.web,
    load.load,
):
    app.command(help=help_of(command))(command)

if __name__ == "__main__":
    with interrupts.exit_on_interrupt(), reported_errors(lambda: app):
        app(prog_name="python -m benchmarks")
