"""``python -m benchmarks models``: architectures that others wrote, each tried as it comes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from benchmarks.cli.report import Json, print_rows
from edgefl.api.progress import reporting
from edgefl.cli.options import Engine
from edgefl.cli.output import errors, print_table

if TYPE_CHECKING:
    from benchmarks.suite.rows import SuiteRow

# Of one architecture, where nothing else is asked for.
_SECONDS = 300.0

Library = StrEnum("Library", ["plain", "transformers", "torchvision", "timm"])


def models(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="names, classes or library/name, like 'bert*'; may be repeated"),
    ] = None,
    library: Annotated[
        list[Library] | None, typer.Option(help="may be repeated; default: those that are installed")
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="others: a list that was written before any of them was tried"),
    ] = False,
    engine: Annotated[list[Engine] | None, typer.Option(help="may be repeated; default: both")] = None,
    batch: Annotated[int, typer.Option(min=2, help="rows of a step")] = 8,
    seconds: Annotated[
        float, typer.Option(min=1, help="most of one architecture, on all engines")
    ] = _SECONDS,
    jobs: Annotated[int, typer.Option(min=1, help="architectures beside each other")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="file of rows, lines of JSON, that finished ones are kept in")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Markdown file to write, of all rows that are kept")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="make rows anew that are in the file")] = False,
    as_json: Json = False,
) -> None:
    """Try architectures that others wrote, each as it comes: cut, exported, trained by each engine, compared with torch.

    Small models of transformers, torchvision and timm, where these are installed, and plain code as people write it. Each
    runs in a process of its own, so that one that crashes or takes too long ends nothing. With --out a finished row is kept
    and not made again, but for engines that it lacks; --again makes it anew. Each row is printed to stderr as soon as it is
    finished. With --jobs several are tried beside each other, which is sooner done but makes step times worse.

    Examples:

      python -m benchmarks models --jobs 2 --out suite.jsonl --page models.md

      python -m benchmarks models --only 'bert*' --only transformers/Mamba

    A held-out list:

      python -m benchmarks models --held-out --only 'timm/*'
    """

    from benchmarks.suite.architecture import Library as LibraryName
    from benchmarks.suite.catalog import chosen

    libraries = [cast(LibraryName, each.value) for each in library or ()]
    architectures = chosen(only or (), libraries, held_out=held_out)
    from benchmarks.suite.page import page as written
    from benchmarks.suite.page import share
    from benchmarks.suite.rows import ENGINES, SuiteSettings, left_out, read, tried, write
    from edgefl.api.training import Target

    engines: list[Target] = [each.value for each in engine] if engine else list(ENGINES)
    absent = left_out(architectures)
    for name, count in absent.items():
        errors.print(f"{name} is not installed: {count} architectures are left out")
    rows = read(out) if out else {}
    waiting = [
        (each, engines if again or each.path not in rows else rows[each.path].lacks(engines))
        for each in architectures
        if each.library not in absent
    ]
    waiting = [(each, missing) for each, missing in waiting if missing]
    with reporting(console=errors) as tell, ThreadPoolExecutor(jobs) as pool:
        trials = [
            pool.submit(
                tried,
                each,
                SuiteSettings(engines=missing, batch=batch, limit_s=seconds),
                partial(_tell, tell, f"{number} of {len(waiting)}"),
            )
            for number, (each, missing) in enumerate(waiting, 1)
        ]
        try:
            for done in as_completed(trials):
                row = done.result()
                errors.print(_line(row))
                rows[row.path] = rows[row.path].with_more(row) if row.path in rows else row
                if out:
                    write(out, rows)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if page:
        command = _command(library, seconds, out, page, held_out=held_out)
        page.write_text(written(rows, absent, command, held_out=held_out), encoding="utf-8")
    shown = [rows[each.path] for each in architectures if each.path in rows]
    if as_json:
        print_rows("models", shown, as_json)
    else:
        shares = "; ".join(f"{name}: {share(shown, name)}" for name in engines)
        print_table("models", [_columns(row) for row in shown], shares)


def _tell(tell: Callable[[str], None], place: str, text: str) -> None:
    tell(f"{place}, {text}")


def _command(
    library: list[Library] | None, seconds: float, out: Path | None, page: Path, *, held_out: bool
) -> str:
    """How the page was made, for those who make it again."""
    libraries = [f"--library {each.value}" for each in library or ()]
    suite = ("--held-out",) if held_out else ()
    limit = () if seconds == _SECONDS else (f"--seconds {seconds:g}",)
    return " ".join(
        (
            "python -m benchmarks models",
            *suite,
            *libraries,
            *limit,
            f"--out {out or 'suite.jsonl'}",
            f"--page {page}",
        )
    )


def _line(row: SuiteRow) -> str:
    """What a run that is cut short leaves."""
    engines = [
        f"{name} {result.problem or f'{result.step_ms:g} ms, error {result.max_rel_error:.1e}'}"
        for name, result in row.engines.items()
    ]
    return f"{row.path}, {row.parameters:,} parameters, torch {row.torch_ms:g} ms: {'; '.join(engines)}; {row.seconds:g} s"


def _columns(row: SuiteRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    answers = {
        name: "-" if name not in row.engines else "yes" if row.works_on(name) else "no"
        for name in ("onnx", "executorch")
    }
    able = [result for result in row.engines.values() if not result.problem]
    return {
        "model": row.path,
        "parameters": row.parameters,
        **answers,
        "error": f"{max(each.max_rel_error for each in able):.0e}" if able else "-",
        "torch ms": row.torch_ms,
    }
