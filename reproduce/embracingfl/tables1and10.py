"""EmbracingFL's Tables 1 and 10: parameters, activations and capacity of each tier, to the digit.

No training. Activations are counted for 32 samples of ResNet-20, and for one of the CNN and the LSTM, as in the paper. The
average capacities of the mixes are columns of Tables 3 to 5; they are of rounded capacities.
"""

from __future__ import annotations

from edgefl.models.zoo.catalog import build_model
from edgefl.submodels.output_side.submodel import tiers
from edgefl.submodels.width.submodel import Width
from reproduce.embracingfl import accounting
from reproduce.embracingfl.federations import CASES, TIERS, WIDTH, WIDTHS
from reproduce.entry import ONCE, ArmRun, Check, Computed, Entry, Grid, Measurements, Results, grid, note_of

SIZES = {
    "resnet20": ((272_762, 6_947_136, 1.00), (257_994, 2_752_832, 0.42), (206_346, 917_824, 0.16)),
    "cnn": ((6_603_710, 39_742, 1.00), (6_551_614, 2_110, 0.99), (127_038, 62, 0.02)),
    "bilstm": ((3_611_137, 1_310_720, 1.00), (1_051_137, 1_310_720, 0.48), (1_051_137, 655_360, 0.35)),
    WIDTH: ((272_762, 6_947_136, 1.00), (52_874, 3_039_552, 0.43), (10_006, 1_302_848, 0.18)),
}
"""COLUMNS of the strong, moderate and weak tier."""
AVERAGES = {
    "resnet20": (1.00, 0.71, 0.57, 0.49, 0.58, 0.37, 0.27, 0.44, 0.33, 0.30),
    "cnn": (1.00, 0.99, 0.99, 0.99, 0.51, 0.27, 0.14, 0.51, 0.39, 0.26),
    "bilstm": (1.00, 0.74, 0.61, 0.55, 0.68, 0.51, 0.43, 0.55, 0.46, 0.45),
}
COLUMNS = ("parameters", "activations", "capacity")


def run(_run: ArmRun) -> Measurements:
    """Return all counts, from the models and submodels that devices get."""
    figures: dict[str, float] = {}
    for model in SIZES:
        spec = build_model("resnet20" if model == WIDTH else model)
        sliced = {tier: Width(spec, ratio, "floor") for tier, ratio in WIDTHS.items()}
        parts = sliced if model == WIDTH else {tier: size.of(spec) for tier, size in tiers(model).items()}
        capacities = {tier: round(accounting.capacity(part), 2) for tier, part in parts.items()}
        for tier, part in parts.items():
            counts = accounting.tier(part)
            for column, value in zip(COLUMNS, (counts.p, counts.a, capacities[tier]), strict=True):
                figures[f"{model}, {tier}, {column}"] = value
        for case, mix in CASES.items():
            clients = dict(zip(TIERS, mix, strict=True))
            figures[f"{model}, case {case}"] = accounting.average_capacity(capacities, clients)
    return Measurements(figures)


def sizes(title: str, *models: str) -> Grid:
    """Return the grid of Table 1 or 10."""
    paper = {
        f"{model}, {tier}": own for model in models for tier, own in zip(TIERS, SIZES[model], strict=True)
    }
    return grid(
        "model, tier", COLUMNS, paper, lambda row, name: ("counts", f"{row}, {name}"), unit=1, digits=(0, 0, 2),
        title=title,
    )  # fmt: skip


_AVERAGES = {str(case): [own[case - 1] for own in AVERAGES.values()] for case in CASES}
GRIDS = (
    sizes("Table 1", *AVERAGES),
    sizes("Table 10", WIDTH),
    grid("case", list(AVERAGES), _AVERAGES, lambda case, model: ("counts", f"{model}, case {case}"), unit=1),
)  # fmt: skip


def agree(text: str, grid: Grid, within: float = 1e-9) -> Check:
    """Return the check that all of a grid's numbers are the paper's, to ``within``."""

    def test(results: Results) -> tuple[bool, str]:
        off = {each.figure: results.of(each.arm, each.figure) - (each.paper or 0) for each in grid.cells}
        wrong = [figure for figure, each in off.items() if abs(each).max() > within]
        return not wrong, "; ".join(wrong) or f"all {len(off)} agree"

    return Check(text, test)


# fmt: off
ENTRY = Entry(
    "embracingfl/tables1and10", "Tables 1 and 10: size of each tier", lambda _: [Computed("counts", run)], grids=GRIDS,
    checks=[
        agree("Table 1: 27 numbers", GRIDS[0]), agree("Table 10: 9 numbers", GRIDS[1]),
        # The paper rounds 0.545 up and 0.995 down.
        agree("C_avg: 30 numbers, half a last digit", GRIDS[2], 0.005 + 1e-9),
    ],
    note=note_of(__doc__), seeds=ONCE,
)
