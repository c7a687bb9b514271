"""Profiles as one page that needs nothing else: no script, no font, no network.

The profiles themselves are in it as JSON (``<script type="application/json" id="profiles">``), for whoever wants to go on
from the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import msgspec

from edgefl.analysis.charts.html import document, table
from edgefl.analysis.charts.svg import AMOUNT, SHARE, Point, bar_chart, line_chart
from edgefl.analysis.profiles import rows
from edgefl.analysis.profiles.accuracy import Accuracy
from edgefl.system.sizes import MIB
from edgefl.wire.bundle.profiles import BundleProfile

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = (
    "body{max-width:1280px}td,th{white-space:nowrap}svg{margin:.5rem 0}.wide{overflow-x:auto}figure{margin:1rem 0}"
    ".note{color:#777;margin:.2rem 0}"
)


def page(
    title: str,
    profiles: Sequence[BundleProfile],
    accuracy: Accuracy | None = None,
    *,
    names: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page of ``profiles``; ``accuracy`` of each tier in a run. ValueError without a profile.

    ``names`` are the profiles' in place of their tiers', ``notes`` stand below the table.
    """
    if not profiles:
        raise ValueError(f"the page {title!r} has no profile to show")
    names = names or rows.names_of(profiles)
    parts = [
        _table(rows.summary(profiles, names), "summary"),
        *(
            f'<p class="note">{escape(note)}</p>'
            for note in dict.fromkeys([*_notes(profiles, names), *notes])
        ),
        _beside(profiles, names, accuracy),
        *(_bundle(name, profile) for name, profile in zip(names, profiles, strict=True)),
    ]
    data = msgspec.json.encode(list(profiles)).decode().replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="profiles">{data}</script>')
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
    return document(title, parts, style=_STYLE, head=policy)


def _notes(profiles: Sequence[BundleProfile], names: Sequence[str]) -> list[str]:
    """Of each profile; without its name where the notes of all are the same."""
    all_notes = [rows.notes(profile) for profile in profiles]
    if all(notes == all_notes[0] for notes in all_notes):
        return all_notes[0]
    return [f"{name}: {note}" for name, notes in zip(names, all_notes, strict=True) for note in notes]


def _bundle(name: str, profile: BundleProfile) -> str:
    parts = [
        f"<h2>{escape(name)}</h2>",
        _memory(name, profile),
        _times(name, profile),
        _table(rows.graphs(profile), "graphs"),
    ]
    if profile.io:
        parts += ["<h3>Multi-step forward pass</h3>", _table(rows.chunks(profile), "chunks")]
    if split := rows.parts(profile):
        parts += ["<h3>Parts of a training step</h3>", _table(split, "parts")]
    if costly := rows.costliest(profile):
        parts += ["<h3>Costliest ops of a training step</h3>", _table(costly, "ops")]
    return f"<section>{''.join(parts)}</section>"


def _memory(name: str, profile: BundleProfile) -> str:
    """Memory over the idle process, a colour for each stage of the round."""
    series: dict[str, list[Point]] = {}
    moments = [
        (moment.t_ms, (moment.rss_bytes - profile.idle_bytes) / MIB) for moment in profile.timeline.moments
    ]
    for span in profile.timeline.spans:
        points = [point for point in moments if span.start_ms <= point[0] <= span.end_ms]
        points += [point for point in moments if point[0] > span.end_ms][:1]  # so that the line goes on
        if points:
            series.setdefault(_free(span.label, series), points)
    if not series and moments:
        series["round"] = moments
    if not series:
        return ""
    title = f"Memory of a short round, {name}"
    below = any(value < 0 for _, value in moments)
    note = (
        "Below zero: the engine gave back code that it does not need, which the idle process had."
        if below
        else ""
    )
    chart = line_chart(
        series, title=title, x="ms", y="MiB over the idle process", x_span=AMOUNT, y_span=AMOUNT
    )
    return _figure(chart, "memory", note)


def _free(label: str, taken: Mapping[str, object]) -> str:
    """``label``, counted on where a stage comes again."""
    names = [label, *(f"{label} ({number})" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def _times(name: str, profile: BundleProfile) -> str:
    """Every graph, those of steps in their parts."""
    bars: dict[str, float] = {}
    for graph in profile.graphs:
        if graph.split is None:
            bars[graph.name] = graph.run.median_ms
            continue
        for part in rows.PARTS:
            label = part if len(profile.steps) == 1 else f"{part} of {graph.name}"
            bars[label] = getattr(graph.split, f"{part}_ms")
    return _figure(bar_chart(bars, title=f"Time by graph, {name}", y="ms (median)"), "times")


def _beside(profiles: Sequence[BundleProfile], names: Sequence[str], accuracy: Accuracy | None) -> str:
    """Memory of each tier against its accuracy, or, without a run, against how much of the model it trains."""
    known = accuracy.by_tier if accuracy else {}
    if accuracy and any(profile.tier in known for profile in profiles):
        points = {
            name: [(profile.peak_bytes / MIB, known[profile.tier])]
            for name, profile in zip(names, profiles, strict=True)
            if profile.tier in known
        }
        what, y, note = "accuracy", accuracy.axis, accuracy.note
    else:
        most = max(profile.parameters for profile in profiles) or 1
        points = {
            name: [(profile.peak_bytes / MIB, profile.parameters / most)]
            for name, profile in zip(names, profiles, strict=True)
        }
        what, y = "what is trained", "trained parameters, of the largest tier's"
        why = (
            f"The run knows other tiers: {', '.join(known)}."
            if known
            else "No run told the accuracy of the tiers."
        )
        note = f"{why} So memory stands against how much of the model each trains."
    title = f"Memory against {what}, by tier"
    x = "peak memory over the idle process, MiB"
    chart = line_chart(points, title=title, x=x, y=y, x_span=AMOUNT, y_span=SHARE)
    return _figure(chart, "tiers", note)


def _figure(chart: str, kind: str, note: str = "") -> str:
    caption = f'<figcaption class="note">{escape(note)}</figcaption>' if note else ""
    return f'<figure class="{kind}">{chart}{caption}</figure>'


def _table(found: rows.Rows, kind: str) -> str:
    return f'<div class="wide">{table(found, kind)}</div>'
