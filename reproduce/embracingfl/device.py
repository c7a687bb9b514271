"""EmbracingFL's phone table (its Table 8) on this machine's engines, ratios beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.device_table import EMBRACING, TIERS, WIDTH, DeviceTimes, TableSettings, measure
from reproduce.entry import ArmRun, Claim, Computed, Entry, Measurements, Scale
from reproduce.results import Judged, Results, judge_factory

PHONE: Mapping[str, Mapping[str, Sequence[float]]] = {
    EMBRACING: {"forward": (2095.4, 2095.4, 2095.4), "backward": (419643.8, 197265.0, 85448.3)},
    WIDTH: {"forward": (2010.7, 1431.0, 936.7), "backward": (421047.5, 317669.7, 187580.4)},
}
"""Milliseconds of the paper's Table 8, compute alone, by TIERS: ResNet-20, 32 samples, a OnePlus 9 Pro."""
PAPERS_MODEL = "resnet20"
WEAK_BACKWARD = 0.25
"""At most this share of the strong tier's backward time, for EmbracingFL's weak tier."""
ARM = "one batch"
SHARE, NEXT = "backward / strong", "backward / next stronger"

_SMALL = TableSettings(models=("resnet8",), engines=("onnx",), batch=8, steps=1, repeat=3)
SETTINGS: Mapping[Scale, TableSettings] = {"smoke": _SMALL, "cpu": TableSettings(), "paper": TableSettings()}
"""``paper``: ResNet-20 and the CNN, 32 samples, both engines."""


def run(work: ArmRun) -> Measurements:
    """One batch on every engine, for every model, method and tier."""
    return Measurements(figures(measure(SETTINGS[work.scale], work.progress)))


def figures(times: Sequence[DeviceTimes]) -> dict[str, float]:
    """Times, their ratios to the strong tier's, and EmbracingFL's backward passes over those of the next stronger tier."""
    rows = {(row.engine, row.model, row.method, row.tier): row for row in times}
    found: dict[str, float] = {}
    for (engine, model, method, tier), row in rows.items():
        name = _name(engine, model, method, tier)
        strong = rows[engine, model, method, TIERS[0]]
        found |= {f"{name}: forward, ms": row.forward_ms, f"{name}: backward, ms": row.backward_ms}
        if tier == TIERS[0]:
            continue
        found[f"{name}: forward / strong"] = row.forward_ms / strong.forward_ms
        found[f"{name}: {SHARE}"] = row.backward_ms / strong.backward_ms
        if method == EMBRACING:
            stronger = rows[engine, model, method, TIERS[TIERS.index(tier) - 1]]
            found[f"{name}: {NEXT}"] = row.backward_ms / stronger.backward_ms
    return found


def published() -> dict[str, float]:
    """The paper's ratios, for each of our engines."""
    return {
        f"{_name(engine, PAPERS_MODEL, method, tier)}: {quantity} / strong": phone[at] / phone[0]
        for engine in SETTINGS["paper"].engines
        for method, own in PHONE.items()
        for quantity, phone in own.items()
        for at, tier in enumerate(TIERS)
        if at
    }


def _name(engine: str, model: str, method: str, tier: str) -> str:
    return f"{engine}, {model}, {method}, {tier}"


@judge_factory
def _all(results: Results, ending: str, fits: Callable[[float], bool]) -> Judged:
    """Every figure whose name ends so, in the mean over the seeds."""
    own = {name: results.mean(ARM, name) for name in results.figures[ARM][0] if name.endswith(ending)}
    ours = ", ".join(f"{value:.2f}" for value in own.values())
    return Judged(bool(own) and all(fits(value) for value in own.values()), ours)


ENTRY = Entry(
    name="embracingfl/device",
    what="EmbracingFL, Table 8: forward and backward time of three tiers beside width reduction",
    arms=lambda scale: (Computed(ARM, run, {"scale": scale}),),
    columns=(),
    published={ARM: published()},
    claims=(
        Claim(
            "H8",
            "each EmbracingFL tier's backward pass is shorter than the next stronger one's",
            "0.47, 0.43",
            _all(f": {NEXT}", lambda ratio: ratio < 1),
        ),
        Claim(
            "H8",
            f"the weak tier's backward pass takes at most {WEAK_BACKWARD} of the strong one's",
            "0.20",
            _all(f"{EMBRACING}, {TIERS[-1]}: {SHARE}", lambda ratio: ratio <= WEAK_BACKWARD),
        ),
    ),
    note=(
        "Medians of runs by turns, one thread, each graph in a process of its own. The paper's numbers are ratios on its "
        "phone (compute alone; the backward pass took 200 times as long as the forward pass there). Forward: all chunks of "
        "the multi-step forward pass, and the trained units in training mode; backward: a training step without the latter, "
        "its update included. Width reduction keeps 0.45 and 0.2 of the channels; its strong tier is the same whole model."
    ),
    seeds={"smoke": 1, "cpu": 1, "paper": 1},
)
