"""EmbracingFL's Tables 3 to 7: mixes of strong, moderate and weak clients on images and texts, and rounds to a target.

Numbers of clients are the paper's, of 128. At scale cpu: ResNet-8 (16/32/64 channels, cuts behind blocks 1 and 2) on 16x16
means of 30,000 images; 32 clients, Dirichlet 0.5. Half of them are in each of 60 rounds of 10 steps. Learning rates are from
embracingfl/pilot. The paper: ResNet-20, 50,000 whole images, 128 clients, a quarter of them in each of 1,000 rounds of 10
steps, Dirichlet 0.1, rate 0.4. EmbracingFL has global batch norm, and width reduction static. Cells: best accuracy of a run,
as in the paper. Table 7's target is width reduction's best accuracy, rounded down to a percent: here of the run with the
same seed, in the paper of the mean. A run that never gets there counts with all its rounds.

Scale paper, 3 seeds: about 1,200 core-hours (600 h on 2 cores, 19 h on 64), from rounds of 2 clients: 1.3 s a step of all
strong. GPU: not measured. Clients have equal sizes there (dirichlet_clients), because Dirichlet 0.1 of two labels leaves
some of 128 clients without samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgefl.wire.tensors import Array
from reproduce import entry
from reproduce.embracingfl import federations
from reproduce.embracingfl.federations import ALL_STRONG, CASES, EMBRACING, WIDTH, Table, ahead
from reproduce.entry import Arm, Claim, Contrast, Entry, Results, Scale

# fmt: off
METHODS = [WIDTH, EMBRACING]
TABLES_3_TO_6 = {
    1: (80.45, 80.45, 81.27, 82.15), 2: (76.77, 80.20, 81.80, 82.21), 3: (67.92, 79.78, 81.55, 82.09),
    4: (59.03, 79.72, 80.44, 82.55), 5: (72.97, 80.08, 80.80, 80.38), 6: (69.70, 78.91, 80.78, 77.09),
    7: (54.53, 76.98, 79.63, 74.89), 8: (67.93, 80.33, 81.29, 79.09), 9: (59.59, 79.63, 81.18, 79.41),
    10: (58.17, 77.63, 81.17, 77.32),
}
"""Accuracy by case: width reduction and EmbracingFL on CIFAR-10 (Tables 6 and 3), EmbracingFL on FEMNIST (4), IMDB (5)."""
TABLE_7 = {
    1: (80, 890, 890), 2: (76, 867, 817), 3: (67, 982, 801), 4: (59, 836, 483), 5: (72, 813, 811), 6: (69, 806, 629),
    7: (54, 939, 572),
}
"""Target in percent; rounds of width reduction and of EmbracingFL."""
JUDGED = (2, 4, 5, 7)
"""Cases that are run at scale cpu, beside all strong: 50 and 87.5 % moderate, 50 and 87.5 % weak."""
CORNER = "case: strong / moderate / weak"
ROWS = {f"{case}: {' / '.join(str(8 * share) for share in mix)}": case for case, mix in CASES.items()}
TEXTS = federations.COMMON | {
    "model.name": "bilstm", "data.name": "imdb", "data.length": 256, "data.vocabulary": 10_000, "data.test_samples": 0,
    "data.partition": "dirichlet_clients", "data.alpha": 0.1, "federation.rounds": 400, "algorithm.steps": 10,
    "algorithm.lr": 0.1, "round.fraction": 0.25, "round.lr_decay_at": [0.5, 0.75],
}
# fmt: on


def name(case: int, method: str = EMBRACING) -> str:
    """Return the name of an arm."""
    return ALL_STRONG if case == 1 else f"{method}, case {case}"


def arms(scale: Scale) -> list[Arm]:
    """Return the arms of Tables 3, 6 and 7."""
    cases = JUDGED if scale == "cpu" else CASES
    wanted = {name(case, method): (CASES[case], method) for method in METHODS for case in (1, *cases)}
    return [entry.Federated(arm, federations.images(scale, *mix)) for arm, mix in wanted.items()]


def text_arms(scale: Scale) -> list[Arm]:
    """Return the arms of Table 5: moderate clients freeze the embedding, weak ones half of the words as well."""
    frozen: dict[str, Table] = {"moderate": {"cut": 1}, "weak": {"cut": 1, "options": {"skip": 0.5}}}
    mixes = {case: federations.tiers(scale, mix, frozen) for case, mix in CASES.items() if scale == "paper"}
    return [entry.Federated(name(case), TEXTS | {"tiers": own}) for case, own in mixes.items()]


def rounds(case: int, method: str) -> Contrast:
    """Return the contrast of the rounds to the target of a case."""
    arm = name(case, method)
    return lambda results: _reached(results, arm, case, results.common_seeds(arm, name(case, WIDTH)))


def fewer_rounds(case: int) -> Contrast:
    """Return the contrast by how many rounds EmbracingFL is earlier at the target."""
    theirs, ours = (name(case, method) for method in METHODS)

    def differences(results: Results) -> Array:
        seeds = results.common_seeds(theirs, ours)
        difference: Array = _reached(results, theirs, case, seeds) - _reached(results, ours, case, seeds)
        return difference

    return differences


def _reached(results: Results, arm: str, case: int, seeds: Sequence[int]) -> Array:
    """Return the rounds that an arm needs to the best accuracy of width reduction in its case, float64 (seeds,)."""
    reached = []
    for seed, best in zip(seeds, results.of(name(case, WIDTH), "best", seeds), strict=True):
        line, target = results.runs[arm][seed].lines["accuracy"], np.floor(100 * best + 1e-6) / 100
        reached.append(next((x for x, y in line if y >= target), line[-1][0]))
    return np.array(reached)


def accuracies(columns: list[str], *places: int, title: str = entry.OURS_JPEG) -> entry.Grid:
    """Return the grid of a table of accuracies, with numbers at these places of TABLES_3_TO_6."""
    numbers = {row: [TABLES_3_TO_6[case][at] for at in places] for row, case in ROWS.items()}
    return entry.grid(
        CORNER, columns, numbers, lambda row, method: (name(ROWS[row], method), "best"), title=title
    )


def costs(place: int) -> list[Claim]:
    """Return the claims on the cost of moderate and weak clients, with the paper's numbers at a place of TABLES_3_TO_6."""
    half, most, weak = (TABLES_3_TO_6[case][place] - TABLES_3_TO_6[1][place] for case in (2, 4, 7))
    lost = [ahead(name(case), ALL_STRONG) for case in (2, 4)]
    return [
        Claim("moderate clients cost < 0.8 points", lost, f"{half:+.2f}; {most:+.2f}", least=-0.008),
        Claim("87.5 % weak cost more than moderate", ahead(name(4), name(7)), f"{most - weak:+.2f}"),
    ]


def pair(case: int) -> tuple[str, str]:
    """Return the arms of EmbracingFL and width reduction."""
    return name(case), name(case, WIDTH)


def targets() -> entry.Grid:
    """Return the grid of Table 7."""
    rows = {f"{row}, {TABLE_7[case][0]} %": case for row, case in ROWS.items() if case in TABLE_7}

    def cell(row: str, method: str) -> tuple[str, str, Contrast]:
        return name(rows[row], method), "rounds", rounds(rows[row], method)

    numbers = {row: TABLE_7[case][1:] for row, case in rows.items()}
    return entry.grid(f"{CORNER}, target", METHODS, numbers, cell, unit=1, digits=0, title=entry.OURS_JPEG)


# fmt: off
NOTE, TEXT_HOURS = entry.notes_of(__doc__)
ENTRY_4 = Entry(
    "embracingfl/table4", "Table 4: mixed clients, FEMNIST", grids=[accuracies([EMBRACING], 2, title="")],
    needs="LEAF's FEMNIST with its writers (not at hand).",
)
ENTRY_5 = Entry(
    "embracingfl/table5", "Table 5: mixed clients, IMDB", text_arms, [accuracies([EMBRACING], 3, title="")], costs(3),
    needs=TEXT_HOURS,
)
ENTRY_6 = Entry(
    "embracingfl/table6", "Table 6: EmbracingFL and width reduction", arms, grids=[accuracies(METHODS, 0, 1)],
    claims=[
        Claim("EmbracingFL is ahead in 2, 4, 5 and 7", [ahead(*pair(case)) for case in JUDGED],
              "; ".join(f"{TABLES_3_TO_6[case][1] - TABLES_3_TO_6[case][0]:+.2f}" for case in JUDGED)),
        Claim("its lead grows from case 2 to 4", entry.larger_lead(pair(4), pair(2), "best"), "+17.26"),
        Claim("its lead grows from case 5 to 7", entry.larger_lead(pair(7), pair(5), "best"), "+15.34"),
    ],
    charts=[entry.Chart(f"case{case}.svg", f"case {case}", "accuracy", arms=[ALL_STRONG, *pair(case)]) for case in (4, 7)],
    note=NOTE, needs=federations.HOURS, other_data=entry.JPEG,
)
ENTRY_3 = entry.part(
    ENTRY_6, "embracingfl/table3", "Table 3: mixed clients, CIFAR-10", lambda arm: WIDTH not in arm,
    grids=[accuracies([EMBRACING], 1)], claims=costs(1), note=NOTE, other_data=entry.JPEG,
)
ENTRY_7 = entry.part(
    ENTRY_6, "embracingfl/table7", "Table 7: rounds to a target", grids=[targets()],
    claims=[
        Claim("EmbracingFL is earlier in 2, 4, 5 and 7", [fewer_rounds(case) for case in JUDGED],
              "; ".join(f"{TABLE_7[case][1] - TABLE_7[case][2]}" for case in JUDGED), unit=1, digits=1)
    ],
    note=NOTE, other_data=entry.JPEG,
)
