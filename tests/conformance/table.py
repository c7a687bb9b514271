"""The table of cases as docs/conformance.md has it: ``python -m tests.conformance.table`` prints it."""

from __future__ import annotations

import sys

from edgefl_conformance.case import Case
from edgefl_conformance.catalog import CASES

HEAD = ("| case | group | what it checks |", "|---|---|---|")


def row(case: Case) -> str:
    """One line."""
    star = "\\*" if case.alone else ""
    notes = ["optional"] * case.optional + [
        f"{engine} only" for engine in case.engines if len(case.engines) == 1
    ]
    end = f" ({', '.join(notes)})" if notes else ""
    return f"| `{case.name}`{star} | {case.group} | {case.says}{end} |"


def table() -> str:
    """All lines."""
    return "\n".join((*HEAD, *map(row, CASES)))


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
