"""Figures 2 to 8: accuracies of clients, by round and by size, and how submodels move. The paper gives no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from reproduce.entry import Chart, Claim, Entry, grid, lead
from reproduce.fiarse.federations import PARTIAL, arm
from reproduce.fiarse.measures import LAGS
from reproduce.fiarse.tables import (
    BASELINES,
    CIFAR_10,
    FIVE_BASELINES,
    OTHER_DATA,
    SIZES_4,
    SIZES_5,
    best,
    entry,
)


# fmt: off
def _histogram(others: Sequence[str]) -> dict[str, Any]:
    chart = Chart("clients.svg", "Clients by local accuracy", "clients", "accuracy, %", arms=(*others, "FIARSE"))
    median = Claim("FIARSE's median client is most accurate", best("FIARSE", others, "median client"))
    return {"methods": (*others, "FIARSE"), "charts": [chart], "claims": [median]}


def _curves(others: Sequence[str], sizes: Sequence[str]) -> dict[str, Any]:
    charts = [Chart(f"{at}.svg", f"Global accuracy, size {size}", f"global {size}", arms=(*others, "FIARSE"))
              for at, size in enumerate(sizes)]
    below = [lead(other, "FIARSE", "rounds below 1") for other in others]
    whole = [lead(other, early, "rounds 1") for early in ("FIARSE", "FedRolex") for other in others if other != "FedRolex"]
    return {"methods": (*others, "FIARSE"), "charts": charts, "claims": [
        Claim("below size 1 FIARSE is the first at 70 %", below, unit=1.0, digits=1),
        Claim("at size 1 FIARSE, FedRolex are sooner", whole, unit=1.0, digits=1),
    ]}


def _moves(sizes: Sequence[str], judged: Sequence[str]) -> dict[str, Any]:
    drawn = {f"moved{lag}": [f"moved {lag} {size}" for size in sizes] for lag in LAGS}
    drawn["explored"] = ["ever trained", *(f"explored {size}" for size in sizes)]
    names = [[f"moved {lag} {size}" for size in judged] for lag in LAGS]
    settled = [lead("FIARSE", "FIARSE", f"first {name}", other_figure=name) for each in names for name in each]
    earlier = [lead("FIARSE", "FIARSE", small, other_figure=large) for each in names for small, large in pairwise(each)]
    return {
        "methods": ["FIARSE"],
        "charts": [Chart(f"{name}.svg", name, "", y="share", arms=("FIARSE",), lines=each) for name, each in drawn.items()],
        "claims": [Claim("a size's mask moves less at the end", settled), Claim("larger sizes' masks move less", earlier)],
    }


_SIZES = [Chart("sizes.svg", "Global accuracy by size", "sizes", "share of parameters", arms=(*BASELINES, "FIARSE"))]
_UNSEEN = [
    Claim("half the smallest: FIARSE leads by 10", best("FIARSE", BASELINES, "half"), "at least +10", 0.1),
    Claim("a quarter of it: FIARSE leads by 10", best("FIARSE", BASELINES, "quarter"), "at least +10", 0.1),
    Claim("between the sizes: FIARSE is above all", best("FIARSE", BASELINES, "between")),
]
_GRID_4 = grid("", ["quarter", "half", "between"], dict.fromkeys((*BASELINES, "FIARSE"), [None] * 3), lambda *cell: cell,
               title=CIFAR_10)
_NOTE_4 = (
    "Runs of Table 1. Global accuracy at a quarter and half of the smallest size and, in the mean, between the sizes (cpu: "
    "1/64, 1/32, 1/8 and 1/2). FedRolex's windows are where the last round trained them, which favours it."
)
_ASSUMED = "Runs of Table 5. The specification does not say which sizes this figure has: five are assumed."
_DEFINED = "Runs of Table 1. Measures as the specification defines them (A12); the paper does not."
_TRAINED = Claim("fewer than 5 % are never trained", lambda results: results.of("FIARSE", "ever trained"),
                 "to zero", 0.95, digits=1)
_MOVES_8 = _moves(SIZES_5[:4], SIZES_5[:4])
FIGURES = (
    entry("Figure 2: clients by local accuracy", "table1", **_histogram(BASELINES), note="Runs of Table 1."),
    entry("Figure 3: global accuracy by round", "table1", **_curves(BASELINES, SIZES_4), note="Runs of Table 1."),
    entry("Figure 4: sizes never trained", "table1", (*BASELINES, "FIARSE"), charts=_SIZES, claims=_UNSEEN, grids=[_GRID_4],
          note=_NOTE_4),
    entry("Figure 5: clients by local accuracy", "table5", **_histogram(FIVE_BASELINES), note=_ASSUMED),
    entry("Figure 6: global accuracy by round", "table5", **_curves(FIVE_BASELINES, SIZES_5), note=_ASSUMED),
    entry("Figure 7: how submodels move", "table1", **_moves(SIZES_4[:3], SIZES_4[1:3]), note=_DEFINED),
    Entry(
        "fiarse/figure8", "Figure 8: how they move if nobody holds all", lambda scale: [arm("FIARSE", PARTIAL[scale])],
        claims=[_TRAINED, *_MOVES_8["claims"]], charts=_MOVES_8["charts"], other_data=OTHER_DATA,
        note="Scale cpu: data of Table 1, 60 clients, 6 a round, an MLP 784-64-32-10, 300 rounds. Measures as in Figure 7.",
    ),
)
# fmt: on
