"""EmbracingFL's Table 5: a bidirectional LSTM on film reviews, with moderate and weak clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduce.embracingfl.mixes import CASES, SIXTEENTHS
from reproduce.entry import Arm, Chart, Claim, Entry, Federated, Scale, percent
from reproduce.results import Judged, Results, not_below, told

SHOWN = (1, 4, 7)
CLIENTS: Mapping[Scale, int] = {"smoke": 16, "cpu": 16, "paper": 128}
LENGTHS: Mapping[Scale, int] = {"smoke": 16, "cpu": 48, "paper": 256}
PUBLISHED = {1: 0.8215, 4: 0.8255, 7: 0.7489}
_PAPER: Mapping[str, object] = {
    "data.vocabulary": 10_000,
    "data.test_samples": 0,
    "federation.rounds": 400,
    "algorithm.batch": 32,
    "algorithm.steps": 10,
    "algorithm.lr": 0.1,
    "round.fraction": 0.25,
    "round.evaluate_every": 5,
    "round.lr_decay_at": [0.5, 0.75],
}
_CPU: dict[str, object] = {
    "model.options": {"features": 32, "hidden": 32},
    "data.vocabulary": 2000,
    "data.train_samples": 16_000,
    "data.test_samples": 2000,
    "federation.rounds": 120,
    "algorithm.batch": 32,
    "algorithm.steps": 20,
    "algorithm.lr": 0.3,
    "round.evaluate_every": 10,
    "round.lr_decay_at": [0.8, 0.9],
}
_SMOKE: Mapping[str, object] = _CPU | {
    "model.options": {"features": 4, "hidden": 4},
    "data.vocabulary": 200,
    "data.train_samples": 320,
    "data.test_samples": 50,
    "federation.rounds": 2,
    "algorithm.batch": 4,
    "algorithm.steps": 1,
}
SETTINGS: Mapping[Scale, Mapping[str, object]] = {"smoke": _SMOKE, "cpu": _CPU, "paper": _PAPER}


def name(case: int) -> str:
    """Return the name of an arm."""
    return "all strong" if case == 1 else f"EmbracingFL, case {case}"


def settings(scale: Scale, case: int) -> dict[str, object]:
    """Moderate clients freeze the embedding; weak ones do not go back through the first half of the words either."""
    length, unit = LENGTHS[scale], CLIENTS[scale] // SIXTEENTHS
    frozen: Mapping[str, Mapping[str, object]] = {
        "strong": {},
        "moderate": {"cut": 1},
        "weak": {"cut": 1, "options": {"skip": 0.5}},
    }
    tiers = {
        tier: {"count": count * unit, "devices": [f"{tier}-*"], **frozen[tier]}
        for tier, count in CASES[case].counts.items()
        if count
    }
    return {
        "model.name": "bilstm",
        "data.name": "imdb",
        "data.length": length,
        "data.partition": "dirichlet",
        "data.alpha": 0.1 if scale == "paper" else 5.0,
        "algorithm.momentum": 0.9,
        "algorithm.weight_decay": 1e-4,
        **SETTINGS[scale],
        "tiers": tiers,
    }


def arms(scale: Scale) -> Sequence[Arm]:
    return [Federated(name(case), settings(scale, case)) for case in SHOWN]


def _loses_less(results: Results) -> Judged:
    whole = results.of(name(1), "accuracy")
    ours = [results.of(name(case), "accuracy") - whole for case in (4, 7)]
    return Judged(bool(ours[0].mean() >= ours[1].mean()), f"case 4: {told(ours[0])}, case 7: {told(ours[1])}")


_FROZEN = (
    "likely because the embedding begins at random, has 32 features and learns from 2 of 16 clients only; the weak tier's "
    "shorter gradient costs nothing beside it"
)
ENTRY = Entry(
    name="embracingfl/text",
    what="EmbracingFL, Table 5: a bidirectional LSTM on IMDB reviews with moderate and weak clients",
    arms=arms,
    columns=(percent("accuracy", "accuracy, %"), percent("best", "best, %")),
    published={name(case): {"best": value} for case, value in PUBLISHED.items()},
    claims=(
        Claim(
            "H3",
            "87.5 % moderate clients cost at most a point",
            "+0.40",
            not_below(name(4), name(1), "accuracy", slack=0.01),
            doubt=_FROZEN,
        ),
        Claim(
            "H3",
            "87.5 % moderate clients cost no more than 87.5 % weak ones",
            "+0.40, -7.26",
            _loses_less,
            doubt=_FROZEN,
        ),
    ),
    charts=(Chart("accuracy.svg", "IMDB: test accuracy", "accuracy"),),
    note=(
        "Cases 1, 4 and 7: all strong, 87.5 % moderate, 87.5 % weak. At scale cpu: 32 features and 32 hidden units "
        "per direction, 2,000 words, the first 48 tokens of 16,000 reviews, 16 clients, Dirichlet 5, all in each of "
        "120 rounds of 20 steps of 32 at rate 0.3 (the paper: 256, 256, 10,000, 256, 25,000, 128, Dirichlet 0.1, a "
        "quarter, 400 rounds of 10 steps at 0.1). Chosen in pilots of all-strong training with seed 100, which is none "
        "of those below: at rate 0.1 with Dirichlet 1 the LSTM left chance after 360 rounds of 10 steps, and 120 rounds "
        "of 5 and 10 steps with Dirichlet 0.5 and 1 taught it nothing."
    ),
)
