"""Results: a row for each case, a line on stderr as soon as it is measured, then a table or one line of JSON.

The line of JSON is ``{"bench": NAME, "machine": {...}, "results": [ROW, ...]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import typer

from benchmarks.machine import machine
from edgefl.api.progress import reporting
from edgefl.cli.output import errors, human, print_json, print_table
from edgefl.errors import EdgeflError
from edgefl.system.sizes import mib

Case = TypeVar("Case")
Row = TypeVar("Row")
Columns = Callable[[Row], dict[str, Any]]


def bench(
    name: str,
    title: str,
    cases: Iterable[Case],
    measure: Callable[[Case, Callable[[str], None]], Row],
    columns: Columns[Row],
    as_json: bool,
    line: Callable[[Row], str] | None = None,
) -> list[Row]:
    """Measure each case, print the rows and return them.

    Args:
        name: name of the benchmark, as its command.
        title: title of the table.
        cases: arguments of ``measure``.
        measure: measures one case; its second argument receives progress as text.
        columns: cells of a row for the table, which fits 80 characters; JSON has all fields.
        as_json: print JSON instead of the table.
        line: text of a row for stderr; default: its columns.

    Raises:
        typer.Exit: with the code of the first failure, after all other cases.
    """
    rows, failed = measured(cases, measure, columns, line)
    report(name, title, rows, columns, as_json, failed)
    return rows


def measured(
    cases: Iterable[Case],
    measure: Callable[[Case, Callable[[str], None]], Row],
    columns: Columns[Row],
    line: Callable[[Row], str] | None = None,
) -> tuple[list[Row], list[EdgeflError]]:
    """Return a row for each case that can be measured, and the errors of the others. Print each at once."""
    rows: list[Row] = []
    failed: list[EdgeflError] = []
    with reporting(console=errors) as say:
        for case in cases:
            try:
                rows.append(measure(case, say))
                errors.print(line(rows[-1]) if line else as_line(columns(rows[-1])))
            except EdgeflError as error:  # the other cases are worth measuring all the same
                failed.append(error)
                errors.print(f"error: {error.message}", style="red")
    return rows, failed


def as_line(columns: dict[str, Any]) -> str:
    """Return a row as one line of text, which remains if the run is interrupted."""
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
    """Print rows with all fields, as JSON or as a table."""
    plain = [msgspec.to_builtins(row) for row in rows]
    if as_json:
        print_json({"bench": name, "machine": machine(), "results": plain})
    else:
        print_table(name, plain)


def mebibytes(count: int | None) -> str:
    """Return a cell of a table; ``-`` if nothing was measured."""
    return "-" if count is None else mib(count)
