"""Figure 1: an LSTM language model on WikiText-2.

WikiText-2's training part is not at hand: clients train on its validation part (217,646 tokens). Steps, clipping and rho are
the paper's; alpha, beta and beta2 are 0.9 and beta1 is 0.1. Scale cpu: 4 clients, 60 rounds, 2,000 words, one layer of 64
units, 20 tokens a sample. Loss and perplexity: averaged model, 500 training samples, in the mean over the last tenth of the
rounds; rises: in the first quarter.

Scale paper: WikiText-2's training part, and some 8,000 core-hours for 3 seeds of 2,000 rounds (28 million multiply-adds a
token; estimated, not measured): half a year on 2 cores, 6 days on 64.
"""

from __future__ import annotations

from reproduce.entry import Chart, Entry, Federated, Scale, Settings, grid, notes_of
from reproduce.fafed.federations import METHODS, OTHERS, below, shared_settings, training_loss, with_method

_SERVER = {"lr": 10.0, "server_lr": 0.0316, "beta1": 0.1, "beta2": 0.9}
OPTIONS: dict[str, Settings] = {
    "FedAvg": {"lr": 10.0},
    "SCAFFOLD": {"lr": 10.0},
    "STEM": {"lr": 20.0, "alpha": 0.9, "schedule": "decaying", "decay_unit": "epoch", "epoch_steps": 100},
    "FedAdam": _SERVER,
    "FedAMS": _SERVER,
    "FAFED": {"lr": 1.0, "alpha": 0.9, "beta": 0.9, "schedule": "decaying"},
}
"""The paper's values (fafed.md 4.4). It does not report which of 0.1 and 0.9 its momenta have."""


def arms(scale: Scale) -> list[Federated]:
    """Return all methods."""
    clients, rounds, length, words, samples, options = {
        "smoke": (2, 3, 8, 50, 200, {"features": 4, "hidden": 4, "layers": 1, "rate": 0.2}),
        "cpu": (4, 60, 20, 2_000, 8_000, {"features": 64, "hidden": 64, "layers": 1, "rate": 0.2}),
        "paper": (16, 2_000, 35, 33_278, 0, {"features": 650, "hidden": 650, "layers": 2, "rate": 0.5}),
    }[scale]
    settings = {
        **shared_settings(
            clients, rounds, name="wikitext2", task="next", partition="owners", length=length, vocabulary=words,
            train_samples=samples, test_samples=500,
        ),
        "algorithm": {"batch": 20, "steps": 10, "clip": 0.25}, "model.name": "lstm_lm", "model.options": options,
    }  # fmt: skip
    return [Federated(each, with_method(settings, each, own), training_loss) for each, own in OPTIONS.items()]


NOTE, NEEDS = notes_of(__doc__)
ENTRY = Entry(
    "fafed/figure1", "Figure 1: language model on WikiText-2", arms,
    grids=[
        grid(
            "training", ["loss", "perplexity"], dict.fromkeys(METHODS, (None, None)),
            lambda method, at: (method, "objective" if at == "loss" else at), unit=1.0, digits=3,
            title="WikiText-2: ours is its validation part",
        )
    ],
    claims=[
        below("FAFED has the lowest training loss", "FAFED", OTHERS),
        below("FAFED's loss is smoother than FedAdam's", "FAFED", ["FedAdam"], "rises", "smoother"),
        below("FedAMS is worse than FedAdam", "FedAdam", ["FedAMS"], paper="worse"),
    ],
    charts=[
        Chart(f"figure1{letter}.svg", f"Figure 1{letter}", line, x="communication round", y=f"training {y}")
        for letter, line, y in (("a", "objective", "loss"), ("b", "perplexity", "perplexity"))
    ],
    note=NOTE, needs=NEEDS, other_data="WikiText-2 without its training part",
)  # fmt: skip
