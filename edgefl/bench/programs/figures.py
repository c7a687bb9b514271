"""What the papers' specifications say that programs cost, to stand beside what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgefl.models.spec import ModelSpec


@dataclass(frozen=True)
class Figures:
    """Of one exchange, per device: derivatives on a batch in a local step, and floats for each trainable parameter.

    ``gradients`` and ``products`` (Hessian-vector products) are per local step; ``up`` and ``down`` travel, ``kept`` is what
    the device keeps to itself between rounds.
    """

    gradients: int = 1
    products: int = 0
    up: int = 1
    down: int = 1
    kept: int = 0

    def __str__(self) -> str:
        derivatives = f"{self.gradients}" + (f"+{self.products} HVP" if self.products else "")
        return f"{derivatives} | {self.up} {self.down} {self.kept}"


ROUND, OPENING, AHEAD = "round", "opening", "ahead"
_PLAIN = Figures()
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad", "fedams")
"""Optimizers of a server that papers compare with as methods: FedAvg's local training, and what the server does after."""
_TRAFFIC = {
    **dict.fromkeys(("fedavg", *ADAPTIVE), _PLAIN),
    "scaffold": Figures(up=2, down=2, kept=1),
    "stem": Figures(gradients=2, up=2, down=2, kept=1),
    "fafed": Figures(gradients=2, up=3, down=3, kept=1),
}
"""fafed.md 2.3, the table of traffic."""
_DERIVATIVES = {
    "per_fedavg:mode=fo": Figures(gradients=2),
    "per_fedavg:mode=hf": Figures(gradients=4),
    "per_fedavg:mode=exact": Figures(gradients=2, products=1),
}
"""per_fedavg.md 2.9; the traffic is FedAvg's."""

FIGURES: Mapping[tuple[str, str], Figures] = {
    **{(program, ROUND): figures for program, figures in {**_TRAFFIC, **_DERIVATIVES}.items()},
    # The paper's devices make x_1 themselves from what comes back: 2 d down then. Ours fetch it with the next exchange,
    # whose 3 d are x_1, m and v; here x_0 alone comes down.
    ("fafed", OPENING): Figures(gradients=1, up=1, down=1, kept=1),
}
"""By program, as on the command line, and exchange."""


def parameters(spec: ModelSpec) -> int:
    """d: the entries that gradients move."""
    return sum(tensor.numel() for tensor in spec.module.parameters() if tensor.requires_grad)
