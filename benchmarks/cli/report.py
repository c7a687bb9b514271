"""Options that benches share, and their report: a line for each row on stderr, then a table or JSON."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from edgefl.api.progress import reporting
from edgefl.cli.output import errors, human, print_json, print_table
from edgefl.errors import ConfigError

if TYPE_CHECKING:
    from edgefl.errors import EdgeflError

Case = TypeVar("Case")
Row = TypeVar("Row")
Columns = Callable[[Row], dict[str, Any]]
Json = Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")]
BrokerKind = Annotated[
    str, typer.Option("--broker-kind", help="auto (mosquitto where it is installed), mosquitto or amqtt")
]


def bench(
    name: str,
    title: str,
    cases: Iterable[Case],
    measure: Callable[[Case, Callable[[str], None]], Row],
    columns: Columns[Row],
    as_json: bool,
    line: Callable[[Row], str] | None = None,
) -> list[Row]:
    """Measure each case, report the rows and return them. ``line``: more than the columns, to print at once."""
    rows, failed = measured(cases, measure, columns, line)
    report(name, title, rows, columns, as_json, failed)
    return rows


def measured(
    cases: Iterable[Case],
    measure: Callable[[Case, Callable[[str], None]], Row],
    columns: Columns[Row],
    line: Callable[[Row], str] | None = None,
) -> tuple[list[Row], list[EdgeflError]]:
    """Return a row for each case that can be measured, and the errors of the others. Prints each line at once."""
    from edgefl.errors import EdgeflError

    rows: list[Row] = []
    failed: list[EdgeflError] = []
    with reporting(console=errors) as tell:
        for case in cases:
            try:
                rows.append(measure(case, tell))
                errors.print(line(rows[-1]) if line else as_line(columns(rows[-1])))
            except EdgeflError as error:  # the other cases are worth measuring all the same
                failed.append(error)
                errors.print(f"error: {error.message}", style="red")
    return rows, failed


def check_choice(
    models: Sequence[str] = (),
    options: Sequence[str] = (),
    *,
    codecs: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    tiers: Sequence[str] = (),
) -> None:
    """Raise ConfigError for a name or an option that no catalog has. Loads no torch, which takes seconds."""
    from edgefl.config.reading import check_names, check_tiers
    from edgefl.facts import shipped
    from edgefl.setup.federation_options import FederationOptions, parse_algorithm, parse_named

    for model in models:
        check_tiers(check_names(None, FederationOptions(model=model, model_options=options).settings), tiers)
    if not models:  # those measured by default have the same tiers
        check_tiers(check_names(None, {"model.name": "resnet20"}), tiers)
    for codec in codecs:
        check_names(None, {"codec": parse_named(codec, "codec")})
    for algorithm in algorithms:
        if algorithm.partition(":")[0] not in shipped().optimizers:  # FedAvg with this optimizer
            check_names(None, parse_algorithm(algorithm))


def installed_python(python: str) -> str:
    """Return ``python``; ConfigError unless it is a program, or empty."""
    if python and shutil.which(python) is None:
        raise ConfigError(
            f"there is no Python interpreter {python!r}; give the path of one, such as environment/bin/python "
            "(`python -m benchmarks peer` makes environments)",
            python=python,
        )
    return python


def as_line(columns: dict[str, Any]) -> str:
    """Return what a run that is cut short leaves of a row."""
    return ", ".join(f"{name} {human(value)}" for name, value in columns.items())


def report(
    name: str,
    title: str,
    rows: list[Row],
    columns: Columns[Row],
    as_json: bool,
    failed: Sequence[EdgeflError] = (),
) -> None:
    """Print the rows, then exit with the code of the first failure."""
    if as_json:
        print_rows(name, rows, as_json)
    else:
        print_table(title, [columns(row) for row in rows])
    if failed:
        raise typer.Exit(failed[0].exit_code)


def print_rows(name: str, rows: list[Any], as_json: bool) -> None:
    import msgspec

    from benchmarks.common.machine import machine

    plain = [msgspec.to_builtins(row) for row in rows]
    if as_json:
        print_json({"bench": name, "machine": machine(), "results": plain})
    else:
        print_table(name, plain)


def mebibytes(count: int | None) -> str:
    """For a column; ``-`` where nothing was measured."""
    from edgefl.system.sizes import mib

    return "-" if count is None else mib(count)
