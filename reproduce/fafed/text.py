"""Figure 1 at a small scale: a language model of characters, on speakers of plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduce.entry import Arm, Chart, Claim, Column, Entry, Federated, Scale
from reproduce.fafed.federations import (
    FAFED,
    FEDADAM,
    FEDAMS,
    FEDAVG,
    METHODS,
    SCAFFOLD,
    STEM,
    Setup,
    Tuned,
)
from reproduce.fafed.measures import GRADIENTS, OBJECTIVE, lowest, measured, none_above, smoother

CLIP = 0.25
"""Most that a gradient's norm is (fafed.md 4.4)."""
_LOCAL = {"lr": 10.0, "clip": CLIP}
_PAPERS_SERVER = {"lr": 0.03, "beta1": 0.1, "beta2": 0.9}
_SERVER = {**_PAPERS_SERVER, "lr": 0.1}
"""At a small scale, where the paper's is behind."""
EPOCH = 100
"""Iterations after which STEM's step shrinks."""
TUNED: Mapping[str, Tuned] = {
    FAFED: Tuned({"lr": 1.0, "schedule": "decaying", "alpha": 0.9, "beta": 0.9, "clip": CLIP}),
    STEM: Tuned(
        {
            "lr": 20.0,
            "schedule": "decaying",
            "decay_unit": "epoch",
            "epoch_steps": EPOCH,
            "alpha": 0.9,
            "clip": CLIP,
        }
    ),
    FEDADAM: Tuned(_LOCAL, _SERVER),
    FEDAMS: Tuned(_LOCAL, _SERVER),
    SCAFFOLD: Tuned(_LOCAL),
    FEDAVG: Tuned(_LOCAL),
}
_SHAKESPEARE = {"name": "shakespeare", "task": "next", "partition": "owners"}
_WIKITEXT = {"name": "wikitext2", "task": "next", "partition": "owners"}

TEXTS: Mapping[Scale, Setup] = {
    "smoke": Setup(
        clients=2,
        rounds=3,
        batch=2,
        steps=2,
        model={"name": "lstm_lm", "options": {"features": 4, "hidden": 8, "layers": 1}},
        data={**_SHAKESPEARE, "length": 8, "train_samples": 200, "test_samples": 20},
        looked_at=20,
    ),
    "cpu": Setup(
        clients=4,
        rounds=40,
        batch=20,
        steps=10,
        model={"name": "lstm_lm", "options": {"features": 32, "hidden": 64, "layers": 1, "rate": 0.2}},
        data={**_SHAKESPEARE, "length": 32, "train_samples": 8_000, "test_samples": 500},
        keep_every=2,
        evaluate_every=10,
        looked_at=500,
    ),
    "paper": Setup(
        clients=16,
        rounds=2_000,
        batch=20,
        steps=10,
        model={"name": "lstm_lm", "options": {"features": 650, "hidden": 650, "layers": 2, "rate": 0.5}},
        data={**_WIKITEXT, "length": 35, "vocabulary": 33_278, "test_samples": 0},
        keep_every=20,
        evaluate_every=20,
        looked_at=2_000,
    ),
}


def arms(scale: Scale) -> Sequence[Arm]:
    """Every method."""
    setup = TEXTS[scale]
    measure = measured(setup.looked_at)
    tuned = (
        {**TUNED, **dict.fromkeys((FEDADAM, FEDAMS), Tuned(_LOCAL, _PAPERS_SERVER))}
        if scale == "paper"
        else TUNED
    )
    return [Federated(name, setup.method(name, tuned[name]), measure) for name in METHODS]


_NOTE = (
    "Scale cpu: Tiny Shakespeare by characters, whole speakers dealt to 4 clients, windows of 32; one LSTM layer of "
    "64 units behind 32 numbers a character, dropout 0.2, b = 20, q = 10, 40 rounds, gradients clipped at 0.25. The "
    "paper has WikiText-2 by words, 16 clients and two layers of 650 units (50,065,078 parameters), which is scale "
    "paper here, with the validation file as training set where the training file is not at hand. FAFED's step is rho "
    "h / (1 + t)^(1/3) by iteration, STEM's kbar / (1 + e)^(1/3) by epochs of 100 iterations. Settings were chosen by "
    "training loss after 15 rounds of seed 100, around the paper's: FAFED rho h of 0.3, 1, 3 and alpha of 0.1, 0.9; "
    "STEM kbar of 7, 20, 60; FedAvg 3, 10, 30 and SCAFFOLD 10, 30; FedAdam and FedAMS beta1, beta2 of 0.1, 0.9 and "
    "the server's step of 0.03, 0.1, 0.3. All are the paper's own but the last, 0.03 there. Training loss: nats per "
    "character."
)

ENTRY = Entry(
    name="fafed/text",
    what="FAFED, Figure 1, at a small scale: an LSTM that says the next character of plays, clients are speakers",
    arms=arms,
    columns=(
        Column(OBJECTIVE, "training loss", digits=4),
        Column("perplexity", "training perplexity", digits=2),
        Column("rises", "rises at the start"),
        Column("up_mb", "MB up", digits=1),
        Column(GRADIENTS, "gradients, thousands", digits=0),
    ),
    claims=(
        Claim(
            "9",
            "FAFED has the lowest training loss after equal rounds",
            "lowest",
            lowest(FAFED, [name for name in METHODS if name != FAFED], OBJECTIVE),
            doubt="FedAdam and FedAMS have a server step of 0.1 here; at the paper's 0.03 they were behind in the pilot "
            "(2.84 and 2.87 after 15 rounds, FAFED 2.32). FAFED's step shrinks with each iteration, to 0.14 of the first",
        ),
        Claim(
            "9",
            "FedAdam's training loss rises more at the start than FAFED's",
            "oscillating early",
            smoother({FAFED: (FEDADAM,)}, "rises"),
            doubt="neither rises at the start, with the settings that the pilot chose",
        ),
        Claim(
            "9",
            "FedAdam has a lower training loss than FedAMS",
            "FedAMS worse",
            none_above((FEDADAM,), FEDAMS, OBJECTIVE),
            doubt="in 40 rounds the largest second moment is seldom far from the last",
        ),
    ),
    charts=(
        Chart("training-loss.svg", "Training loss of the language model", OBJECTIVE, y="loss per character"),
    ),
    note=_NOTE,
)
