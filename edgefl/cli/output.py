"""How commands speak: tables for people, JSON lines for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

# No emoji: `package.module:two: ...` is a model's name and no picture.
console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)


def print_json(value: Any) -> None:
    """One JSON value on one line of standard output, at once."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """What tells, on standard error, what a command is doing and for how long, beginning with ``first``: in one line that
    changes, or, where nobody looks on, in a line each."""
    start = time.monotonic()

    def say(text: str) -> None:
        timed = f"{time.monotonic() - start:4.0f} s  {text}"
        if errors.is_terminal:
            status.update(Text(timed))
        else:
            errors.print(timed, markup=False, highlight=False, soft_wrap=True)

    with errors.status("") as status:
        say(first)
        yield say


def print_table(title: str, rows: list[dict[str, Any]], caption: str = "") -> None:
    """Rows with equal keys as a table."""
    console.print(table(title, rows, caption))


def table(title: str, rows: list[dict[str, Any]], caption: str = "") -> Table:
    """The table of :func:`print_table`. What is too long goes on in the next line, so that nothing is cut off."""
    made = Table(
        title=escape(title),
        title_justify="left",
        caption=escape(caption) or None,
        caption_justify="left",
    )
    for column in rows[0] if rows else ():
        made.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        made.add_row(*(escape(human(value)) for value in row.values()))
    return made


def human(value: Any) -> str:
    """Numbers as people write them."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(human(item) for item in value)
    return str(value)
