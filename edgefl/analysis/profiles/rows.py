"""Profiles as rows of text, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.system import sizes
from edgefl.wire.bundle.profiles import BundleProfile

Rows = list[dict[str, str]]
TOP = 12
PARTS = ("forward", "backward", "update")


def name_of(profile: BundleProfile, beside: Sequence[BundleProfile] = ()) -> str:
    """The tier, with whatever else tells it from the profiles ``beside`` it."""
    parts = [profile.tier, *([profile.exchange] if profile.exchange else [])]
    for field in ("model", "program", "engine", "batch"):
        if len({getattr(other, field) for other in beside}) > 1:
            parts.append(f"batch {profile.batch}" if field == "batch" else str(getattr(profile, field)))
    return " · ".join(parts)


def names_of(profiles: Sequence[BundleProfile]) -> list[str]:
    """One name each, numbered where they would be the same."""
    plain = [name_of(profile, profiles) for profile in profiles]
    return [
        f"{name} ({plain[: at + 1].count(name)})" if plain.count(name) > 1 else name
        for at, name in enumerate(plain)
    ]


def summary(profiles: Sequence[BundleProfile], names: Sequence[str] = ()) -> Rows:
    """A row for each bundle: what a step takes, and the most memory of all its graphs by each measure. ``names``: in place
    of :func:`names_of`."""
    return [
        {
            "tier": name,
            "engine": f"{profile.engine} {profile.engine_version}",
            "step ms": ms(profile.step_ms),
            "forward ms": _part(profile, "forward_ms"),
            "backward ms": _part(profile, "backward_ms"),
            "update ms": _part(profile, "update_ms"),
            "planned MiB": mib(max(graph.peak.planned_bytes for graph in profile.graphs)),
            "engine MiB": mib(max(graph.peak.engine_bytes for graph in profile.graphs)),
            "RSS MiB": mib(profile.peak_bytes),
            "idle MiB": mib(profile.idle_bytes),
            "trained": f"{profile.parameters:,}",
            "MACs a step": count(profile.slowest.macs if profile.slowest else 0),
            "KiB": f"{profile.artifact_bytes / 1024:.1f}",
        }
        for name, profile in zip(names or names_of(profiles), profiles, strict=True)
    ]


def graphs(profile: BundleProfile) -> Rows:
    """A row for each graph of one bundle."""
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
            "RSS MiB": mib(graph.peak.rss_bytes),
            "MACs": count(graph.macs),
            "KiB": f"{graph.artifact_bytes / 1024:.1f}",
        }
        for graph in profile.graphs
    ]


def parts(profile: BundleProfile) -> Rows:
    """What each training graph computes: the median call's time, and that of the call which nine tenths do not exceed."""
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
    """The ops that take most of a training step; of all graphs where none trains."""
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
    """The I/O of each chunk of the multi-step forward pass."""
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
    """What a reader has to know to read the numbers."""
    machine = profile.machine
    hows = {graph.split.how for graph in profile.steps if graph.split}
    lines = [
        f"{machine.processor}, {machine.cores} cores, {mib(machine.memory_bytes)} MiB, {machine.system}; "
        f"{profile.threads} thread{'s' if profile.threads > 1 else ''}, batch {profile.batch}",
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
            "the bundle does not tell where its nodes come from: export it again for modules and phases"
        )
    return lines


def ms(value: float) -> str:
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def mib(value: float) -> str:
    """MiB with one decimal; "-" for 0, which is unknown."""
    return sizes.mib(value) if value else "-"


def count(value: int) -> str:
    """Large counts in millions."""
    return "-" if not value else f"{value / 1e6:.1f} M" if value >= 1e5 else f"{value:,}"


def _moved(size: int, took: float) -> str:
    return f"{size / sizes.MIB:.2f} MiB in {ms(took)} ms"


def _part(profile: BundleProfile, field: str) -> str:
    """Of the slowest step, as :attr:`BundleProfile.step_ms`."""
    slowest = profile.slowest
    return "-" if slowest is None or slowest.split is None else ms(getattr(slowest.split, field))
