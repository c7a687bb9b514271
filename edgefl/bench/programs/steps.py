"""The time of a program's local step on the device's engine, beside FedAvg's by turns."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from edgefl import programs
from edgefl.bench.common.device_graph import with_state, write_function
from edgefl.bench.common.turns import running, take_turns, worker_of
from edgefl.bench.encode.rows import DEVICE
from edgefl.contract.program import Program
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, prefixed
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective


@dataclass(frozen=True)
class ProgramSettings:
    """Settings: ``steps`` local steps on a device of ``samples`` samples, and ``repeat`` blocks of timed ones (0: none)."""

    batch: int = 32
    steps: int = 10
    samples: int = 320
    repeat: int = 3
    threads: int = 1


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, median; ``ratio`` is that over FedAvg's; ``peak`` is bytes of memory over the idle process."""

    ms: float
    ratio: float
    peak: int


def timed(
    spec: ModelSpec,
    objective: Objective,
    exchange: Program,
    settings: ProgramSettings,
    say: Callable[[str], None],
) -> Timing | None:
    """The last phase's step; None where nothing is to be timed. ExportError if its graph cannot be made."""
    if not settings.repeat or not exchange.phases:
        return None
    plain = programs.build("sgd", objective, batch=settings.batch, momentum=0.0, weight_decay=0.0)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name)
        workers = []
        for file, program in (("step", exchange), ("fedavg", plain)):
            say(f"exporting {file}")
            write_function(folder, file, program.phases[-1].function, _reached(spec, program))
            steps, threads = max(1, program.phases[-1].steps), settings.threads
            workers.append(worker_of(DEVICE, folder, file, threads, steps, threads=threads))
        with running(workers, "a step"):
            take_turns(workers, settings.repeat, say)
    ours, fedavg = (statistics.median(worker.times) for worker in workers)
    return Timing(round(ours, 3), round(ours / fedavg, 3), workers[0].peak)


def _reached(spec: ModelSpec, program: Program) -> Tensors:
    """Return what the last phase's first step reads of state and scalars, after one step of each phase before it."""
    server_state: Tensors = {}
    for name, value in program.server_state.items():
        server_state |= beside(
            name, {key: torch.full_like(tensor, value) for key, tensor in spec.weights.items()}
        )
    return with_state(program, prefixed("weights", spec.weights | server_state), program.phases[:-1])


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
