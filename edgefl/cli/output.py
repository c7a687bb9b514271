"""Output of commands: tables for terminals, JSON lines for programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from edgefl.wire.text import clean_text


# Texts hold names and paths of users: `package.module:two:` is no emoji, and `[server]` is no markup.
class CleanConsole(Console):
    """Console that removes control characters from texts, so that they cannot move the cursor, set the title or hide a
    line.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments that rich makes of ``renderable``, with control characters removed from its texts.

        Rich's own control codes stay.
        """
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean_text(segment.text), segment.style)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print ``objects``. Plain texts are wrapped by the terminal, not by rich, so that paths and digests can be
        copied.

        ``soft_wrap``: True to let the terminal wrap; None for True if all objects are texts.
        """
        if soft_wrap is None:
            soft_wrap = all(isinstance(each, str) for each in objects)
        super().print(*objects, soft_wrap=soft_wrap, **options)


console = CleanConsole(emoji=False, markup=False, highlight=False)
errors = CleanConsole(stderr=True, emoji=False, markup=False, highlight=False)

_WIDEST = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{32,}")


def print_json(value: Any) -> None:
    """Write ``value`` as one line of JSON to standard output, and flush it."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def print_table(title: str, rows: list[dict[str, Any]], caption: str = "") -> None:
    """Print rows with equal keys as a table. If it is too wide, columns of digests are printed below it instead.

    Args:
        title: title above the table.
        rows: values by column.
        caption: text below the table.
    """
    made, digests = table(title, rows, caption), list[str]()
    if made.box is SIMPLE_HEAD:
        digests = [name for name in rows[0] if any(_DIGEST.fullmatch(str(row[name])) for row in rows)]
        others = [{name: row[name] for name in row if name not in digests} for row in rows]
        made = table(title, others, caption)
    console.print(made)
    for name in digests:
        for row in rows:
            console.print(f"{name} of {human(next(iter(row.values())))}: {row[name]}")


def table(title: str, rows: list[dict[str, Any]], caption: str = "") -> Table:
    """Return the table of :func:`print_table`. Long texts are folded, so that nothing is cut off.

    On a narrow terminal it has no frame, and words of headers and numbers are not broken.
    """
    made = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    headers = [column.replace("_", " ") for column in rows[0]] if rows else []
    for header in headers:
        made.add_column(header, overflow="fold")
    for row in rows:
        made.add_row(*map(human, row.values()))
    whole = console.measure(made, options=console.options.update(max_width=_WIDEST))
    if whole.maximum > console.width:
        made.box, made.padding, made.show_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
        numbers = [
            [human(row[name]) for row in rows if isinstance(row[name], int | float)] for name in rows[0]
        ]
        parts = [[*header.split(), *cells] for header, cells in zip(headers, numbers, strict=True)]
        longest = [max(map(len, each), default=1) for each in parts]
        if sum(longest) + 2 * len(longest) < console.width:
            for column, width in zip(made.columns, longest, strict=True):
                column.min_width = width
    return made


def human(value: Any) -> str:
    """Return a value as text for a terminal: numbers with separators, booleans as yes and no, None as ``-``."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(human(item) for item in value)
    return str(value)
