"""The page of the suite: what can be trained, on which engine, and why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.suite.architecture import LIBRARIES, Library
from benchmarks.suite.catalog import chosen
from benchmarks.suite.rows import ENGINES, EngineResult, SuiteRow

NAMES = {"onnx": "ONNX Runtime", "executorch": "ExecuTorch"}
TITLES: Mapping[Library, str] = {
    "plain": "Plain code",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "timm": "timm",
}
BUSY = 1.25
"""Algorithms for each core, beyond which step times are those of a shared machine."""
_BUSY = "The machine had other work while {rows} of the rows were made: their times say little, other than their errors."
_LONGEST = 300
"""Characters of a reason."""


@dataclass(frozen=True)
class Text:
    """What differs between the pages. ``benchmarks``: where that page is, seen from this one."""

    title: str
    about: str
    list: str
    benchmarks: str


SUITE = Text(
    "Architectures",
    """\
Models that were not written for edgefl, each as it comes: small, with the library's own dropout, stochastic depth, tied
weights, caches and outputs. Nothing of a module was edited, and no option was given but sizes and the loss. Each was traced,
cut into units, exported with its training, run by each engine, and compared with torch.""",
    "suite",
    "benchmarks.md",
)
HELD_OUT = Text(
    "Architectures held out",
    """\
The list was written down before any of its models was tried: none of them had a part in how edgefl was built. On that first
try 76 of 96 could be trained on ONNX Runtime and 73 on ExecuTorch (one failed by a mistake in the list). What others would
meet too was mended, and rows that had failed were made again: the table has these. Each model comes as in
[the suite](../models.md): small, nothing edited, no option but sizes and the loss.""",
    "list",
    "../benchmarks.md",
)


def page(
    rows: Mapping[str, SuiteRow], absent: Mapping[Library, int], command: str, *, held_out: bool = False
) -> str:
    """The page as Markdown: ``rows`` by ``library/name``, the libraries that were not installed with how many architectures
    that leaves out, and the command that wrote it; of the suite, or of the architectures ``held_out``."""
    places = {each.path: place for place, each in enumerate(chosen(held_out=held_out))}
    ordered = [rows[path] for path in sorted(rows, key=lambda path: places.get(path, len(places)))]
    parts = [
        _head(ordered, absent, command, HELD_OUT if held_out else SUITE, len(places)),
        *(_table(name, ordered) for name in LIBRARIES),
        _failures(ordered),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def share(rows: Sequence[SuiteRow], engine: str) -> str:
    """How many of the rows that were tried on an engine it trains, for people."""
    asked = [row for row in rows if engine in row.engines]
    able = sum(row.works_on(engine) for row in asked)
    return f"{able} of {len(asked)} ({able / len(asked):.0%})" if asked else "not tried"


def _head(
    rows: Sequence[SuiteRow], absent: Mapping[Library, int], command: str, text: Text, count: int
) -> str:
    shares = "; ".join(f"**{NAMES[each]}: {share(rows, each)}**" for each in ENGINES)
    versions = {name: number for row in rows for name, number in row.versions.items()}
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
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
with torch, of which the largest error stands here, relative to the output's largest value. Times are the median of a few
steps on one thread with a batch of {batches}, forward, backward and SGD. They are of tiny models, where calls cost as much
as sums do: [benchmarks]({text.benchmarks}#a-training-step-beside-torch) have those of models at their real size.

Measured on: {processors}. Versions: {told}.{missing}{others}"""


def _table(library: Library, rows: Sequence[SuiteRow]) -> str:
    own = [row for row in rows if row.library == library]
    if not own:
        return ""
    lines = "\n".join(_line(row) for row in own)
    counts = ", ".join(f"{NAMES[each]} {share(own, each)}" for each in ENGINES)
    return f"""## {TITLES[library]}

{counts}.

| model | made by | parameters | units | loss | ONNX | ExecuTorch | largest error | torch ms | ONNX ms | ExecuTorch ms |
|---|---|---|---|---|---|---|---|---|---|---|
{lines}"""


def _line(row: SuiteRow) -> str:
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
    """Why not, in the message's own words; once, where all engines say the same."""
    problems = {name: result.problem for name, result in row.engines.items() if result.problem}
    if len(set(problems.values())) == 1 and len(problems) == len(row.engines):
        return [_short(next(iter(problems.values())))]
    return [f"not on {NAMES[name]}: {_short(problem)}" for name, problem in problems.items()]


def _short(problem: str) -> str:
    """One line without what Markdown would read."""
    line = " ".join(problem.split()).replace("`", "'")
    return f"`{line if len(line) <= _LONGEST else line[:_LONGEST].rsplit(' ', 1)[0] + ' ...'}`"
