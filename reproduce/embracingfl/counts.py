"""EmbracingFL's Tables 1 and 10: parameters, activations and capacity of each tier, to the digit."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.output_side.submodel import tiers
from edgefl.submodels.width.submodel import Width
from reproduce.embracingfl import accounting
from reproduce.embracingfl.mixes import CASES, SIXTEENTHS, WIDTHS
from reproduce.entry import ArmRun, Claim, Computed, Entry, Measurements
from reproduce.results import Judged, Results, judge_factory

ARM = "counts"
TABLE_1: Mapping[tuple[str, str], tuple[int, int, float]] = {
    ("resnet20", "strong"): (272_762, 6_947_136, 1.00),
    ("resnet20", "moderate"): (257_994, 2_752_832, 0.42),
    ("resnet20", "weak"): (206_346, 917_824, 0.16),
    ("cnn", "strong"): (6_603_710, 39_742, 1.00),
    ("cnn", "moderate"): (6_551_614, 2_110, 0.99),
    ("cnn", "weak"): (127_038, 62, 0.02),
    ("bilstm", "strong"): (3_611_137, 1_310_720, 1.00),
    ("bilstm", "moderate"): (1_051_137, 1_310_720, 0.48),
    ("bilstm", "weak"): (1_051_137, 655_360, 0.35),
}
"""p, a and C as printed (embracingfl.md 3.4)."""
TABLE_10: Mapping[str, tuple[int, int, float]] = {
    "strong": (272_762, 6_947_136, 1.00),
    "moderate": (52_874, 3_039_552, 0.43),
    "weak": (10_006, 1_302_848, 0.18),
}
AVERAGES: Mapping[str, tuple[float, ...]] = {
    "resnet20": (1.00, 0.71, 0.57, 0.49, 0.58, 0.37, 0.27, 0.44, 0.33, 0.30),
    "cnn": (1.00, 0.99, 0.99, 0.99, 0.51, 0.27, 0.14, 0.51, 0.39, 0.26),
    "bilstm": (1.00, 0.74, 0.61, 0.55, 0.68, 0.51, 0.43, 0.55, 0.46, 0.45),
}
"""C_avg of the ten mixes, Tables 3 to 5 (embracingfl.md 3.6)."""
_FIRST, _TENTH, _MEAN = "Table 1", "Table 10", "Tables 3-5"
_WITHIN = 0.0100001
"""The paper's averages are of rounded capacities, and some are cut, not rounded, to two digits."""


def run(_work: ArmRun) -> Measurements:
    """Every count, from the models and their submodels as devices get them."""
    figures: dict[str, float] = {}
    for model in AVERAGES:
        spec, capacities = build_model(model), {}
        for tier, size in tiers(model).items():
            submodel = size.of(spec)
            counted, capacities[tier] = accounting.tier(submodel), accounting.capacity(submodel)
            figures |= _figures(f"{_FIRST}, {model}, {tier}", counted, capacities[tier])
        for case, mix in CASES.items():
            clients = {tier: count for tier, count in mix.counts.items() if count}
            figures[f"{_MEAN}, {model}, case {case}: C_avg"] = accounting.average_capacity(
                capacities, clients
            )
    whole = build_model("resnet20")
    for tier in TABLE_10:
        slice_ = Width(whole, WIDTHS.get(tier, 1.0), "floor")
        figures |= _figures(f"{_TENTH}, {tier}", accounting.tier(slice_), accounting.capacity(slice_))
    return Measurements(figures)


def _figures(name: str, counted: accounting.TrainedPartCounts, capacity: float) -> dict[str, float]:
    return {f"{name}: p": counted.p, f"{name}: a": counted.a, f"{name}: C": round(capacity, 2)}


def published() -> dict[str, float]:
    """The paper's numbers by the figures' names."""
    known: dict[str, float] = {}
    for (model, tier), printed in TABLE_1.items():
        known |= dict(zip((f"{_FIRST}, {model}, {tier}: {each}" for each in "paC"), printed, strict=True))
    for tier, printed in TABLE_10.items():
        known |= dict(zip((f"{_TENTH}, {tier}: {each}" for each in "paC"), printed, strict=True))
    for model, averages in AVERAGES.items():
        known |= {
            f"{_MEAN}, {model}, case {case}: C_avg": average for case, average in enumerate(averages, start=1)
        }
    return known


@judge_factory
def _agree(results: Results, table: str, within: float = 0.0) -> Judged:
    """All of the paper's numbers of a table, to ``within``."""
    known = {name: value for name, value in published().items() if name.startswith(f"{table},")}
    wrong = [
        f"{name} {results.mean(ARM, name):,.6g}"
        for name, value in known.items()
        if abs(results.mean(ARM, name) - value) > within
    ]
    return Judged(not wrong, "; ".join(wrong) if wrong else f"all {len(known)} agree")


ENTRY = Entry(
    name="embracingfl/accounting",
    what="EmbracingFL, Tables 1 and 10: parameters, activations and capacity of every tier",
    arms=lambda _: (Computed(ARM, run),),
    columns=(),
    published={ARM: published()},
    claims=(
        Claim("H5", "Table 1: p, a and C of nine tiers", "27 numbers", _agree(_FIRST), exact=True),
        Claim("H5", "Table 10: p, a and C of three widths", "9 numbers", _agree(_TENTH), exact=True),
        Claim(
            "H5",
            "Tables 3 to 5: C_avg of ten mixes, within 0.01",
            "30 numbers",
            _agree(_MEAN, _WITHIN),
            exact=True,
        ),
    ),
    note=(
        "No training. Activations are counted for 32 samples of ResNet-20 and for one of the CNN and the LSTM, as the "
        f"paper does. C_avg is of mixes in {SIXTEENTHS}ths of the clients."
    ),
    seeds={"smoke": 1, "cpu": 1, "paper": 1},
)
