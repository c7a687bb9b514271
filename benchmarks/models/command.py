"""``python -m benchmarks models``: architectures that others wrote, each exported, trained and compared with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from benchmarks.models.architecture import LIBRARIES, Library
from benchmarks.models.catalog import chosen
from benchmarks.models.rows import (
    ENGINES,
    EngineResult,
    SuiteRow,
    SuiteSettings,
    left_out,
    read,
    try_architecture,
    write,
)
from benchmarks.options import Json
from benchmarks.results import print_rows
from edgefl.api.progress import reporting
from edgefl.api.training import Target
from edgefl.cli.options import EngineChoice
from edgefl.cli.output import errors, print_table

LibraryName = StrEnum("LibraryName", ["plain", "transformers", "torchvision", "timm"])


# Default of --seconds.
_SECONDS = 300.0


def models(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="names, classes or library/name, like 'bert*'; may be repeated"),
    ] = None,
    library: Annotated[
        list[LibraryName] | None, typer.Option(help="may be repeated; default: those that are installed")
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="others: a list that was written before any of them was tried"),
    ] = False,
    engine: Annotated[list[EngineChoice] | None, typer.Option(help="may be repeated; default: both")] = None,
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
    as_json: Json = False,
) -> None:
    """Try unmodified architectures that others wrote: cut, exported, trained by each engine, compared with torch.

    Small models of the installed ones of transformers, torchvision and timm, and plain code. Each runs in a process of its
    own, so that a crash or timeout ends nothing else. With --out a finished row is kept and only missing engines are tried:
    delete its line to try it anew. Each row is printed to stderr as soon as it is finished. With --jobs several run in
    parallel, which is faster but makes step times worse.

    Examples:

      python -m benchmarks models --jobs 2 --out suite.jsonl --page models.md

      python -m benchmarks models --only 'bert*' --only transformers/Mamba

    A held-out list:

      python -m benchmarks models --held-out --only 'timm/*'
    """

    libraries = [cast(Library, each.value) for each in library or ()]
    architectures = chosen(only or (), libraries, held_out=held_out)

    engines: list[Target] = [each.value for each in engine] if engine else list(ENGINES)
    absent = left_out(architectures)
    for name, count in absent.items():
        errors.print(f"{name} is not installed: {count} architectures are left out")
    rows = read(out) if out else {}
    waiting = [
        (each, rows[each.path].lacks(engines) if each.path in rows else engines)
        for each in architectures
        if each.library not in absent
    ]
    waiting = [(each, missing) for each, missing in waiting if missing]
    with reporting(console=errors) as say, ThreadPoolExecutor(jobs) as pool:
        trials = [
            pool.submit(
                try_architecture,
                each,
                SuiteSettings(engines=missing, batch=batch, limit_s=seconds),
                partial(_say_numbered, say, f"{number} of {len(waiting)}"),
            )
            for number, (each, missing) in enumerate(waiting, 1)
        ]
        try:
            for done in as_completed(trials):
                row = done.result()
                errors.print(_stderr_line(row))
                rows[row.path] = rows[row.path].with_more(row) if row.path in rows else row
                if out:
                    write(out, rows)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if page:
        command = _command(library, seconds, out, page, held_out=held_out)
        page.write_text(markdown_page(rows, absent, command, held_out=held_out), encoding="utf-8")
    shown = [rows[each.path] for each in architectures if each.path in rows]
    if as_json:
        print_rows("models", shown, as_json)
    else:
        shares = "; ".join(f"{name}: {share(shown, name)}" for name in engines)
        print_table("models", [_columns(row) for row in shown], shares)


def _say_numbered(say: Callable[[str], None], place: str, text: str) -> None:
    say(f"{place}, {text}")


def _command(
    library: list[LibraryName] | None, seconds: float, out: Path | None, page: Path, *, held_out: bool
) -> str:
    """Return the command that writes the page."""
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


def _stderr_line(row: SuiteRow) -> str:
    engines = [
        f"{name} {result.problem or f'{result.step_ms:g} ms, error {result.max_rel_error:.1e}'}"
        for name, result in row.engines.items()
    ]
    return f"{row.path}, {row.parameters:,} parameters, torch {row.torch_ms:g} ms: {'; '.join(engines)}; {row.seconds:g} s"


def _columns(row: SuiteRow) -> dict[str, Any]:
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


NAMES = {"onnx": "ONNX Runtime", "executorch": "ExecuTorch"}
TITLES: Mapping[Library, str] = {
    "plain": "Plain code",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "timm": "timm",
}
BUSY = 1.25
"""Load per core above which step times are those of a shared machine."""
_BUSY = "The machine had other work while {rows} of the rows were made: their times say little, other than their errors."
_LONGEST = 300
"""Longest text of a reason, in characters."""


@dataclass(frozen=True)
class PageText:
    """Text that differs between the two pages. ``benchmarks``: relative path of the benchmarks page."""

    title: str
    about: str
    list: str
    benchmarks: str


SUITE = PageText(
    "Architectures",
    """\
For people who want to know if edgefl can train their architecture. The table has models that were not written for edgefl:
small, unmodified, with the library's own dropout, stochastic depth, tied weights, caches and outputs. The only options are
sizes and the loss. The suite traces each model, cuts it into units, exports its training, runs it on each engine and
compares it with torch.""",
    "suite",
    "benchmarks.md",
)
HELD_OUT = PageText(
    "Architectures held out",
    """\
For people whose architecture is not in [the suite](../models.md): the share of unknown models that edgefl can train. The
list was fixed before any of its models was tried, and none of them influenced the code. On that first try edgefl trained
76 of 96 on ONNX Runtime and 73 on ExecuTorch (one failed by a mistake in the list). Faults that other models would meet
were then fixed, and the failed rows measured again; the table contains the new rows. As in the suite, the models are small
and unmodified, and the only options are sizes and the loss.""",
    "list",
    "../benchmarks.md",
)


def markdown_page(
    rows: Mapping[str, SuiteRow], absent: Mapping[Library, int], command: str, *, held_out: bool = False
) -> str:
    """Return the page as Markdown.

    Args:
        rows: results by ``library/name``.
        absent: libraries that are not installed, with the numbers of their architectures.
        command: command that writes the page.
        held_out: write the page of the held-out architectures.
    """
    places = {each.path: place for place, each in enumerate(chosen(held_out=held_out))}
    ordered = [rows[path] for path in sorted(rows, key=lambda path: places.get(path, len(places)))]
    parts = [
        _head(ordered, absent, command, HELD_OUT if held_out else SUITE, len(places)),
        *(_table(name, ordered) for name in LIBRARIES),
        _failures(ordered),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def share(rows: Sequence[SuiteRow], engine: str) -> str:
    """Return as text how many of an engine's rows it can train."""
    asked = [row for row in rows if engine in row.engines]
    able = sum(row.works_on(engine) for row in asked)
    return f"{able} of {len(asked)} ({able / len(asked):.0%})" if asked else "not tried"


def _head(
    rows: Sequence[SuiteRow], absent: Mapping[Library, int], command: str, text: PageText, count: int
) -> str:
    shares = "; ".join(f"**{NAMES[each]}: {share(rows, each)}**" for each in ENGINES)
    versions = {name: number for row in rows for name, number in row.versions.items()}
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    processors = " and ".join(dict.fromkeys(row.processor for row in rows))
    batches = " or ".join(str(each) for each in dict.fromkeys(row.batch for row in rows))
    missing = "".join(
        f"\n{name} was not installed: its {count} architectures are left out."
        for name, count in absent.items()
    )
    busy = [row.load for row in rows if row.load is None or row.load > BUSY]
    others = f"\n{_BUSY.format(rows=len(busy))}" if busy else ""
    return f"""# {text.title}

<!-- Written by `{command}`: change the suite, not this page. -->

{text.about}

Trained as they come: {shares}. {len(rows)} of the {text.list}'s {count} architectures have been tried.

```sh
{command}
```

Each model is compared twice: its units with the module as it came, in inference, and every output of each exported graph
with torch, of which the table has the largest error, relative to the output's largest value. Times are the median of a few
steps on one thread with a batch of {batches}, forward, backward and SGD. They are of tiny models, where calls cost as much
as sums do: [benchmarks]({text.benchmarks}#a-training-step-beside-torch) have those of models at their real size.

Measured on: {processors}. Versions: {listed}.{missing}{others}"""


def _table(library: Library, rows: Sequence[SuiteRow]) -> str:
    own = [row for row in rows if row.library == library]
    if not own:
        return ""
    lines = "\n".join(_table_row(row) for row in own)
    counts = ", ".join(f"{NAMES[each]} {share(own, each)}" for each in ENGINES)
    return f"""## {TITLES[library]}

{counts}.

| model | made by | parameters | units | loss | ONNX | ExecuTorch | largest error | torch ms | ONNX ms | ExecuTorch ms |
|---|---|---|---|---|---|---|---|---|---|---|
{lines}"""


def _table_row(row: SuiteRow) -> str:
    results = [row.engines.get(each) for each in ENGINES]
    errors = [each.max_rel_error for each in results if each and not each.problem]
    cells = [
        row.name,
        f"`{row.kind}`",
        f"{row.parameters:,}" if row.parameters else "",
        str(row.units or ""),
        row.loss,
        *("" if each is None else "no" if each.problem else "yes" for each in results),
        f"{max(errors):.0e}" if errors else "",
        f"{row.torch_ms:.1f}" if row.torch_ms else "",
        *(_ms(each) for each in results),
    ]
    return f"| {' | '.join(cells)} |"


def _ms(result: EngineResult | None) -> str:
    return f"{result.step_ms:.1f}" if result and not result.problem else ""


def _failures(rows: Sequence[SuiteRow]) -> str:
    lines = [f"* {row.library}, {row.name}: {reason}" for row in rows for reason in _reasons(row)]
    return "\n".join(("## What cannot be trained yet\n", *lines)) if lines else ""


def _reasons(row: SuiteRow) -> list[str]:
    """Return the problems of a row, once if all engines have the same."""
    problems = {name: result.problem for name, result in row.engines.items() if result.problem}
    if len(set(problems.values())) == 1 and len(problems) == len(row.engines):
        return [_short(next(iter(problems.values())))]
    return [f"not on {NAMES[name]}: {_short(problem)}" for name, problem in problems.items()]


def _short(problem: str) -> str:
    """Return a problem as one line without Markdown's backticks."""
    line = " ".join(problem.split()).replace("`", "'")
    return f"`{line if len(line) <= _LONGEST else line[:_LONGEST].rsplit(' ', 1)[0] + ' ...'}`"
