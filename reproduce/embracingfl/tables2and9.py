"""EmbracingFL's Tables 2 and 9 and Figure 4: few strong clients with more and more weak ones, and batch norm.

The samples are spread over all clients once; 12.5 % are strong, and those that are neither strong nor weak never take part.
All others are in each round. Numbers of clients are the paper's, of 128. At scale cpu: ResNet-8 (16/32/64 channels, cuts
behind blocks 1 and 2) on 16x16 means of 30,000 images, 32 clients, Dirichlet 0.5, 60 rounds of 10 steps, learning rates from
embracingfl/pilot. The paper: ResNet-20, 50,000 whole images, 128 clients, Dirichlet 0.1, 1,000 rounds of 10 steps, rate 0.4.
In Table 2 EmbracingFL has global batch norm, and width reduction static. Static batch norm is evaluated with the statistics
of 5,000 training samples, and edgefl does so for width submodels with global batch norm, too. The row "width reduction,
global" of Table 9 is evaluated with the moving statistics that the server averaged, as in the paper. Cells: best accuracy of
a run, as in the paper.
"""

from __future__ import annotations

from edgefl.api.simulate import Simulation
from edgefl.lab.deployment import DeploymentBuilder
from edgefl.setup.data import open_data
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire import tensors
from reproduce import entry
from reproduce.embracingfl.federations import EMBRACING, HOURS, WIDTH, ahead, images
from reproduce.entry import OURS_JPEG, Arm, Chart, Claim, Entry, Federated, Scale, grid, larger_lead

# fmt: off
WEAK = {"0 weak": 0, "16 weak": 2, "32 weak": 4, "64 weak": 8, "112 weak": 14}
"""Sixteenths of all clients, beside 2 strong ones."""
JUDGED = ("16 weak", "112 weak")
"""Rows that are run at scale cpu, beside none."""
METHODS = (WIDTH, EMBRACING)
TABLE_2 = {
    "0 weak": (60.15, 60.15), "16 weak": (61.34, 66.62), "32 weak": (62.09, 72.60), "64 weak": (63.68, 74.79),
    "112 weak": (65.01, 77.34),
}
TABLE_9 = {
    "width reduction, static": [64.01], "width reduction, global": [19.21], "EmbracingFL, static": [74.49],
    "EmbracingFL, global": [77.34],
}
ALONE, W_STATIC, W_GLOBAL, E_STATIC, E_GLOBAL = (
    "strong alone", "width reduction, 112 weak", "width reduction, global", "EmbracingFL, static", "EmbracingFL, 112 weak",
)
NORMS = dict(zip(TABLE_9, (W_STATIC, W_GLOBAL, E_STATIC, E_GLOBAL), strict=True))
"""Arms by row of Table 9: the first and the last are Table 2's."""
# fmt: on


def name(method: str, weak: str) -> str:
    """Return the name of an arm of Table 2."""
    return f"{method}, {weak}" if WEAK[weak] else ALONE


def arms(scale: Scale) -> list[Arm]:
    """Return the arms of both tables."""
    shown = ("0 weak", *JUDGED) if scale == "cpu" else WEAK
    mixed = {name(method, weak): (WEAK[weak], method, "") for method in METHODS for weak in shown}
    wanted = mixed | {E_STATIC: (14, EMBRACING, "static")}
    found = [
        Federated(arm, images(scale, (2, 0, weak), method, bn=bn, everyone=True))
        for arm, (weak, method, bn) in wanted.items()
    ]
    narrow = images(scale, (2, 0, 14), WIDTH, bn="global", everyone=True)
    kept = {"simulation.keep_every": narrow["round.evaluate_every"]}
    return [*found, Federated(W_GLOBAL, narrow | kept, with_moving_statistics)]


def with_moving_statistics(simulation: Simulation) -> entry.Measurements:
    """Return the accuracies of a simulation's models with the moving statistics that the server averaged."""
    dataset, line = open_data(simulation.federation), []
    for number, file in simulation.kept.items():
        weights = tensors.load(file.read_bytes())
        model = DeploymentBuilder.of(simulation.federation, dataset, weights, bn_eval="moving")
        line.append((float(number), model.score(model.module(OutputSide(model.spec, 0)))))
    figures = {"accuracy": entry.tail(line), "best": max(value for _, value in line)}
    return entry.Measurements(figures, {"accuracy": line})


# fmt: off
ENTRY_2 = Entry(
    "embracingfl/table2", "Table 2 and Figure 4: more weak clients", arms,
    grids=[grid("16 strong and", METHODS, TABLE_2, lambda row, method: (name(method, row), "best"), title=OURS_JPEG)],
    claims=[
        Claim("weak clients raise EmbracingFL", ahead(E_GLOBAL, ALONE), "+17.19"),
        Claim("EmbracingFL is ahead, 16 and 112 weak",
              [ahead(name(EMBRACING, weak), name(WIDTH, weak)) for weak in JUDGED], "+5.28; +12.33"),
        Claim("its lead grows from 16 to 112 weak",
              larger_lead((E_GLOBAL, W_STATIC), (name(EMBRACING, "16 weak"), name(WIDTH, "16 weak")), "best"), "+7.05"),
    ],
    charts=[
        Chart(f"figure4{panel}.svg", method, "accuracy", arms=[name(method, weak) for weak in WEAK])
        for panel, method in zip("ab", METHODS, strict=True)
    ],
    note=entry.note_of(__doc__), needs=HOURS, other_data=entry.JPEG,
)
ENTRY_9 = entry.part(
    ENTRY_2, "embracingfl/table9", "Table 9: static and global batch norm", lambda arm: arm in NORMS.values(),
    grids=[grid("16 strong, 112 weak", ["accuracy"], TABLE_9, lambda row, _: (NORMS[row], "best"), title=OURS_JPEG)],
    claims=[
        Claim("width reduction needs static batch norm", ahead(W_STATIC, W_GLOBAL), "+44.80"),
        Claim("EmbracingFL is better with global", ahead(E_GLOBAL, E_STATIC), "+2.85"),
        Claim("EmbracingFL is ahead with either", [ahead(own, W_STATIC) for own in (E_GLOBAL, E_STATIC)], "+13.33; +10.48"),
    ],
    note=ENTRY_2.note, other_data=entry.JPEG,
)
