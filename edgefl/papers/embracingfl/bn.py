"""EmbracingFL's Table 9: which statistics of batch norm are shared."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.papers.embracingfl.mixes import CASES, EMBRACING, WIDTH, Method, image_settings
from edgefl.papers.entry import Arm, Chart, Claim, Entry, Federated, Scale, percent
from edgefl.papers.results import above, not_below

CASE = 7
PUBLISHED = {
    "width reduction, static": 0.6401,
    "width reduction, global": 0.1921,
    "EmbracingFL, static": 0.7449,
    "EmbracingFL, global": 0.7734,
}


def name(method: Method, bn: str) -> str:
    """Of an arm."""
    return f"{method}, {bn}"


def arms(scale: Scale) -> Sequence[Arm]:
    return [
        Federated(name(method, bn), image_settings(scale, CASES[CASE], method, bn=bn))
        for method in (EMBRACING, WIDTH)
        for bn in ("static", "global")
    ]


ENTRY = Entry(
    name="embracingfl/bn",
    what="EmbracingFL, Table 9: static and global batch norm, for EmbracingFL and width reduction",
    arms=arms,
    columns=(percent("accuracy", "accuracy, %"), percent("best", "best, %")),
    published={arm: {"best": value} for arm, value in PUBLISHED.items()},
    claims=(
        Claim(
            "H4",
            "width reduction is far better with static batch norm: by more than 5 points",
            "+44.8",
            above(name(WIDTH, "static"), name(WIDTH, "global"), "accuracy", by=0.05),
            doubt="at so low an accuracy there is not much to collapse from",
        ),
        Claim(
            "H4",
            "EmbracingFL is not worse with global batch norm",
            "+2.9",
            not_below(name(EMBRACING, "global"), name(EMBRACING, "static"), "accuracy", slack=0.0),
            doubt="static batch norm is evaluated with the statistics of test batches, which know more than moving ones",
        ),
        Claim(
            "H4",
            "EmbracingFL is ahead in the mode that suits each",
            "+13.3",
            above(name(EMBRACING, "global"), name(WIDTH, "static"), "accuracy"),
        ),
    ),
    charts=(Chart("accuracy.svg", "Batch norm: test accuracy", "accuracy"),),
    note=(
        "2/16 of the clients strong, the others weak, all in each round; else as embracingfl/heterogeneity. Static "
        "batch norm is evaluated with the statistics of test batches of 500 (embracingfl.md 2.7)."
    ),
)
