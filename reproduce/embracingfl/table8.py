"""EmbracingFL's Table 8: time of a batch on a phone, measured on the engines of this machine.

The paper's phone is a OnePlus 9 Pro, ours one core of the processor named above, so only shares of the strong tier's time
are judged: medians of runs by turns. Forward: all chunks of the multi-step forward pass and the trained units; backward: the
rest of a training step. Width reduction keeps 0.45 and 0.2 of the channels; its strong tier is the same whole model. I/O is
not measured, and the paper's sums with it are left out. It measured EmbracingFL's forward pass once for all tiers; the 5 %
are ours. Seeds are repetitions.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from itertools import product

from benchmarks.device_table import EMBRACING, TIERS, WIDTH, TableSettings, measure
from edgefl.wire.bundle.formats import FORMATS
from reproduce.entry import ArmRun, Claim, Computed, Entry, Grid, Lead, Measurements, Scale, grid, note_of

# fmt: off
COLUMNS = (EMBRACING, "I/O", WIDTH)
PHONE = {
    "forward, strong": (2095.4, None, 2010.7), "backward, strong": (419643.8, None, 421047.5),
    "forward, moderate": (2095.4, 678.4, 1431.0), "backward, moderate": (197265.0, None, 317669.7),
    "forward, weak": (2095.4, 1316.8, 936.7), "backward, weak": (85448.3, None, 187580.4),
}
"""Milliseconds of COLUMNS: ResNet-20, 32 samples, a OnePlus 9 Pro."""
# fmt: on


def timed(engine: str, settings: TableSettings, run: ArmRun) -> Measurements:
    """Return milliseconds by "pass, tier, method", and their shares of the strong tier's."""
    times = measure(replace(settings, engines=(engine,)), run.progress)
    figures: dict[str, float] = {}
    whole = {row.method: row for row in times if row.tier == "strong"}
    for row, part in product(times, ("forward", "backward")):
        ms, name = getattr(row, f"{part}_ms"), f"{part}, {row.tier}, {row.method}"
        figures |= {name: ms, f"{name}, share": ms / getattr(whole[row.method], f"{part}_ms")}
    return Measurements(figures)


def arms(scale: Scale) -> list[Computed]:
    """Return an arm for each engine."""
    small, whole = TableSettings(("resnet8",), batch=8, steps=1, repeat=3), TableSettings(("resnet20",))
    settings = small if scale == "smoke" else whole
    return [Computed(each, partial(timed, each, settings), asdict(settings)) for each in FORMATS]


def shares(text: str, paper: str, *pairs: tuple[str, str], margin: float | None = None) -> list[Claim]:
    """Return a claim for each engine: the first share of each pair is larger, or equal within ``margin``."""
    made = []
    for engine in FORMATS:
        contrasts = [Lead(engine, engine, f"{a}, share", other_figure=f"{b}, share") for a, b in pairs]
        made.append(Claim(f"{engine}: {text}", contrasts, paper, margin=margin, unit=1))
    return made


def phone(engine: str) -> Grid:
    """Return the paper's table, with the times of an engine."""

    def cell(row: str, name: str) -> tuple[str, str] | None:
        return (engine, f"{row}, {name}") if PHONE[row][COLUMNS.index(name)] else None

    title = f"{engine} (in brackets: the phone)"
    return grid("pass, tier", COLUMNS, PHONE, cell, unit=1, digits=1, title=title)


E_STRONG, E_MODERATE, E_WEAK = (f"backward, {tier}, {EMBRACING}" for tier in TIERS)
W_MODERATE, W_WEAK = (f"backward, {tier}, {WIDTH}" for tier in TIERS[1:])
FORWARD = [f"forward, {tier}, {EMBRACING}" for tier in TIERS]
# fmt: off
ENTRY = Entry(
    "embracingfl/table8", "Table 8: time of a batch on a device, ms", arms, grids=[phone(engine) for engine in FORMATS],
    claims=[
        *shares("backward shrinks with tiers", "+0.53; +0.27", (E_STRONG, E_MODERATE), (E_MODERATE, E_WEAK)),
        *shares("backward below width's", "+0.28; +0.24", (W_MODERATE, E_MODERATE), (W_WEAK, E_WEAK)),
        *shares("forward equal, within 5 %", "one time for all tiers",
                (FORWARD[1], FORWARD[0]), (FORWARD[2], FORWARD[0]), margin=0.05),
    ],
    note=note_of(__doc__),
)
