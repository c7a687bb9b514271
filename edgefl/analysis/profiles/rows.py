"""Profiles as rows of text, for the terminal and for the HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import msgspec

from edgefl.analysis.charts import AMOUNT, SHARE, Point, bar_chart, html_page, html_table, line_chart
from edgefl.analysis.profiles.accuracy import TierAccuracy
from edgefl.system import sizes
from edgefl.system.sizes import MIB
from edgefl.wire.bundle.profiles import BundleProfile

Rows = list[dict[str, str]]
TOP = 12
PARTS = ("forward", "backward", "update")


def name_of(profile: BundleProfile, beside: Sequence[BundleProfile] = ()) -> str:
    """Return a display name of a profile: its tier, its exchange (round trip between server and device) if it has one,
    and distinguishing fields.

    A field (model, program, engine or batch) is named if it differs among the profiles ``beside``.
    """
    parts = [profile.tier, *([profile.exchange] if profile.exchange else [])]
    for field in ("model", "program", "engine", "batch"):
        if len({getattr(other, field) for other in beside}) > 1:
            parts.append(f"batch {profile.batch}" if field == "batch" else str(getattr(profile, field)))
    return " · ".join(parts)


def names_of(profiles: Sequence[BundleProfile]) -> list[str]:
    """Return one name per profile; equal names are numbered."""
    plain = [name_of(profile, profiles) for profile in profiles]
    return [
        f"{name} ({plain[: at + 1].count(name)})" if plain.count(name) > 1 else name
        for at, name in enumerate(plain)
    ]


def summary(profiles: Sequence[BundleProfile], names: Sequence[str] = ()) -> Rows:
    """Return a row of texts per bundle: the time of a step, and the largest memory of its graphs by each measure.

    Args:
        profiles: the bundles' profiles.
        names: names of the profiles, in order; by default :func:`names_of`.

    Returns:
        The rows, by column.
    """
    return [
        {
            "tier": name,
            "engine": f"{profile.engine} {profile.engine_version}",
            "step ms": ms(profile.step_ms),
            "forward ms": _part(profile, "forward_ms"),
            "backward ms": _part(profile, "backward_ms"),
            "update ms": _part(profile, "update_ms"),
            "planned MiB": mib(profile.planned_bytes),
            "engine MiB": mib(max(graph.peak.engine_bytes for graph in profile.graphs)),
            "measured MiB": mib(profile.peak_bytes),
            "idle MiB": mib(profile.idle_bytes),
            "trained": f"{profile.parameters:,}",
            "MACs a step": count(profile.slowest.macs if profile.slowest else 0),
            "KiB": f"{profile.artifact_bytes / 1024:.1f}",
        }
        for name, profile in zip(names or names_of(profiles), profiles, strict=True)
    ]


def graphs(profile: BundleProfile) -> Rows:
    """Return a row of texts by column per graph of one bundle: times, energy, memory, operations and size."""
    return [
        {
            "graph": graph.name,
            "kind": graph.kind,
            "load ms": ms(graph.load_ms),
            "median ms": ms(graph.run.median_ms),
            "p90 ms": ms(graph.run.p90_ms),
            "min ms": ms(graph.run.min_ms),
            "energy J": "-" if graph.energy_j is None else f"{graph.energy_j:.3g}",
            "planned MiB": mib(graph.peak.planned_bytes),
            "engine MiB": mib(graph.peak.engine_bytes),
            "measured MiB": mib(graph.peak.rss_bytes),
            "MACs": count(graph.macs),
            "KiB": f"{graph.artifact_bytes / 1024:.1f}",
        }
        for graph in profile.graphs
    ]


def parts(profile: BundleProfile) -> Rows:
    """Return a row of texts by column per part of each training graph, with median and 90th percentile of its time."""
    return [
        {
            "graph": graph.name,
            "part": part,
            "median ms": ms(getattr(graph.split, f"{part}_ms")),
            "p90 ms": ms(getattr(graph.split, f"{part}_p90_ms")),
            "time is": graph.split.how or "-",
        }
        for graph in profile.steps
        if graph.split is not None
        for part in PARTS
    ]


def costliest(profile: BundleProfile) -> Rows:
    """Return a row of texts by column per op that takes most time in the training steps, slowest first.

    If the bundle has no training step, the ops of all its graphs are compared.
    """
    shown = profile.steps or profile.graphs
    pairs = sorted(((op, graph) for graph in shown for op in graph.ops), key=lambda pair: -pair[0].ms)
    return [
        {
            "op": op.op,
            "module": op.module or "-",
            "phase": op.phase or "-",
            "graph": graph.name,
            "ms": ms(op.ms),
            "share": f"{op.share:.1%}",
            "MACs": count(op.macs),
            "time is": op.how or "-",
        }
        for op, graph in pairs[:TOP]
    ]


def chunks(profile: BundleProfile) -> Rows:
    """Return a row of texts by column per chunk (group of frozen units): time to load and run it, bytes read and
    written.
    """
    return [
        {
            "chunk": f"{number} of {len(profile.io)}",
            "units": ", ".join(chunk.units),
            "rows": str(chunk.rows),
            "weights": _moved(chunk.fetch_bytes, chunk.fetch_ms),
            "load ms": ms(chunk.load_ms),
            "reads": _moved(chunk.read_bytes, chunk.read_ms),
            "forward ms": ms(chunk.forward_ms),
            "writes": _moved(chunk.write_bytes, chunk.write_ms),
        }
        for number, chunk in enumerate(profile.io, 1)
    ]


def notes(profile: BundleProfile) -> list[str]:
    """Return remarks on the machine and the measurements."""
    machine = profile.machine
    hows = {graph.split.how for graph in profile.steps if graph.split}
    lines = [
        f"{machine.processor}, {machine.cores} cores, {mib(machine.memory_bytes)} MiB, {machine.system}; "
        f"{profile.threads} thread{'s' if profile.threads > 1 else ''}, batch {profile.batch}",
        "memory: anonymous, above the idle agent (idle MiB); planned: for a round, without evaluation",
        f"energy: {profile.energy_how}",
    ]
    if "shared" in hows:
        lines.append(
            f"{profile.engine}: each instruction of a program was timed; what runs as one shares its time by MACs and bytes"
        )
    if "estimated" in hows:
        lines.append(
            f"{profile.engine}: forward, backward, update and ops are estimated: the step's time, shared out by MACs and "
            "bytes moved"
        )
    if not hows:
        lines.append(
            "the bundle does not name the source of its nodes: export it again for modules and phases"
        )
    return lines


def ms(value: float) -> str:
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def mib(value: float) -> str:
    """Return a number of bytes in MiB with one decimal, or "-" for 0, which means unknown."""
    return sizes.mib(value) if value else "-"


def count(value: int) -> str:
    """Return a count as text, in millions if it is large."""
    return "-" if not value else f"{value / 1e6:.1f} M" if value >= 1e5 else f"{value:,}"


def _moved(size: int, took: float) -> str:
    return f"{size / sizes.MIB:.2f} MiB in {ms(took)} ms"


def _part(profile: BundleProfile, field: str) -> str:
    """Return the time of a part in the slowest training step as text, or "-" if it is unknown. ``field`` names the
    attribute.
    """
    slowest = profile.slowest
    return "-" if slowest is None or slowest.split is None else ms(getattr(slowest.split, field))


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = (
    "body{max-width:1280px}td,th{padding:.25rem .4rem;vertical-align:bottom}td{white-space:nowrap}.wide{overflow-x:auto}"
    "section{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,32rem),1fr));column-gap:1rem}"
    "section>*{grid-column:1/-1;min-width:0}section>figure{grid-column:auto}figure{margin:1rem 0}"
    ".note{color:#777;margin:.2rem 0}"
    # On a phone a row of the summary is a block of named cells, two beside each other, and charts keep a readable size.
    "@media(max-width:40rem){body{margin:.5rem auto}figure{overflow-x:auto}svg{min-width:30rem}"
    ".summary,.summary tbody{display:block}.summary tr{display:grid;grid-template-columns:1fr 1fr;margin-bottom:.8rem}"
    ".summary tr:has(th){display:none}.summary td{display:flex;justify-content:space-between;gap:.5rem}"
    ".summary td::before{content:attr(data-name);opacity:.7}.summary td:nth-child(-n+2){grid-column:1/-1}"
    ".summary td:first-child{font-weight:600}}"
)


def page(
    title: str,
    profiles: Sequence[BundleProfile],
    accuracy: TierAccuracy | None = None,
    *,
    names: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Return the HTML page of profiles.

    Args:
        title: title of the page.
        profiles: the bundles' profiles.
        accuracy: accuracy by tier in a run.
        names: names of the profiles; by default :func:`names_of`.
        notes: remarks below the table.

    Returns:
        The page's text.

    Raises:
        ValueError: if there is no profile.
    """
    if not profiles:
        raise ValueError(f"the page {title!r} has no profile to show")
    names = names or names_of(profiles)
    parts = [
        _table(summary(profiles, names), "summary"),
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
    return html_page(title, parts, style=_STYLE, head=policy)


def _notes(profiles: Sequence[BundleProfile], names: Sequence[str]) -> list[str]:
    """Return the profiles' notes, prefixed with names unless they are all equal."""
    all_notes = [notes(profile) for profile in profiles]
    if all(notes == all_notes[0] for notes in all_notes):
        return all_notes[0]
    return [f"{name}: {note}" for name, notes in zip(names, all_notes, strict=True) for note in notes]


def _bundle(name: str, profile: BundleProfile) -> str:
    sections = [
        f"<h2>{escape(name)}</h2>",
        _memory(name, profile),
        _times(name, profile),
        _table(graphs(profile), "graphs"),
    ]
    if profile.io:
        sections += ["<h3>Multi-step forward pass</h3>", _table(chunks(profile), "chunks")]
    if split := parts(profile):
        sections += ["<h3>Parts of a training step</h3>", _table(split, "parts")]
    if costly := costliest(profile):
        sections += ["<h3>Costliest ops of a training step</h3>", _table(costly, "ops")]
    return f"<section>{''.join(sections)}</section>"


def _memory(name: str, profile: BundleProfile) -> str:
    """Return an SVG chart of the memory above that of an idle process over time, with a colour per stage of the round.

    Values below the idle process are drawn as 0.
    """
    series: dict[str, list[Point]] = {}
    moments = [
        (moment.t_ms, max(0, moment.rss_bytes - profile.idle_bytes) / MIB)
        for moment in profile.timeline.moments
    ]
    for span in profile.timeline.spans:
        points = [point for point in moments if span.start_ms <= point[0] <= span.end_ms]
        # One more connects the line to the next stage.
        points += [point for point in moments if point[0] > span.end_ms][:1]
        if points:
            series.setdefault(_free(span.label, series), points)
    if not series and moments:
        series["round"] = moments
    if not series:
        return ""
    title = f"Memory of a short round, {name}"
    chart = line_chart(
        series, title=title, x="ms", y="MiB over the idle process", x_span=AMOUNT, y_span=AMOUNT
    )
    return _figure(chart, "memory")


def _free(label: str, taken: Mapping[str, object]) -> str:
    """Return ``label``, followed by a number if it is already in ``taken``."""
    names = [label, *(f"{label} ({number})" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def _times(name: str, profile: BundleProfile) -> str:
    """Return an SVG chart of the time of every graph. The bars of training steps are split into their parts."""
    bars: dict[str, float] = {}
    for graph in profile.graphs:
        if graph.split is None:
            bars[graph.name] = graph.run.median_ms
            continue
        for part in PARTS:
            label = part if len(profile.steps) == 1 else f"{part} of {graph.name}"
            bars[label] = getattr(graph.split, f"{part}_ms")
    return _figure(bar_chart(bars, title=f"Time by graph, {name}", y="ms (median)"), "times")


def _beside(profiles: Sequence[BundleProfile], names: Sequence[str], accuracy: TierAccuracy | None) -> str:
    """Return an SVG chart of each tier's memory against its accuracy, or against its share of trained parameters if no
    accuracy is known.
    """
    known = accuracy.by_tier if accuracy else {}
    if accuracy and any(profile.tier in known for profile in profiles):
        heights = [known.get(profile.tier) for profile in profiles]
        what, y, note = "accuracy", accuracy.axis, accuracy.note
    else:
        most = max(profile.parameters for profile in profiles) or 1
        heights = [profile.parameters / most for profile in profiles]
        what, y = "what is trained", "trained parameters, of the largest tier's"
        why = (
            f"The run knows other tiers: {', '.join(known)}."
            if known
            else "No run has the accuracy of the tiers."
        )
        note = f"{why} So memory is shown against how much of the model each trains."
    points = {
        name: [(profile.peak_bytes / MIB, height)]
        for name, profile, height in zip(names, profiles, heights, strict=True)
        if height is not None and profile.peak_bytes
    }
    if not points:
        return ""
    unknown = [name for name, profile in zip(names, profiles, strict=True) if not profile.peak_bytes]
    if unknown:
        note = f"{note} Memory is unknown: {', '.join(unknown)}."
    title = f"Memory against {what}, by tier"
    x = "peak memory over the idle process, MiB"
    chart = line_chart(points, title=title, x=x, y=y, x_span=AMOUNT, y_span=SHARE)
    return _figure(chart, "tiers", note)


def _figure(chart: str, kind: str, note: str = "") -> str:
    caption = f'<figcaption class="note">{escape(note)}</figcaption>' if note else ""
    return f'<figure class="{kind}">{chart}{caption}</figure>'


def _table(found: Rows, kind: str) -> str:
    return f'<div class="wide">{html_table(found, kind)}</div>'
