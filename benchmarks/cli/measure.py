"""``python -m benchmarks``: measure on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from benchmarks.cli.report import (
    BrokerKind,
    Json,
    bench,
    check_choice,
    installed_python,
    mebibytes,
    print_rows,
    report,
)
from edgefl.api.progress import reporting
from edgefl.cli.options import Engines, ModelOptions, Outputs
from edgefl.cli.output import errors
from edgefl.setup.federation_options import parse_options
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from benchmarks.footprint.rows import FootprintRow
    from benchmarks.memory.rows import MemoryRow
    from benchmarks.submodels import SubmodelRow
    from edgefl.wire.bundle.formats import Outputs as OutputsName

Match = Literal["parameters", "macs"]


def memory(
    model: Annotated[str, typer.Option(help="a model with preset tiers")] = "resnet20",
    batch: Annotated[int, typer.Option(min=1, help="samples per local step")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="local steps")] = 10,
    repeat: Annotated[int, typer.Option(min=1, help="repetitions, each with fresh processes")] = 3,
    engine: Engines = None,
    outputs: Annotated[
        list[Outputs] | None,
        typer.Option(help="of ExecuTorch programs, may be repeated: caller and planned; default: caller"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Anonymous memory of an agent at the peak of a round, over the same agent idle, per engine and tier."""
    check_choice([model])
    from benchmarks.memory.rows import engines, measure

    rows = []
    with reporting() as tell:
        for name in [each.value for each in engine] if engine else engines():
            for form in _outputs_of(name, outputs):
                tell(f"{name}: training one round per tier and repetition")
                rows += measure(
                    model=model, batch=batch, steps=steps, repeat=repeat, engine=name, outputs=form
                )
    report("memory", "peak memory in training, over the idle agent", rows, _memory_columns, as_json)


def _outputs_of(engine: str, chosen: list[Outputs] | None) -> Sequence[OutputsName]:
    """Only algorithms of ExecuTorch have a choice."""
    return [each.value for each in chosen] if chosen and engine == "executorch" else ["caller"]


def round(
    devices: Annotated[int, typer.Option(min=1, help="device processes")] = 16,
    model: Annotated[str, typer.Option(help="model whose weights are moved")] = "resnet20",
    rounds: Annotated[int, typer.Option(min=2, help="rounds; the first is not counted")] = 8,
    broker: BrokerKind = "auto",
    tls: Annotated[bool, typer.Option("--tls", help="through TLS too (mosquitto)")] = False,
    as_json: Json = False,
) -> None:
    """Time of a round in which devices return their weights at once."""
    check_choice([model])
    from benchmarks.faults.federation import broker_kind
    from benchmarks.round_time import measure

    kind = broker_kind(broker)
    with reporting(f"{rounds} rounds with {devices} devices"):
        rows = [
            measure(devices=devices, model=model, rounds=rounds, broker=kind, tls=secure)
            for secure in ([False, True] if tls else [False])
        ]
    print_rows("round", rows, as_json)


def submodels(
    model: Annotated[str, typer.Option(help="a model of `edgefl ls models`")] = "resnet18",
    kind: Annotated[
        list[str] | None, typer.Option(help="a kind of submodel, may be repeated; default: all")
    ] = None,
    gamma: Annotated[
        list[str] | None, typer.Option(help="sizes like 1/16 or 0.25, may be repeated; default: 1/64 to 1")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    match: Annotated[
        Match, typer.Option(help="what a size is a share of, for all kinds alike")
    ] = "parameters",
    steps: Annotated[int, typer.Option(min=1, help="steps that are timed, after one that is not")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="threads of the engine; a device's default is 1")] = 1,
    option: ModelOptions = None,
    as_json: Json = False,
) -> None:
    """Measure the cost of each kind of submodel on a device, at matched parameter counts.

    For each kind and gamma: parameters, MACs, bytes down and up, and on the device's engine, in fresh processes, the peak
    memory and the time of a training step, beside the memory that `edgefl plan` predicts. A kind without gamma takes the cut
    whose parameters are nearest. ResNet-18 takes some ten minutes; each row is printed to stderr as soon as it is measured.

    Examples:

      python -m benchmarks submodels --json

      python -m benchmarks submodels --model resnet20 --kind width --kind importance --gamma 0.25 --steps 3
    """

    from edgefl.cli.models.plan import gammas
    from edgefl.config.names import check_kinds

    shares = gammas(gamma or ())
    check_kinds(kind or ())
    check_choice([model], option or ())
    from benchmarks.submodels import GAMMAS, SubmodelSettings, kinds_of, measure
    from edgefl.models.zoo.catalog import build_model

    settings = SubmodelSettings(batch=batch, steps=steps, threads=threads, match=match)
    spec = build_model(model, **parse_options(option or ()))
    bench(
        "submodels",
        f"submodels of {model}: batch {batch}",
        list(product(kind or kinds_of(spec), shares or GAMMAS)),
        lambda case, tell: measure(spec, *case, settings, lambda text: tell(f"{model}: {text}")),
        _submodel_columns,
        as_json,
    )


def _memory_columns(row: MemoryRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    error = row.predicted_error
    return {
        "engine": row.engine if row.outputs == "caller" else f"{row.engine}, {row.outputs}",
        "tier": row.tier,
        "peak MB": f"{row.peak_over_idle_bytes / 1e6:.1f}",
        "predicted": "-" if error is None else f"{error:+.0%}",
        "of strong": f"{row.over_strong:.2f}",
        "step ms": row.fastest_step_ms,
        "time ratio": f"{row.time_ratio:.2f}",
        "MB down": f"{row.down_bytes / 1e6:.1f}",
        "MB up": f"{row.up_bytes / 1e6:.1f}",
    }


def _submodel_columns(row: SubmodelRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "submodel": f"{row.kind}, {row.size}",
        "params": f"{row.parameter_share:.1%}",
        "MMAC": f"{row.macs / 1e6:,.1f}",
        "MB down": f"{row.download_bytes / 1e6:.2f}",
        "MB up": f"{row.upload_bytes / 1e6:.2f}",
        "MiB": mebibytes(row.peak_over_idle_bytes),
        "predicted": f"{row.prediction_error:+.0%}",
        "ms": row.step_ms,
    }


def footprint(
    repeat: Annotated[int, typer.Option(min=1, help="fresh processes of each kind")] = 5,
    python: Annotated[
        str,
        typer.Option(
            metavar="PYTHON",
            callback=installed_python,
            help="interpreter of a device's environment; default: this one",
        ),
    ] = "",
    flower: Annotated[
        str,
        typer.Option(
            metavar="PYTHON",
            callback=installed_python,
            help="interpreter of an environment with flwr and torch; default: the one of `python -m benchmarks peer`",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure an idle device and a Flower client with torch: memory, start time and installed size.

    Real processes on a real broker (Mosquitto where it is installed), one after the other: resident memory when connected
    and waiting, and seconds from the start of the process until the other side has heard of it. Installed is what the
    packages that it runs with take on disk as they were shipped, with all they require. The device of --engine executorch
    needs that package's libraries and nothing that it requires (pip install --no-deps executorch); --json has the size with
    all of it, too, and the bytecode that Python adds. Training is the peak of a round of ResNet-20's weak tier.

    The C++ agent has a row where there is one: EDGEFL_AGENT_CPP names it, or it lies in the path or in build/agents/cpp. Its
    size is the sum of the stripped binary and the libraries that it loads.

    Examples:

      python -m benchmarks footprint --json

      python -m benchmarks peer flower-torch

      python -m benchmarks footprint --python device/bin/python --repeat 10
    """

    from benchmarks.common.peers import interpreter, peers
    from benchmarks.footprint.rows import measure

    with reporting() as tell:
        other = flower or interpreter(peers()["flower-torch"]) or ""
        rows = measure(repeat, python or sys.executable, other, tell)
    for row in rows:
        if row.error:
            errors.print(f"{row.what}: {row.error}", style="yellow")
    report("footprint", "footprint: connected and idle", rows, _footprint_columns, as_json)
    if all(row.error for row in rows):
        raise typer.Exit(1)


def _footprint_columns(row: FootprintRow) -> dict[str, Any]:
    """``--json`` has more."""
    return {
        "what": row.what,
        "idle": "-" if row.idle_rss_bytes is None else size(row.idle_rss_bytes),
        "ready s": row.ready_s,
        "training": "-" if row.training_peak_bytes is None else size(row.training_peak_bytes),
        "installed": "-" if row.installed_bytes is None else size(row.installed_bytes),
        "packages": len(row.packages),
    }
