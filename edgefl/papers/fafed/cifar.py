"""Figure 4c: CIFAR-10 where clients have half of the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgefl.papers.entry import Arm, Chart, Claim, Column, Entry, Federated, Scale, percent
from edgefl.papers.fafed.federations import FAFED, METHODS, Setup, tuned
from edgefl.papers.fafed.measures import GRADIENTS, OBJECTIVE, lowest, measured

_SERVER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.9}
TUNED = tuned(0.1, fafed={"lr": 0.01, "alpha": 0.9, "beta": 0.9}, fedadam=_SERVER, fedams=_SERVER)
_DATA = {"name": "cifar10_jpeg", "partition": "paired"}
_PAPER = Setup(
    clients=20,
    rounds=150,
    batch=100,
    steps=5,
    model={"name": "fafed_cifar"},
    data={**_DATA, "test_samples": 0},
    keep_every=5,
    evaluate_every=5,
    looked_at=10_000,
)
_CPU = replace(
    _PAPER,
    clients=10,
    rounds=80,
    batch=50,
    data={**_DATA, "train_samples": 10_000, "test_samples": 2_000},
    looked_at=1_000,
)
SETUPS: Mapping[Scale, Setup] = {
    "smoke": replace(
        _CPU,
        clients=2,
        rounds=2,
        batch=2,
        steps=1,
        data={**_DATA, "name": "random", "train_samples": 400, "test_samples": 20},
        keep_every=1,
        evaluate_every=1,
        looked_at=20,
    ),
    "cpu": _CPU,
    "paper": _PAPER,
}


def arms(scale: Scale) -> Sequence[Arm]:
    """Every method."""
    setup = SETUPS[scale]
    measure = measured(setup.looked_at)
    return [Federated(name, setup.method(name, TUNED[name]), measure) for name in METHODS]


_NOTE = (
    "Scale cpu: 10,000 of the training images, 10 clients in place of 20, batches of 50 in place of 100, 80 rounds of 150 "
    "(20 epochs). Scale smoke runs on noise in the images' place. Steps are from the paper's grid, none "
    "was chosen by a pilot."
)

ENTRY = Entry(
    name="fafed/cifar",
    what="FAFED, Figure 4c: CIFAR-10 where clients have half of the classes, six methods",
    arms=arms,
    columns=(
        percent("accuracy", "test accuracy, %"),
        Column(OBJECTIVE, "training loss", digits=4),
        Column("up_mb", "MB up", digits=1),
        Column(GRADIENTS, "gradients, thousands", digits=0),
    ),
    claims=(
        Claim(
            "6",
            "FAFED has the lowest training loss after equal rounds",
            "lowest",
            lowest(FAFED, [name for name in METHODS if name != FAFED], OBJECTIVE),
            "high",
        ),
    ),
    charts=(
        Chart("training-loss.svg", "Training loss, high heterogeneity", OBJECTIVE, y="training loss"),
        Chart("accuracy.svg", "Test accuracy, high heterogeneity", "accuracy"),
    ),
    note=_NOTE,
)
