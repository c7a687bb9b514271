"""``python -m benchmarks NAME``: each command is one module, imported when it is called."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import typer

from edgefl.cli import interrupts, reported_errors
from edgefl.cli.options import help_of

COMMANDS = {
    "train-step": "train_step.command:train_step",
    "web": "web:web",
    "memory": "memory:memory",
    "submodels": "submodels:submodels",
    "footprint": "footprint:footprint",
    "algorithms": "algorithms:algorithms",
    "encode": "encode:encode",
    "aggregate": "aggregate:aggregate",
    "round": "round:round_time",
    "evaluation": "evaluation:evaluation_round",
    "fleet": "fleet.command:fleet",
    "load": "load.command:load",
    "coordinator": "coordinator:coordinator",
    "simulate": "simulate:simulate",
    "buffered": "buffered:buffered",
    "personal-layers": "personal_layers:personal_layers",
    "mirror": "mirror:mirror",
    "dashboard": "dashboard:dashboard",
    "models": "models.command:models",
    "faults": "faults:faults",
    "fuzz": "fuzz:fuzz",
    "peer": "peers:peer",
}
"""By command: its module below this package, and its function."""

_HELP = """
Measure speed, memory and size on this machine, on real processes.

Examples:

  python -m benchmarks memory --json

  python -m benchmarks train-step --model resnet20 --batch 32 --json

  python -m benchmarks aggregate --codec fedbat --json

  python -m benchmarks train-step --help
"""


def command_line(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands. Imports their modules, most of which load torch."""
    return _with({name: _command(name) for name in names})


def overview() -> typer.Typer:
    """Return the command line for its help alone: commands without options, read from the sources without torch."""
    return _with({name: _stub(name) for name in COMMANDS})


def _with(commands: dict[str, Callable[..., None]]) -> typer.Typer:
    app = typer.Typer(
        help=_HELP,
        callback=lambda: None,
        no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"]},
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for name, command in commands.items():
        app.command(name, help=help_of(command))(command)
    return app


def _command(name: str) -> Callable[..., None]:
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[..., None] = getattr(import_module(f"benchmarks.{module}"), function)
    return command


def _stub(name: str) -> Callable[..., None]:
    """Return a command with the docstring of ``name`` and no options."""
    module, _, function = COMMANDS[name].partition(":")
    source = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    (node,) = (
        each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef) and each.name == function
    )

    def command() -> None:
        pass

    command.__doc__ = ast.get_docstring(node)
    return command


def main() -> None:
    """Run the command that the first argument names."""
    called = sys.argv[1:2]
    with interrupts.exit_on_interrupt(), reported_errors(lambda: command_line(called)):
        app = command_line(called) if called and called[0] in COMMANDS else overview()
        app(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
