"""``python -m benchmarks algorithms``: cost of a round by algorithm: derivatives, bytes, memory, and the time of a step.

Counts and bytes come from one device's exchanges in torch, with each algorithm's own functions on random data. Time and
memory come from the exported step on the device's engine.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from torch import Tensor

from benchmarks.graphs import with_state, write_function
from benchmarks.options import EngineThreads, Json, ZooModel, check_choice
from benchmarks.repetition import running, take_turns, worker_of
from benchmarks.results import as_line, report
from edgefl.algorithms import build as build_algorithm
from edgefl.algorithms.catalog import ALGORITHMS, PERSONAL
from edgefl.api.progress import reporting
from edgefl.cli.options import ModelOptions
from edgefl.cli.output import errors
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of
from edgefl.errors import EdgeflError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.derivatives import count_derivatives
from edgefl.objective.objective import Objective
from edgefl.optimizers.catalog import OPTIMIZERS, with_optimizer
from edgefl.setup.federation_options import parse_algorithm, parse_options
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.system.structs import filled
from tests.support.reference import Client, begun, drawn, run_round


@dataclass(frozen=True)
class AlgorithmSettings:
    """Settings: ``steps`` local steps on a device of ``samples`` samples, and ``repeat`` blocks of timed ones (0: none)."""

    batch: int = 32
    steps: int = 10
    samples: int = 320
    repeat: int = 3
    threads: int = 1


class AlgorithmRow(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of an algorithm, for one device.

    ``up``, ``down``, ``kept``, ``state`` and ``server`` are the bytes of these names in floats for each of the model's
    ``parameters``.

    Attributes:
        gradients_per_step: gradients on one batch in a local step of the last phase; ``..._per_round`` in the exchange.
        products_per_step: Hessian-vector products, counted the same way.
        up_bytes: tensors of the update.
        down_bytes: weights and server state that the graphs read.
        kept_bytes: tensors that the device keeps until the next round.
        state_bytes: tensors that exist through the training.
        server_bytes: server state beside the model.
        step_ms: median of the exported step; null unless timed.
        step_ratio: ``step_ms`` over FedAvg's.
        peak_over_idle_bytes: memory of the exported step.
        spec: figures of the specification, as ``gradients | up down kept``; empty if it has none.
        as_spec: True if all of these were measured.
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


def algorithms(
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="an algorithm of `edgefl ls algorithms`, path/to/file.py:factory, or an optimizer of "
            "`edgefl ls optimizers`, which is fedavg with it at the server and takes server_lr; may be repeated; "
            "default: all",
        ),
    ] = None,
    model: ZooModel = "cnn",
    batch: Annotated[int, typer.Option(min=1, help="samples per local step")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="local steps")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="samples of the device")] = 320,
    threads: EngineThreads = 1,
    repeat: Annotated[
        int, typer.Option(min=0, help="blocks of timed steps per algorithm; 0: counts only")
    ] = 3,
    option: ModelOptions = None,
    as_json: Json = False,
) -> None:
    """Measure the cost of a round on a device for each algorithm, compared with the specifications of the papers.

    One device runs the algorithm's exchanges in torch. Columns are gradients on a batch per local step (and Hessian-vector
    products), and floats sent, received, kept between rounds and held in training, each for every parameter of the model.
    Moving statistics count too: a model without batch norm gives whole numbers. The exported step is timed on the device's
    engine, in turns with FedAvg's, each in a process of its own. Spec has the specification's figures: gradients | up down
    kept.

    Examples:

      python -m benchmarks algorithms --json

      python -m benchmarks algorithms --algorithm fafed --algorithm per_fedavg:mode=hf --model cnn --batch 50

      python -m benchmarks algorithms --repeat 0      (no times)
    """

    check_choice([model], option or (), algorithms=algorithm or ())

    settings = AlgorithmSettings(batch, steps, samples, repeat, threads)
    spec = build_model(model, **parse_options(option or ()))
    rows: list[AlgorithmRow] = []
    failed = []
    with reporting(console=errors) as say:
        for name in algorithm or all_algorithms():
            try:
                algorithm_rows = measure(spec, name, settings, say)
            except EdgeflError as error:  # the other algorithms are worth measuring all the same
                failed += [error] if algorithm else []  # of all algorithms, some are for other models
                word = "error" if algorithm else f"left out {name}"
                errors.print(f"{word}: {error.message}", style="red")
                continue
            rows += algorithm_rows
            for row in algorithm_rows:
                errors.print(as_line(_algorithm_columns(row)))
    title = f"algorithms: {model}, batch {batch}, {steps} steps; per parameter of {rows[0].parameters if rows else 0:,}"
    report("algorithms", title, rows, _algorithm_columns, as_json, failed)


def _algorithm_columns(row: AlgorithmRow) -> dict[str, Any]:
    return {
        "algorithm": row.algorithm if row.exchange == "round" else f"{row.algorithm}, {row.exchange}",
        "grad": f"{row.gradients_per_step}"
        + (f"+{row.products_per_step} HVP" if row.products_per_step else ""),
        "up": f"{row.up:g}",
        "down": f"{row.down:g}",
        "kept": f"{row.kept:g}",
        "state": f"{row.state:g}",
        "ms": "-" if row.step_ms is None else row.step_ms,
        "ratio": "-" if row.step_ratio is None else f"{row.step_ratio:.2f}",
        "spec": f"{row.spec}{'' if row.as_spec is not False else ' (!)'}",
    }


def measure(
    spec: ModelSpec, algorithm: str, settings: AlgorithmSettings, say: Callable[[str], None] = lambda _: None
) -> list[AlgorithmRow]:
    """Measure each exchange of ``algorithm``. Raises ConfigError or ModelError if it does not exist for this model."""
    name, options = parse(algorithm)
    objective = Objective.of(OutputSide(spec, 0))
    made = _algorithm(name, objective, {"batch": settings.batch, "steps": settings.steps, **options})
    say(f"{algorithm}: counting")
    rows = []
    for place, exchange, cost in _run_exchanges(spec, made, settings):
        timing = _time_step(spec, objective, exchange, settings, lambda text: say(f"{algorithm}: {text}"))
        rows.append(_row(spec, made, algorithm, place, cost, timing, settings))
    return rows


FLOAT = 4
"""Bytes; papers count floats."""
SERVER_LR = "server_lr"


def all_algorithms() -> tuple[str, ...]:
    """Return the algorithms of the catalog, in the variants of the specifications, and FedAvg with adaptive optimizers."""
    specified = [algorithm for algorithm, exchange in FIGURES if exchange == ROUND]
    variants = {name: [each for each in specified if each.partition(":")[0] == name] for name in ALGORITHMS}
    return (*(each for name in ALGORITHMS for each in variants[name] or [name]), *ADAPTIVE)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``NAME[:KEY=VALUE,...]``, where NAME may be ``package.module:factory``. Raises ConfigError."""
    settings = {key.removeprefix("algorithm."): value for key, value in parse_algorithm(text).items()}
    name, options = settings.pop("name"), settings.pop("options", {})
    return name, {**settings, **options}


def _algorithm(name: str, objective: Objective, options: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm ``name``, or FedAvg with a server optimizer of this name.

    With an optimizer, ``lr`` is FedAvg's option and ``server_lr`` the optimizer's.
    """
    if name not in OPTIMIZERS:
        return build_algorithm(name, objective, **options)
    of_fedavg = {*signature(ALGORITHMS["fedavg"]).parameters, PERSONAL}
    local = {key: value for key, value in options.items() if key in of_fedavg}
    of_server = {key: value for key, value in options.items() if key not in of_fedavg}
    if SERVER_LR in of_server:
        of_server["lr"] = of_server.pop(SERVER_LR)
    return with_optimizer(build_algorithm("fedavg", objective, **local), name, **of_server)


@dataclass(frozen=True)
class ExchangeCost:
    """Derivatives and bytes of one exchange."""

    gradients_per_step: int
    products_per_step: int
    gradients_per_round: int
    products_per_round: int
    up_bytes: int
    down_bytes: int
    kept_bytes: int
    state_bytes: int


def _run_exchanges(
    spec: ModelSpec, algorithm: Algorithm, settings: AlgorithmSettings
) -> Iterator[tuple[str, Algorithm, ExchangeCost]]:
    """Run every exchange of ``algorithm`` once on one device, with the initial server state; yield its costs."""
    trained = [name for name, tensor in spec.module.named_parameters() if tensor.requires_grad]
    device = Client(0, _random(spec.sample, settings.samples), _random(spec.label, settings.samples))
    standing = begun(algorithm, spec.weights, trained)
    global_state = {**standing.weights, **standing.server_state}
    carry: Tensors = {}
    places = [OPENING] * len(algorithm.opening) + [AHEAD] * len(algorithm.ahead) + [ROUND]
    exchanges = list(zip(places, algorithm.exchanges, strict=True))
    for number, (place, exchange) in enumerate(exchanges):
        with count_derivatives() as counts:
            result = run_round(
                exchange,
                global_state,
                drawn(exchange, device, 0, number),
                hyper=exchange.schedule(number, len(exchanges)),
                carry=carry,
                samples=device.samples,
            )
        carry = result.carry or carry
        cost = ExchangeCost(
            *_derivatives_per_step(exchange),
            *(counts.gradients, counts.products),
            up_bytes=_bytes(result.update.values()),
            down_bytes=_bytes(_inputs_of(exchange, "weights").values()),
            kept_bytes=_bytes(carry.values()),
            state_bytes=_bytes(_state_of(exchange).values()),
        )
        yield place, exchange, cost


def _derivatives_per_step(exchange: Algorithm) -> tuple[int, int]:
    if not exchange.phases:
        return 0, 0
    step = exchange.phases[-1].function
    with count_derivatives() as counts:
        step(step.example(0))
    return counts.gradients, counts.products


def _inputs_of(exchange: Algorithm, role: str) -> dict[str, TensorSpec]:
    """Return the inputs of a round's functions that have this role, by name; a device fetches each once."""
    functions = (exchange.start, *(phase.function for phase in exchange.phases), exchange.finish)
    return {
        name: port
        for function in functions
        for name, port in function.inputs.items()
        if role_of(name) == role
    }


def _state_of(exchange: Algorithm) -> Tensors:
    """Return every state tensor of a round."""
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
    cost: ExchangeCost,
    timing: StepTiming,
    settings: AlgorithmSettings,
) -> AlgorithmRow:
    count = sum(tensor.numel() for tensor in spec.module.parameters() if tensor.requires_grad)
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
class StepTiming:
    """Time and memory of a step, as in the row; None unless timed."""

    step_ms: float | None = None
    step_ratio: float | None = None
    peak_over_idle_bytes: int | None = None


def _time_step(
    spec: ModelSpec,
    objective: Objective,
    exchange: Algorithm,
    settings: AlgorithmSettings,
    say: Callable[[str], None],
) -> StepTiming:
    """Measure the last phase's step. Raises ExportError if its graph cannot be exported."""
    if not settings.repeat or not exchange.phases:
        return StepTiming()
    plain = build_algorithm("sgd", objective, batch=settings.batch, momentum=0.0, weight_decay=0.0)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name)
        workers = []
        for file, algorithm in (("step", exchange), ("fedavg", plain)):
            say(f"exporting {file}")
            write_function(
                folder, file, algorithm.phases[-1].function, _inputs_of_last_phase(spec, algorithm)
            )
            steps, threads = max(1, algorithm.phases[-1].steps), settings.threads
            workers.append(
                worker_of("benchmarks.workers.graph", folder, file, threads, steps, threads=threads)
            )
        with running(workers, "a step"):
            take_turns(workers, settings.repeat, say)
    ours, fedavg = (statistics.median(worker.times) for worker in workers)
    return StepTiming(round(ours, 3), round(ours / fedavg, 3), workers[0].peak)


def _inputs_of_last_phase(spec: ModelSpec, algorithm: Algorithm) -> Tensors:
    """Return state and scalars for the last phase's first step, after one step of each phase before it."""
    server_state: Tensors = {}
    for name, value in algorithm.server_state.items():
        server_state |= beside(
            name, {key: torch.full_like(tensor, value) for key, tensor in spec.weights.items()}
        )
    return with_state(algorithm, prefixed("weights", spec.weights | server_state), algorithm.phases[:-1])


@dataclass(frozen=True)
class SpecifiedCost:
    """Cost of one exchange in a specification, per device.

    ``gradients`` and ``products`` (Hessian-vector products) are per local step. ``up``, ``down`` and ``kept`` are floats for
    each trainable parameter: sent, received, and kept on the device between rounds.
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
_PLAIN = SpecifiedCost()
ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad", "fedams")
"""Server optimizers that papers compare with as methods of their own."""
_TRAFFIC = {
    **dict.fromkeys(("fedavg", *ADAPTIVE), _PLAIN),
    "scaffold": SpecifiedCost(up=2, down=2, kept=1),
    "stem": SpecifiedCost(gradients=2, up=2, down=2, kept=1),
    "fafed": SpecifiedCost(gradients=2, up=3, down=3, kept=1),
}
"""The table of traffic in fafed.md 2.3."""
_DERIVATIVES = {
    "per_fedavg:mode=fo": SpecifiedCost(gradients=2),
    "per_fedavg:mode=hf": SpecifiedCost(gradients=4),
    "per_fedavg:mode=exact": SpecifiedCost(gradients=2, products=1),
}
"""per_fedavg.md 2.9; the traffic is FedAvg's."""
FIGURES: Mapping[tuple[str, str], SpecifiedCost] = {
    **{(algorithm, ROUND): figures for algorithm, figures in {**_TRAFFIC, **_DERIVATIVES}.items()},
    # The paper's devices make x_1 themselves from what comes back: 2 d down then. Ours fetch it with the next exchange,
    # whose 3 d are x_1, m and v; here x_0 alone comes down.
    ("fafed", OPENING): SpecifiedCost(gradients=1, up=1, down=1, kept=1),
}
"""By algorithm, as on the command line, and exchange."""
