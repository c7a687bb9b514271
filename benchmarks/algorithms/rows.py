"""Cost of a round by algorithm: derivatives, bytes up and down, bytes that a device keeps, and the time of a step.

Counts and bytes are taken from one device's exchanges run in torch, each algorithm's own functions on random data; times and
memory from the exported step on the device's engine (:mod:`benchmarks.algorithms.rows`).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.common.device_graph import with_state, write_function
from benchmarks.common.machine import running, take_turns, worker_of
from benchmarks.encode.rows import DEVICE
from edgefl import algorithms
from edgefl.algorithms.catalog import ALGORITHMS, PERSONAL
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of
from edgefl.models.spec import ModelSpec
from edgefl.objective.derivatives import counting
from edgefl.objective.objective import Objective
from edgefl.optimizers.catalog import OPTIMIZERS, with_optimizer
from edgefl.setup.federation_options import parse_algorithm
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.system.structs import filled
from tests.support.reference import Client, begun, drawn, run_round

__all__ = ["AlgorithmRow", "AlgorithmSettings", "everything", "measure", "parsed"]

FLOAT = 4
"""Bytes; papers count floats."""
SERVER_LR = "server_lr"


class AlgorithmRow(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of an algorithm, for one device.

    ``gradients_per_step`` and ``products_per_step`` (Hessian-vector products) are derivatives on one batch in a local step
    of the last phase, ``..._per_round`` those of the whole exchange. ``up_bytes`` are the tensors of its update,
    ``down_bytes`` the weights and the server's state that its graphs read, ``kept_bytes`` what it keeps until the next
    round, ``state_bytes`` the tensors that live through training, ``server_bytes`` what the server keeps beside the model;
    ``up``, ``down``, ``kept``, ``state`` and ``server`` are the same in floats for each of the model's ``parameters``.
    ``step_ms`` is the median of the exported step, ``step_ratio`` that over FedAvg's, ``peak_over_idle_bytes`` its memory;
    null unless timed. ``spec`` is what the specification says, as ``gradients | up down kept``, empty where it says
    nothing, and ``as_spec`` whether all of that was measured.
    """

    algorithm: str
    exchange: str
    gradients_per_step: int
    products_per_step: int
    gradients_per_round: int
    products_per_round: int
    up: float
    down: float
    kept: float
    state: float
    server: float
    spec: str
    as_spec: bool | None
    step_ms: float | None
    step_ratio: float | None
    peak_over_idle_bytes: int | None
    up_bytes: int
    down_bytes: int
    kept_bytes: int
    state_bytes: int
    server_bytes: int
    everyone: bool
    model: str
    parameters: int
    batch: int
    steps: int
    samples: int


def everything() -> tuple[str, ...]:
    """The algorithms of the catalog, those that the specifications have figures of in their variants, and FedAvg's
    local training with each adaptive optimizer at the server."""
    specified = [algorithm for algorithm, exchange in FIGURES if exchange == ROUND]
    variants = {name: [each for each in specified if each.partition(":")[0] == name] for name in ALGORITHMS}
    return (*(each for name in ALGORITHMS for each in variants[name] or [name]), *ADAPTIVE)


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """``NAME[:KEY=VALUE,...]``, where NAME may be ``package.module:factory``; ConfigError for anything else."""
    settings = {key.removeprefix("algorithm."): value for key, value in parse_algorithm(text).items()}
    name, options = settings.pop("name"), settings.pop("options", {})
    return name, {**settings, **options}


def measure(
    spec: ModelSpec, algorithm: str, settings: AlgorithmSettings, say: Callable[[str], None] = lambda _: None
) -> list[AlgorithmRow]:
    """A row for each exchange of ``algorithm``. ConfigError or ModelError where there is none such, or not for this
    model."""
    name, options = parsed(algorithm)
    objective = Objective.of(OutputSide(spec, 0))
    made = _algorithm(name, objective, {"batch": settings.batch, "steps": settings.steps, **options})
    say(f"{algorithm}: counting")
    rows = []
    for place, exchange, cost in _exchanged(spec, made, settings):
        timing = timed(spec, objective, exchange, settings, lambda text: say(f"{algorithm}: {text}"))
        rows.append(_row(spec, made, algorithm, place, cost, timing, settings))
    return rows


def _algorithm(name: str, objective: Objective, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm ``name``; for an optimizer of the server, FedAvg with it. Of their options ``lr`` is FedAvg's, and
    ``server_lr`` the optimizer's."""
    if name not in OPTIMIZERS:
        return algorithms.build(name, objective, **options)
    of_fedavg = {*signature(ALGORITHMS["fedavg"]).parameters, PERSONAL}
    local = {key: value for key, value in options.items() if key in of_fedavg}
    of_server = {key: value for key, value in options.items() if key not in of_fedavg}
    if SERVER_LR in of_server:
        of_server["lr"] = of_server.pop(SERVER_LR)
    return with_optimizer(algorithms.build("fedavg", objective, **local), name, **of_server)


@dataclass(frozen=True)
class Cost:
    """Derivatives and bytes of one exchange."""

    gradients_per_step: int
    products_per_step: int
    gradients_per_round: int
    products_per_round: int
    up_bytes: int
    down_bytes: int
    kept_bytes: int
    state_bytes: int


def _exchanged(
    spec: ModelSpec, algorithm: Algorithm, settings: AlgorithmSettings
) -> Iterator[tuple[str, Algorithm, Cost]]:
    """One device goes once through every exchange of ``algorithm``; the server's state stays as it began."""
    trained = [name for name, tensor in spec.module.named_parameters() if tensor.requires_grad]
    device = Client(0, _random(spec.sample, settings.samples), _random(spec.label, settings.samples))
    standing = begun(algorithm, spec.weights, trained)
    global_state = {**standing.weights, **standing.server_state}
    carry: Tensors = {}
    exchanges = list(zip(_places(algorithm), algorithm.exchanges, strict=True))
    for number, (place, exchange) in enumerate(exchanges):
        with counting() as counts:
            result = run_round(
                exchange,
                global_state,
                drawn(exchange, device, 0, number),
                hyper=exchange.schedule(number, len(exchanges)),
                carry=carry,
                samples=device.samples,
            )
        carry = result.carry or carry
        cost = Cost(
            *_per_step(exchange),
            *(counts.gradients, counts.products),
            up_bytes=_bytes(result.update.values()),
            down_bytes=_bytes(_read(exchange, "weights").values()),
            kept_bytes=_bytes(carry.values()),
            state_bytes=_bytes(_held(exchange).values()),
        )
        yield place, exchange, cost


def _places(algorithm: Algorithm) -> list[str]:
    return [OPENING] * len(algorithm.opening) + [AHEAD] * len(algorithm.ahead) + [ROUND]


def _per_step(exchange: Algorithm) -> tuple[int, int]:
    if not exchange.phases:
        return 0, 0
    step = exchange.phases[-1].function
    with counting() as counts:
        step(step.example(0))
    return counts.gradients, counts.products


def _read(exchange: Algorithm, role: str) -> dict[str, TensorSpec]:
    """Return the inputs of a round's functions that have this role, by name; a device fetches each once."""
    functions = (exchange.start, *(phase.function for phase in exchange.phases), exchange.finish)
    return {
        name: port
        for function in functions
        for name, port in function.inputs.items()
        if role_of(name) == role
    }


def _held(exchange: Algorithm) -> Tensors:
    """Every state tensor of a round."""
    state = exchange.start(exchange.start.example(0))
    for phase in exchange.phases:
        state |= phase.function(phase.function.example(0) | state)
    return {name: tensor for name, tensor in state.items() if role_of(name) == "state"}


def _bytes(tensors: Iterable[Tensor | TensorSpec]) -> int:
    return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in tensors)


def _random(spec: TensorSpec, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = spec.rows(count)
    if rows.below is not None or not rows.dtype.is_floating_point:
        return torch.randint(0, rows.below or 2, rows.shape, generator=generator, dtype=rows.dtype)
    return torch.randn(rows.shape, generator=generator, dtype=rows.dtype)


def _row(
    spec: ModelSpec,
    made: Algorithm,
    algorithm: str,
    place: str,
    cost: Cost,
    timing: Timing,
    settings: AlgorithmSettings,
) -> AlgorithmRow:
    count = parameters(spec)
    figures = FIGURES.get((algorithm, place))
    server = FLOAT * count * len(made.server_state)
    moved = (cost.up_bytes, cost.down_bytes, cost.kept_bytes, cost.state_bytes)
    up, down, kept, state = (round(each / FLOAT / count, 4) for each in moved)
    numbers = (cost.gradients_per_step, cost.products_per_step, up, down, kept)
    wanted = figures and (figures.gradients, figures.products, figures.up, figures.down, figures.kept)
    return filled(
        AlgorithmRow,
        settings,
        cost,
        timing,
        algorithm=algorithm,
        exchange=place,
        up=up,
        down=down,
        kept=kept,
        state=state,
        server=float(len(made.server_state)),
        spec=str(figures or ""),
        as_spec=None if figures is None else numbers == wanted,
        server_bytes=server,
        everyone=made.whole,
        model=spec.name,
        parameters=count,
    )


@dataclass(frozen=True)
class AlgorithmSettings:
    """Settings: ``steps`` local steps on a device of ``samples`` samples, and ``repeat`` blocks of timed ones (0: none)."""

    batch: int = 32
    steps: int = 10
    samples: int = 320
    repeat: int = 3
    threads: int = 1


@dataclass(frozen=True)
class Timing:
    """Time and memory of a step, as in the row; nothing where it was not timed."""

    step_ms: float | None = None
    step_ratio: float | None = None
    peak_over_idle_bytes: int | None = None


def timed(
    spec: ModelSpec,
    objective: Objective,
    exchange: Algorithm,
    settings: AlgorithmSettings,
    say: Callable[[str], None],
) -> Timing:
    """Return the figures of the last phase's step. ExportError if its graph cannot be made."""
    if not settings.repeat or not exchange.phases:
        return Timing()
    plain = algorithms.build("sgd", objective, batch=settings.batch, momentum=0.0, weight_decay=0.0)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name)
        workers = []
        for file, algorithm in (("step", exchange), ("fedavg", plain)):
            say(f"exporting {file}")
            write_function(folder, file, algorithm.phases[-1].function, _reached(spec, algorithm))
            steps, threads = max(1, algorithm.phases[-1].steps), settings.threads
            workers.append(worker_of(DEVICE, folder, file, threads, steps, threads=threads))
        with running(workers, "a step"):
            take_turns(workers, settings.repeat, say)
    ours, fedavg = (statistics.median(worker.times) for worker in workers)
    return Timing(round(ours, 3), round(ours / fedavg, 3), workers[0].peak)


def _reached(spec: ModelSpec, algorithm: Algorithm) -> Tensors:
    """Return what the last phase's first step reads of state and scalars, after one step of each phase before it."""
    server_state: Tensors = {}
    for name, value in algorithm.server_state.items():
        server_state |= beside(
            name, {key: torch.full_like(tensor, value) for key, tensor in spec.weights.items()}
        )
    return with_state(algorithm, prefixed("weights", spec.weights | server_state), algorithm.phases[:-1])


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
    **{(algorithm, ROUND): figures for algorithm, figures in {**_TRAFFIC, **_DERIVATIVES}.items()},
    # The paper's devices make x_1 themselves from what comes back: 2 d down then. Ours fetch it with the next exchange,
    # whose 3 d are x_1, m and v; here x_0 alone comes down.
    ("fafed", OPENING): Figures(gradients=1, up=1, down=1, kept=1),
}
"""By algorithm, as on the command line, and exchange."""


def parameters(spec: ModelSpec) -> int:
    """d: the entries that gradients move."""
    return sum(tensor.numel() for tensor in spec.module.parameters() if tensor.requires_grad)
