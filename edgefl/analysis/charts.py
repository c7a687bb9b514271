"""Charts as SVG text, and HTML pages and tables: no library, no font, no script.

::

    text = line_chart({"FedAvg": [(1, 0.4), (2, 0.6)]}, title="Accuracy", x="round", y="accuracy")
    Path("accuracy.svg").write_text(text)

Colours follow the reader's light or dark theme. Names and titles are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 48, 64
# Distinguishable for most colour-blind people, and readable on white and on black.
COLOURS = ("#4477cc", "#dd6633", "#2a9d6f", "#b05cc6", "#c9a227", "#d1495b", "#3fa7b8", "#8d8d8d")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:16px;font-weight:600}.small{font-size:11px}"
    ".axis{stroke:#888}.grid{stroke:#8884}.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.back{fill:#16181c}}"
)


@dataclass(frozen=True)
class AxisRange:
    """Smallest range of an axis, from ``low`` to ``high``; values outside extend it, and None sets no limit. ``whole``:
    True for marks at integers only.
    """

    low: float | None = None
    high: float | None = None
    whole: bool = False

    def covering(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the ends (low, high) of the axis, extended so that it covers ``values``."""
        ends = [end for end in (self.low, self.high) if end is not None]
        return min(*values, *ends, math.inf), max(*values, *ends, -math.inf)


FREE = AxisRange()
AMOUNT = AxisRange(0.0)
"""Amounts from 0, such as bytes and seconds."""
COUNT = AxisRange(0.0, whole=True)
SHARE = AxisRange(0.0, 1.0)
"""Shares from 0 to 1, such as accuracies."""


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str,
    y: str,
    x_span: AxisRange = FREE,
    y_span: AxisRange = FREE,
    log_y: bool = False,
    dashed: Collection[str] = (),
) -> str:
    """Draw lines through points, with a legend.

    Args:
        series: points (x, y) by the line's name. Points that are not finite are left out; with ``log_y`` also those
            with y <= 0.
        title: title of the chart.
        x: label of the x axis.
        y: label of the y axis.
        x_span: least extent of the x axis.
        y_span: least extent of the y axis; ignored with ``log_y``.
        log_y: logarithmic y axis.
        dashed: names of the lines to dash, such as a reference level.

    Returns:
        The chart as SVG text.

    Raises:
        ValueError: if no point is left.
    """
    shown = {name: [point for point in points if _fits(point, log_y)] for name, points in series.items()}
    every = [point for points in shown.values() for point in points]
    if not every:
        raise ValueError(f"the chart {title!r} has no point to show")
    across = _Axis.over([point[0] for point in every], LEFT, WIDTH - RIGHT, x_span)
    # The legend is below the title, where it hides no line.
    rows = _legend_rows(list(series))
    top = TOP + 18 * len(rows)
    up = _Axis.over([point[1] for point in every], HEIGHT - BOTTOM, top, y_span, log=log_y)
    parts = [*_frame(title, x, y, top), *_across(across, top), *_up(up)]
    for number, (name, points) in enumerate(shown.items()):
        parts.append(_line([(across.at(a), up.at(b)) for a, b in points], number, dash=name in dashed))
    return _svg([*parts, *_legend(rows, dashed)])


def bar_chart(values: Mapping[str, float], *, title: str, y: str, x: str = "") -> str:
    """Draw one bar per name from 0, with its value above it.

    Args:
        values: the bars' heights by name; a value that is not finite has no bar.
        title: title of the chart.
        y: label of the y axis.
        x: label of the x axis.

    Returns:
        The chart as SVG text.

    Raises:
        ValueError: if no value is finite.
    """
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite:
        raise ValueError(f"the chart {title!r} has no bar to show")
    up = _Axis.over(finite, HEIGHT - BOTTOM, TOP, AMOUNT)
    room = (WIDTH - LEFT - RIGHT) / len(values)
    floor = up.at(0.0)
    parts = [*_frame(title, x, y, TOP), *_up(up)]
    for number, (name, value) in enumerate(values.items()):
        middle = LEFT + room * (number + 0.5)
        parts.append(_text(middle, HEIGHT - BOTTOM + 18, _cut(name, room), "middle", "small"))
        if not math.isfinite(value):
            continue
        end = up.at(value)
        parts.append(
            f'<rect x="{middle - 0.35 * room:.1f}" y="{min(end, floor):.1f}" width="{0.7 * room:.1f}" '
            f'height="{abs(end - floor):.1f}" fill="{_colour(0)}"><title>{escape(name)}: {value:g}</title></rect>'
        )
        parts.append(_text(middle, min(end, floor) - 4, f"{value:.3g}", "middle", "small"))
    return _svg(parts)


def heatmap(
    matrix: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    x: str = "",
    y: str = "",
) -> str:
    """Draw a coloured cell for each entry of a matrix, with its number if the cell is large enough.

    Args:
        matrix: the values, (rows, columns); cells that are not finite stay empty.
        rows: names of the rows.
        columns: names of the columns.
        title: title of the chart.
        x: label of the columns.
        y: label of the rows.

    Returns:
        The chart as SVG text.

    Raises:
        ValueError: if the matrix does not match its names, or has no finite number.
    """
    if len(matrix) != len(rows) or any(len(row) != len(columns) for row in matrix):
        raise ValueError(
            f"the matrix of {title!r} has {len(matrix)} rows; {len(rows)} x {len(columns)} are named"
        )
    finite = [value for row in matrix for value in row if math.isfinite(value)]
    if not finite:
        raise ValueError(f"the chart {title!r} has no cell to show")
    low, high = min(finite), max(finite)
    wide, tall = (WIDTH - LEFT - RIGHT) / len(columns), (HEIGHT - TOP - BOTTOM) / len(rows)
    parts = [
        _text(WIDTH / 2, 26, title, "middle", "title"),
        _text(WIDTH / 2, HEIGHT - 14, x, "middle"),
        _sideways(y),
    ]
    for number in _label_indices(len(columns), 22 if wide < 22 else wide, wide):
        middle = LEFT + wide * (number + 0.5)
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, _cut(columns[number], wide), "middle", "small"))
    for number in _label_indices(len(rows), 13 if tall < 13 else tall, tall):
        parts.append(_text(LEFT - 6, TOP + tall * (number + 0.5) + 4, _cut(rows[number], 44), "end", "small"))
    for at, (row, values) in enumerate(zip(rows, matrix, strict=True)):
        for index, (column, value) in enumerate(zip(columns, values, strict=True)):
            if math.isfinite(value):
                place = (LEFT + wide * index, TOP + tall * at, wide, tall)
                share = (value - low) / (high - low) if high > low else 0.5
                parts.append(_cell(place, value, share, f"{row}, {column}: {value:g}"))
    return _svg(parts)


@dataclass(frozen=True)
class _Axis:
    """Scale from values to pixels: the first of the ascending ``marks`` is at pixel ``start``, the last at ``end``."""

    marks: list[float]
    start: float
    end: float
    log: bool

    @classmethod
    def over(
        cls, values: Sequence[float], start: float, end: float, span: AxisRange = FREE, *, log: bool = False
    ) -> _Axis:
        """Return an axis that covers ``values`` and ``span``, drawn from pixel ``start`` to pixel ``end``."""
        marks = (
            logarithmic(*FREE.covering(values)) if log else linear(*span.covering(values), whole=span.whole)
        )
        return cls(marks, start, end, log)

    def at(self, value: float) -> float:
        """Return the pixel coordinate at which ``value`` is drawn."""
        low, high, value = (
            math.log10(each) if self.log else each for each in (self.marks[0], self.marks[-1], value)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def _fits(point: Point, log_y: bool) -> bool:
    return all(map(math.isfinite, point)) and (point[1] > 0 or not log_y)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _svg(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f'<style>{_STYLE}</style><rect class="back" width="{WIDTH}" height="{HEIGHT}"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def _frame(title: str, x: str, y: str, top: float) -> list[str]:
    floor = HEIGHT - BOTTOM
    return [
        _text(WIDTH / 2, 26, title, "middle", "title"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, x, "middle"),
        _sideways(y),
        f'<path class="axis" fill="none" d="M{LEFT} {top}V{floor}H{WIDTH - RIGHT}"/>',
    ]


def _across(axis: _Axis, top: float) -> list[str]:
    floor = HEIGHT - BOTTOM
    return [
        f'<path class="grid" d="M{axis.at(mark):.1f} {floor}V{top}"/>'
        + _text(axis.at(mark), floor + 18, format_number(mark), "middle", "small")
        for mark in axis.marks
    ]


def _up(axis: _Axis) -> list[str]:
    return [
        f'<path class="grid" d="M{LEFT} {axis.at(mark):.1f}H{WIDTH - RIGHT}"/>'
        + _text(LEFT - 6, axis.at(mark) + 4, format_number(mark), "end", "small")
        for mark in axis.marks
    ]


def _stroke(number: int, dash: bool) -> str:
    """Return the SVG attributes of line ``number``: colour, width and dashes. Lines beyond the palette are dashed, too."""
    dashes = ' stroke-dasharray="6 4"' if dash or number >= len(COLOURS) else ""
    return f'fill="none" stroke="{_colour(number)}" stroke-width="2"{dashes}'


def _line(points: Sequence[Point], number: int, *, dash: bool = False) -> str:
    if len(points) == 1:
        ((a, b),) = points
        return f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{_colour(number)}"/>'
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline {_stroke(number, dash)} stroke-linejoin="round" points="{path}"/>'


def _legend_rows(names: Sequence[str]) -> list[list[tuple[int, str, float]]]:
    """Return the rows of the legend, as many as fit the names. An entry is (number of the line, name, left edge in
    pixels).
    """
    rows: list[list[tuple[int, str, float]]] = [[]]
    left = float(LEFT)
    for number, name in enumerate(names):
        width = 34 + 7 * len(name)
        if rows[-1] and left + width > WIDTH - RIGHT:
            rows.append([])
            left = float(LEFT)
        rows[-1].append((number, name, left))
        left += width
    return rows


def _legend(rows: Sequence[Sequence[tuple[int, str, float]]], dashed: Collection[str]) -> list[str]:
    return [
        f'<path {_stroke(number, name in dashed)} d="M{left:.0f} {TOP + 18 * line - 5}h15"/>'
        + _text(left + 19, TOP + 18 * line, name)
        for line, row in enumerate(rows)
        for number, name, left in row
    ]


def _cell(place: tuple[float, float, float, float], value: float, share: float, title: str) -> str:
    """Return the SVG of a coloured cell with its ``value`` as text and ``title`` as tooltip. A small cell has no text.

    ``place`` is (left, top, width, height) in pixels. ``share`` from 0 to 1 selects a colour from pale to dark blue.
    """
    left, top, wide, tall = place
    ends = zip((237, 243, 251), (16, 58, 122), strict=True)
    colour = ",".join(str(round(pale + share * (dark - pale))) for pale, dark in ends)
    made = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="rgb({colour})">'
        f"<title>{escape(title)}</title></rect>"
    )
    if wide < 34 or tall < 14:
        return made
    ink = "#fff" if share > 0.5 else "#222"
    return made + (
        f'<text class="small" x="{left + wide / 2:.1f}" y="{top + tall / 2 + 4:.1f}" text-anchor="middle" '
        f'style="fill:{ink}">{_short(value)}</text>'
    )


def _short(value: float) -> str:
    """Return a number as text: integers below 10,000 in full, other numbers with two significant digits."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e4 else f"{value:.2g}"


def _label_indices(count: int, room: float, each: float) -> range:
    """Return the indices of the labels to draw, of ``count`` labels that are ``each`` pixels apart, so that each drawn
    one has ``room`` pixels.
    """
    return range(0, count, max(1, math.ceil(room / each)))


def _cut(name: str, room: float) -> str:
    most = max(3, int(room / 6))
    return name if len(name) <= most else name[: most - 1] + "…"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _sideways(text: str) -> str:
    return (
        f'<text x="18" y="{HEIGHT / 2:.0f}" text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2:.0f})">'
        f"{escape(text)}</text>"
    )


def linear(low: float, high: float, wanted: int = 6, *, whole: bool = False) -> list[float]:
    """Return the marks of a linear axis: consecutive multiples of 1, 2 or 5 times a power of ten that cover ``low`` to
    ``high``.

    If both are equal to twelve digits, the axis extends by half of the value in both directions; for 0 it goes from 0 to 1.

    Args:
        low: the smallest value.
        high: the largest value.
        wanted: approximate number of intervals.
        whole: True for marks at integers only.

    Returns:
        The marks, ascending.
    """
    if high - low <= 1e-12 * abs(low):
        half = abs(low) / 2
        low, high = (low - half, high + half) if half else (0.0, 1.0)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def logarithmic(low: float, high: float, wanted: int = 8) -> list[float]:
    """Return the marks of a logarithmic axis that covers ``low`` to ``high``: powers of ten, evenly spaced, ascending.

    ``low`` must be above 0. ``wanted`` is the largest number of intervals.
    """
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    step = max(1, math.ceil((last - first) / wanted))
    count = math.ceil((last - first) / step)
    return [10.0 ** (first + number * step) for number in range(count + 1)]


def format_number(value: float) -> str:
    """Return a number as text with at most four digits, such as 0.25, 1500, 20k or 1e-12."""
    size = abs(value)
    if size < 1e-12:
        return "0" if size < 1e-300 else f"{value:.0e}"
    if size >= 1e6 or size < 1e-3:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value / 1000:g}k" if size >= 1e4 else f"{value:.4g}"


_PAGE_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}svg{max-width:100%;height:auto}"
    "td,th{padding:.25rem .7rem;text-align:right;vertical-align:top;border-bottom:1px solid #8886}"
    "td:first-child,th:first-child{text-align:left}"
    "@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}}"
)


def html_page(title: str, parts: Sequence[str], *, style: str = "", head: str = "") -> str:
    """Return a whole HTML page.

    Args:
        title: title and heading.
        parts: the body's HTML.
        style: CSS added to the common style.
        head: HTML added to the head.

    Returns:
        The page's text.
    """
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}<title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_PAGE_STYLE}{style}</style></head>'
        f"<body><h1>{escape(title)}</h1>" + "\n".join(parts) + "</body></html>\n"
    )


def html_table(rows: Sequence[Mapping[str, str]], kind: str = "") -> str:
    """Return the HTML of a table with one column per key, or "" if there is no row. All rows must have the same keys.

    Args:
        rows: the cells' text by column.
        kind: CSS class of the table.

    Returns:
        The table's HTML.
    """
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>"
        + "".join(f'<td data-name="{escape(name)}">{escape(value)}</td>' for name, value in row.items())
        + "</tr>"
        for row in rows
    )
    named = f' class="{kind}"' if kind else ""
    return f"<table{named}><tr>{head}</tr>{body}</table>"
