"""``python -m benchmarks aggregate``, ``encode`` and ``algorithms``: cost of coded updates and of each algorithm's round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from benchmarks.cli.report import Json, as_line, bench, check_choice, installed_python, measured, report
from edgefl.api.progress import reporting
from edgefl.cli.options import ModelOptions
from edgefl.cli.output import errors
from edgefl.setup.federation_options import parse_options

if TYPE_CHECKING:
    from benchmarks.aggregate.rows import AggregateRow, OnDeviceRow
    from benchmarks.algorithms.rows import AlgorithmRow
    from benchmarks.encode.rows import EncodeRow

Device = Literal["cpu", "cuda"]
_PARAMETERS = 10**9
"""Of a measurement in a GPU's memory, unless told."""

_Codecs = Annotated[
    list[str] | None,
    typer.Option(
        "--codec",
        metavar="NAME[:KEY=VALUE,...]",
        help="a codec of `edgefl ls codecs`, may be repeated; default: six",
    ),
]


def aggregate(
    model: Annotated[str, typer.Option(help="a model of `edgefl ls models`")] = "resnet18",
    parameters: Annotated[
        int, typer.Option(min=0, help="a perceptron of about so many parameters in place of the model; 0: no")
    ] = 0,
    codec: _Codecs = None,
    clients: Annotated[int, typer.Option(min=1, help="updates of a round")] = 32,
    threads: Annotated[int, typer.Option(min=0, help="threads that add updates up; 0: one per core")] = 0,
    device: Annotated[Device, typer.Option("--processor", help="where the sums are")] = "cpu",
    on_device: Annotated[
        bool,
        typer.Option(
            "--on-device", help="one-bit updates that are made in the GPU's memory: its kernel alone"
        ),
    ] = False,
    repeat: Annotated[
        int, typer.Option(min=1, help="blocks, each with one average of Flower's and three of ours")
    ] = 5,
    flower: Annotated[
        str,
        typer.Option(
            metavar="PYTHON",
            callback=installed_python,
            help="interpreter of an environment with flwr; default: the one of `python -m benchmarks peer`",
        ),
    ] = "",
    option: ModelOptions = None,
    as_json: Json = False,
) -> None:
    """Updates per second of the server's aggregator, beside Flower's weighted average of the same updates as float32.

    Both begin with arrays in memory, by turns: ours as they travelled, Flower's decoded before its clock starts.
    updates_per_s counts what adds the updates into the sums, ratio is that beside Flower's whole average. A whole round of
    ours, in which each update is checked, added, and the finished new weights are made, is round_updates_per_s and
    round_ratio.

    copy_fraction: bytes that accumulating has to move, per second, as a share of what a plain copy moves on as many threads
    in the same run. They are each byte of each update once, and the int64 sums read and written once per batch; a copy of n
    bytes moves 2 n. Times are medians; --json has the minima, too.

    With --processor cuda the sums are on the GPU, and the updates' way there is a part of the time; with --on-device they
    are made there, one bit per entry, and only the kernel's own time counts.

    Flower runs in a process and an environment of its own, which `python -m benchmarks peer flower` makes once. Without
    one its columns are empty, and nothing else changes.

    Examples:

      python -m benchmarks aggregate --json

      python -m benchmarks aggregate --codec fedbat --codec fedpaq:bits=2 --clients 64 --threads 4

      python -m benchmarks aggregate --processor cuda --on-device --parameters 1000000000 --clients 64
    """

    check_choice([model], option or (), codecs=codec or ())
    from benchmarks.aggregate.rows import CODECS, AggregateSettings, build, measure
    from benchmarks.common.peers import interpreter, peers

    if on_device:
        _on_device(parameters, clients, repeat, device, as_json)
        return
    settings = AggregateSettings(
        clients=clients,
        threads=threads,
        device=device,
        repeat=repeat,
        flower=flower or interpreter(peers()["flower"]) or "",
    )
    spec = build(model, parameters, parse_options(option or ()))
    rows, failed = measured(
        codec or CODECS,
        lambda name, say: measure(spec, name, settings, say),
        _aggregate_columns,
    )
    for problem in sorted({row.flower_error for row in rows if row.flower_error}):
        errors.print(f"Flower did not run: {problem}", style="yellow")
    title = f"aggregate: {spec.name}, {clients} clients, {device}"
    report("aggregate", title, rows, _aggregate_columns, as_json, failed)


def encode(
    model: Annotated[str, typer.Option(help="a model of `edgefl ls models`")] = "resnet20",
    codec: _Codecs = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="threads of the engine; a device's default is 1")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="blocks of calls to each graph")] = 5,
    option: ModelOptions = None,
    as_json: Json = False,
) -> None:
    """Measure how long a device encodes an update, compared with one of its training steps.

    encode_ms: the algorithm's last graph, which codes the update, with the noise that it draws.
    step_ms: a step of the same algorithm, FedBAT's binarized one; sgd_step_ms: a step of plain SGD. Each graph runs on the
    device's engine in a process of its own, by turns with the others. Times are medians; --json has the minima and the
    first call of a process, too.

    Examples:

      python -m benchmarks encode --json

      python -m benchmarks encode --model resnet18 --codec fedbat --codec 'topk:share=0.01' --threads 2
    """

    check_choice([model], option or (), codecs=codec or ())
    from benchmarks.encode.rows import CODECS, EncodeSettings, measure
    from edgefl.models.zoo.catalog import build_model

    settings = EncodeSettings(batch=batch, threads=threads, repeat=repeat)
    spec = build_model(model, **parse_options(option or ()))
    bench(
        "encode",
        f"encode: {spec.name}, batch {batch}, threads {threads}",
        codec or CODECS,
        lambda name, say: measure(spec, name, settings, say),
        _encode_columns,
        as_json,
    )


def _on_device(parameters: int, clients: int, repeat: int, device: Device, as_json: bool) -> None:
    from benchmarks.aggregate.rows import measure_on_device
    from edgefl.errors import ConfigError

    if device != "cuda":
        raise ConfigError(
            "--on-device measures a GPU's kernel on updates in its memory; add --processor cuda"
        )
    row = measure_on_device(parameters or _PARAMETERS, clients, repeat)
    report("aggregate", f"aggregate on {row.gpu}: {clients} clients", [row], _on_device_columns, as_json)


def _aggregate_columns(row: AggregateRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "codec": row.codec,
        "updates/s": row.updates_per_s,
        "Flower": row.flower_updates_per_s,
        "ratio": row.ratio,
        "whole round": row.round_updates_per_s,
        "its ratio": row.round_ratio,
        "of a copy": f"{row.copy_fraction:.0%}",
    }


def _on_device_columns(row: OnDeviceRow) -> dict[str, Any]:
    """``--json`` has more."""
    return {
        "codec": row.codec,
        "parameters": row.parameters,
        "ms": 1e3 * row.seconds,
        "updates/s": row.updates_per_s,
        "GB/s of a copy": row.copy_bytes_per_s / 1e9,
        "of a copy": f"{row.copy_fraction:.0%}",
    }


def _encode_columns(row: EncodeRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "codec": row.codec,
        "encode ms": row.encode_ms,
        "step ms": row.step_ms,
        "ratio": f"{row.ratio:.1%}",
        "SGD step ms": row.sgd_step_ms,
        "first ms": row.encode_first_ms,
        "KiB": f"{row.update_bytes / 2**10:.1f}",
    }


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
    model: Annotated[str, typer.Option(help="a model of `edgefl ls models`")] = "cnn",
    batch: Annotated[int, typer.Option(min=1, help="samples per local step")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="local steps")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="samples of the device")] = 320,
    threads: Annotated[int, typer.Option(min=1, help="threads of the engine; a device's default is 1")] = 1,
    repeat: Annotated[
        int, typer.Option(min=0, help="blocks of timed steps per algorithm; 0: counts only")
    ] = 3,
    option: ModelOptions = None,
    as_json: Json = False,
) -> None:
    """Measure the cost of a round on a device for each algorithm, compared with the specifications of the papers.

    One device goes through the algorithm's exchanges in torch: gradients on a batch per local step and per round (and
    Hessian-vector products), floats up, down, kept between rounds and held in training, each for every parameter of the
    model. Moving statistics travel, too, and count as what they are: a model without batch norm gives whole numbers. The
    exported step is timed on the device's engine, by turns with FedAvg's, each in a process of its own. Spec is what the
    specification says of the same: gradients | up down kept.

    Examples:

      python -m benchmarks algorithms --json

      python -m benchmarks algorithms --algorithm fafed --algorithm per_fedavg:mode=hf --model cnn --batch 50

      python -m benchmarks algorithms --repeat 0      (no times)
    """

    check_choice([model], option or (), algorithms=algorithm or ())
    from benchmarks.algorithms.rows import AlgorithmSettings, everything, measure
    from edgefl.errors import EdgeflError
    from edgefl.models.zoo.catalog import build_model

    settings = AlgorithmSettings(batch, steps, samples, repeat, threads)
    spec = build_model(model, **parse_options(option or ()))
    rows: list[AlgorithmRow] = []
    failed = []
    with reporting(console=errors) as tell:
        for name in algorithm or everything():
            try:
                algorithm_rows = measure(spec, name, settings, tell)
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
    """The columns that fit 80 characters; ``--json`` has them all."""
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
