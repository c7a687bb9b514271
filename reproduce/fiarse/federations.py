"""Federations of FIARSE's experiments: sizes, data and model of each table, and what each method changes.

Scale cpu, images: 12,000 samples of Fashion-MNIST over 60 clients, each with its own mix of classes (Dirichlet 0.3);
ResNet-8 behind a mean over 2 x 2 pixels (78,042 parameters), torch's initial values, static batch norm; 6 clients a round
(10 %), 50 rounds of 25 steps; sizes 1/16, 1/4 and 1, as 1/64 of this net is little. The paper: 100 clients, 800 rounds of
5 epochs, and clients' test samples of their own. Texts: 12,000 titles with descriptions over 60 clients, 40 rounds of 20
steps, a transformer of one block from Keras's initial values; FIARSE ranks embedding, blocks and head apart; no ScaleFL
(edgefl trains it by SGD alone) or FjORD (whose dropout needs no layer norm). HeteroFL and FedRolex have the masked loss
on images, ScaleFL and FjORD no distillation. Local: expected accuracy where test samples have the clients' mixes of
classes. Batch norms are evaluated with the statistics of one training batch, FedRolex with the windows of the last round.
Numbers: means over the last quarter of the models that are evaluated, on images rounds 42, 46 and 50, on texts 36 and 40.
Learning rates: those that fiarse/pilot chose for Table 1, for all tables; the ablations and Figure 8 have FIARSE's.
Claims about images have the paper's numbers for CIFAR-10. None is about CIFAR-100, or about ScaleFL and FjORD on texts.

Learning rate and momentum, on texts the rate with (1) or without (0) HeteroFL's scaler, by the accuracy on a tenth of the
training samples, on which nobody trains: half of the rounds, 10 % participants, the sizes of Table 1. HeteroFL's rate on
texts is the highest of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from edgefl.submodels.importance.thresholds import FIVE_SIZES, FOUR_SIZES
from reproduce.entry import ONCE, Choice, Entry, Federated, Scale, Settings, notes_of
from reproduce.fiarse.measures import accuracies

NOTE, _PILOT_NOTE = notes_of(__doc__)
TEXTS = ", AGNews"
"""End of the name of a method on texts."""
_SGD: Settings = {"algorithm.name": "sgd", "algorithm.masked_loss": True}
_TCBGD: Settings = {"algorithm.name": "tcbgd"}
_GREEDY: Settings = {**_TCBGD, "algorithm.bias": False, "algorithm.remask": False}
_ADAMW: Settings = {"algorithm.name": "adamw", "algorithm.beta1": 0.9, "algorithm.beta2": 0.95}
METHODS: dict[str, tuple[str, Settings, Settings]] = {
    "HeteroFL": ("width", {"scaler": True}, _SGD),
    "FedRolex": ("width", {"scaler": True, "rolling": True}, _SGD),
    "ScaleFL": ("early_exit", {}, {"algorithm.name": "multi_exit"}),
    "FjORD": ("width", {"ordered": True}, {"algorithm.name": "sgd"}),
    "FIARSE": ("importance", {}, _TCBGD),
    "Pruning-greedy": ("importance", {}, _GREEDY),
    "FIARSE (layerwise)": ("importance", {"strategy": "layer"}, _TCBGD),
    "HeteroFL, AGNews": ("width", {}, _ADAMW),
    "FedRolex, AGNews": ("width", {"rolling": True}, _ADAMW),
    "FIARSE, AGNews": ("importance", {"strategy": "shard"}, {**_TCBGD, "algorithm.adamw": True}),
}
"""Kind of submodel, its options, settings of the algorithm. On texts FIARSE ranks embedding, blocks and head apart."""
CHOSEN: dict[str, tuple[float, float]] = {
    **dict.fromkeys(METHODS, (0.1, 0.0)),
    "HeteroFL, AGNews": (0.01, 0.0), "FedRolex, AGNews": (0.003, 1.0), "FIARSE, AGNews": (0.003, 0.0),
}  # fmt: skip
"""Learning rate and momentum that ``fiarse/pilot`` chooses, on texts the rate and 1 with HeteroFL's scaler.

The ablations take FIARSE's."""
ABLATIONS = ("Pruning-greedy", "FIARSE (layerwise)")


@dataclass(frozen=True)
class Setup:
    """Settings that all methods of a table share.

    Attributes:
        sizes: Shares of the parameters that submodels hold, ascending.
        clients: Number of clients of each size.
        per_round: Participants of a round.
        shared: Other settings, by dotted key.
        exits: ScaleFL's exit of each size, from 1 to the head. A submodel is as wide as its size allows.
    """

    sizes: tuple[float, ...]
    clients: int
    per_round: int
    shared: Settings
    exits: tuple[int, ...] = ()


def arm(method: str, setup: Setup, end: str = "", chosen: tuple[float, float] | None = None) -> Federated:
    """Return the arm of a method, named after it and ``end``, with the learning rate and momentum that were chosen."""
    kind, options, algorithm = METHODS[method]
    lr, momentum = chosen or CHOSEN[method]
    fraction = setup.per_round / (setup.clients * len(setup.sizes))
    settings = {**setup.shared, **algorithm, "algorithm.lr": lr, "round.fraction": fraction}
    tiers = settings["tiers"] = {}
    if not method.endswith(TEXTS):
        settings["algorithm.momentum"] = momentum
    elif kind == "width":
        options = {**options, "scaler": momentum == 1.0}
    if kind == "early_exit":
        settings["model.options"] = {**settings["model.options"], "base": settings["model.name"]}
        settings["model.name"] = "edgefl.models.exits:early_exits"
    for at, gamma in enumerate(setup.sizes):
        own = {**options, "exit": setup.exits[at]} if kind == "early_exit" else dict(options)
        if "ordered" in options:
            own["widths"] = [sqrt(each) for each in setup.sizes]
        tier = {"kind": kind, "gamma": gamma, "count": setup.clients, "devices": [f"size{at}-*"]}
        tiers[f"size{at}"] = {**tier, "options": own}
    return Federated(method + end, settings, accuracies)


def _scales(cpu: Setup, paper: Setup | None = None, rounds: int = 2) -> dict[Scale, Setup]:
    tiny = {"federation.rounds": rounds, "algorithm.steps": 2, "simulation.keep_every": 1}
    tiny |= {"data.train_samples": 600, "data.test_samples": 100}
    smoke = replace(cpu, clients=2, per_round=3, shared={**cpu.shared, **tiny})
    return {"smoke": smoke, "cpu": cpu, **({"paper": paper} if paper else {})}


def _shared(rounds: int, steps: int, keep_every: int, model: str, options: Settings, **data: Any) -> Settings:
    return {
        **{"federation.rounds": rounds, "round.evaluate_every": 0, "simulation.keep_every": keep_every},
        **{"algorithm.steps": steps, "algorithm.batch": 20, "algorithm.weight_decay": 0.0},
        **{"model.name": model, "model.options": options},
        **{f"data.{name}": value for name, value in data.items()},
    }


_SIZES, _STATIC = (1 / 16, 1 / 4, 1.0), {"bn": "static", "initial": "torch"}
_FEW = {"train_samples": 12_000, "test_samples": 2_000}
_FASHION = {"name": "fashion_mnist", "partition": "dirichlet_clients", "alpha": 0.3, **_FEW}
_CIFAR10 = {"name": "cifar10_jpeg", "partition": "dirichlet_clients", "alpha": 0.3, "test_samples": 0}
_NEWS = {"name": "ag_news", "partition": "dirichlet", "alpha": 1.0, "length": 32, "vocabulary": 1_024, **_FEW}
_RESNET8 = _shared(50, 25, 1, "reproduce.fiarse.model:small_resnet", _STATIC, **_FASHION)
_RESNET18 = _shared(800, 125, 10, "resnet18", _STATIC, **_CIFAR10)
_MLP = _shared(300, 25, 1, "mlp", {"hidden": (64, 32), "initial": "torch"}, **_FASHION)
_BERT = _shared(40, 20, 2, "bert", {"width": 32, "depth": 1, "heads": 2, "rate": 0.0}, **_NEWS)

FOUR = _scales(Setup(_SIZES, 20, 6, _RESNET8, (1, 2, 3)), Setup(FOUR_SIZES, 25, 10, _RESNET18, (1, 2, 3, 4)))
"""Tables 1, 4 and 6. Scale cpu has three sizes: a sixty-fourth of a small net is no model."""
_FIVE_18 = Setup(FIVE_SIZES, 20, 10, _RESNET18, (2, 3, 4, 4, 4))
FIVE = _scales(Setup(FIVE_SIZES, 12, 6, _RESNET8, (1, 1, 2, 3, 3)), _FIVE_18)
TEXT_FOUR = _scales(Setup(_SIZES, 20, 6, _BERT))
TEXT_FIVE = _scales(Setup(FIVE_SIZES, 12, 6, _BERT))
"""The paper's model, RoBERTa-base, is none of edgefl's."""
PARTIAL = _scales(Setup(FIVE_SIZES[:4], 15, 6, _MLP), Setup(FIVE_SIZES[:4], 25, 10, _RESNET18), rounds=12)
"""Figure 8: nobody holds the whole model."""

IMAGE_GRID = ((0.1, 0.0), (0.1, 0.9), (0.01, 0.0), (0.01, 0.9))
"""The paper's learning rates and momenta (Table 3)."""
TEXT_GRID = tuple((lr, scaler) for scaler in (0.0, 1.0) for lr in (0.01, 0.003, 0.001))
"""The paper's highest learning rate and two above it, because here the model was not trained before."""
GRIDS = {
    method: TEXT_GRID if method.endswith(TEXTS) else IMAGE_GRID
    for method in METHODS
    if method not in ABLATIONS
}
GRIDS["FIARSE, AGNews"] = TEXT_GRID[:3]


def pilot_arms(scale: Scale) -> list[Federated]:
    """Return an arm for each method and candidate, with half of the rounds and a tenth of the samples held out."""
    made: list[Federated] = []
    for method, grid in GRIDS.items():
        if setup := (TEXT_FOUR if method.endswith(TEXTS) else FOUR).get(scale):
            rounds = max(2, setup.shared["federation.rounds"] // 2)
            half = {**setup.shared, "federation.rounds": rounds, "data.validation": 0.1}
            made += [arm(method, replace(setup, shared=half), f" {each}", each) for each in grid]
    return made


PILOT = Entry(
    "fiarse/pilot", "Pilot: learning rates", pilot_arms,
    choices=[Choice(m, {str(each): f"{m} {each}" for each in grid}, "global") for m, grid in GRIDS.items()],
    note=_PILOT_NOTE, seeds=ONCE,
)  # fmt: skip
