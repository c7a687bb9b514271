"""EmbracingFL's Table 2: what weak clients add to a few strong ones."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.papers.embracingfl.mixes import EMBRACING, SIXTEENTHS, WIDTH, Method, Mix, image_settings
from edgefl.papers.entry import Arm, Chart, Claim, Entry, Federated, Scale, percent
from edgefl.papers.results import Judged, Results, above, told

STRONG = 2
"""Sixteenths of all clients; with ADDED weak ones."""
ADDED = (6, 14)
ALONE = "2/16 strong alone"
PUBLISHED = {
    ALONE: 0.6015,
    "width reduction, 6/16 weak": 0.6368,
    "width reduction, 14/16 weak": 0.6501,
    "EmbracingFL, 6/16 weak": 0.7479,
    "EmbracingFL, 14/16 weak": 0.7734,
}
"""Of 16 strong clients with 0, 64 (the nearest to 6/16 of 128, which is 48) and 112 weak ones."""


def name(method: Method, weak: int) -> str:
    """Of an arm."""
    return f"{method}, {weak}/16 weak"


def arms(scale: Scale) -> Sequence[Arm]:
    alone = Federated(ALONE, image_settings(scale, Mix(STRONG), absent=SIXTEENTHS - STRONG))
    return [
        alone,
        *(
            Federated(
                name(method, weak),
                image_settings(scale, Mix(STRONG, weak=weak), method, absent=SIXTEENTHS - STRONG - weak),
            )
            for method in (EMBRACING, WIDTH)
            for weak in ADDED
        ),
    ]


def steeper(results: Results) -> Judged:
    """Accuracy gained by all the weak clients, EmbracingFL's more than width reduction's."""
    alone = results.of(ALONE, "accuracy")
    gains = [results.of(name(method, ADDED[-1]), "accuracy") - alone for method in (EMBRACING, WIDTH)]
    held = bool(gains[0].mean() > gains[1].mean())
    return Judged(held, f"EmbracingFL {told(gains[0])}, width reduction {told(gains[1])}")


ENTRY = Entry(
    name="embracingfl/scaling",
    what="EmbracingFL, Table 2 and Figure 4: accuracy by the number of weak clients beside a few strong ones",
    arms=arms,
    columns=(percent("accuracy", "accuracy, %"), percent("best", "best, %")),
    published={arm: {"best": value} for arm, value in PUBLISHED.items()},
    claims=(
        Claim(
            "H2",
            "weak clients raise EmbracingFL's accuracy above the strong ones' alone",
            "+17.2",
            above(name(EMBRACING, ADDED[-1]), ALONE, "accuracy"),
        ),
        Claim(
            "H2",
            "more weak clients raise EmbracingFL's accuracy further",
            "+2.6",
            above(name(EMBRACING, ADDED[1]), name(EMBRACING, ADDED[0]), "accuracy"),
            doubt="few clients: which ones are added decides the classes that are seen",
        ),
        Claim("H2", "they add more with EmbracingFL than with width reduction", "+17.2, +4.9", steeper),
    ),
    charts=(Chart("accuracy.svg", "Strong and weak clients: test accuracy", "accuracy"),),
    note=(
        "The samples are spread over all clients once; 2/16 of them are strong, and of the others 0, 6/16 or 14/16 "
        "take part as weak ones, the rest never (simulation.absent). Model, data and training are those of "
        "embracingfl/heterogeneity, with all present clients in each round. 'alone' has global batch norm. The "
        "paper's column has 16 strong clients of 128 with 0, 64 and 112 weak ones; the arms with 6/16 stand beside "
        "its 64."
    ),
)
