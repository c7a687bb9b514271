"""``edgefl simulate``: train a federation on one machine in torch, without devices."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from edgefl.api.progress import planned_rounds, reporting, round_text
from edgefl.cli import interrupts
from edgefl.cli.options import Mlflow, Processor, ProcessorOption, Seed, Tensorboard, writable_folder
from edgefl.cli.output import console, errors, print_json, print_table
from edgefl.wire.text import device_result

if TYPE_CHECKING:
    from edgefl.api.simulate import PreparedSimulation
    from edgefl.simulator.results import RoundRow


def simulate(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML)")] = None,
    out: Annotated[
        Path,
        typer.Option(callback=writable_folder, help="folder for everything the simulation leaves behind"),
    ] = Path("simulations/latest"),
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds to train")] = None,
    seed: Seed = None,
    data: Annotated[Path | None, typer.Option(help="folder with the dataset's standard files")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE, any key of the file that has no option given, such as round.fraction=0.1; may be given again",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="continue the simulation in --out")] = False,
    fresh: Annotated[bool, typer.Option(help="discard what an earlier simulation left in --out")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes that clients train in; their number changes no bit")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="a Ray cluster, on which the workers are actors; local: one of its own"
        ),
    ] = None,
    processor: ProcessorOption = Processor.auto,
    tensorboard: Tensorboard = False,
    mlflow: Mlflow = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per round, nothing else")] = False,
) -> None:
    """Train on one machine in torch alone.

    No broker, no devices, nothing is compiled, and the weights are the same.

    It takes every file that `edgefl run` takes. A tier's `count` is its number of clients.

    Examples:

      edgefl simulate federation.toml --out simulations/first

      edgefl simulate federation.toml --set round.fraction=0.01 --set data.partition=iid --out simulations/second

    Resumed, and in several processes:

      edgefl simulate federation.toml --out simulations/first --resume      (one that was stopped, to the same bits)

      edgefl simulate federation.toml --workers 8      (in 8 processes, to the same bits)

    Trackers, and the demo:

      edgefl simulate federation.toml --out simulations/third --tensorboard --mlflow http://127.0.0.1:5000

      edgefl simulate --rounds 3 --out simulations/demo --json      (the federation of `edgefl run` without a file)
    """

    from edgefl.config.reading import check_names
    from edgefl.setup.federation_options import FederationOptions
    from edgefl.setup.tiers import check_counts
    from edgefl.simulator.folder import refuse_held

    options = FederationOptions(
        rounds=rounds, seed=seed, data=data, tensorboard=tensorboard, mlflow=mlflow, others=settings or ()
    )
    # torch, which all that follows loads, takes seconds
    early = check_names(config, options.settings)
    early.tracking.check_packages()
    check_counts(early.tiers)
    if not resume and not fresh:
        refuse_held(out.resolve())
    with reporting("loading torch"):
        import torch  # noqa: F401
    from edgefl.api.federation import with_options
    from edgefl.api.simulate import prepare_simulation
    from edgefl_device.host import return_memory_late

    federation = with_options(config, options)
    with reporting("reading the data and spreading it over the clients"):
        simulated = prepare_simulation(
            federation, out, resume=resume, fresh=fresh, device=processor.value, workers=workers, ray=ray
        )
    return_memory_late()
    signal.signal(signal.SIGTERM, interrupts.handler)
    try:
        simulated.run(print_json, warn=errors.print) if as_json else _watch(simulated)
    except KeyboardInterrupt:
        errors.print(f"stopped; the same with --resume goes on where {simulated.folder} was")
        raise typer.Exit(interrupts.EXIT_CODE) from None


def _watch(simulated: PreparedSimulation) -> None:
    made = simulated.federation
    console.print(
        f"[bold]{made.federation.name}[/]: {made.model.name} on {simulated.dataset.name}, "
        f"{len(simulated.clients.samples):,} clients",
        markup=True,
    )
    with reporting(
        "building the functions", total=planned_rounds(made, simulated.dataset), console=errors
    ) as report:
        ended = simulated.run(
            lambda row: report(round_text(row), row.round), progress=report, warn=errors.print
        )
    evaluations = [row.evaluation for row in ended.history if row.evaluation is not None]
    shown = [_facts(row, evaluates=bool(evaluations)) for row in ended.history[-10:]]
    print_table(str(ended.folder), shown)
    if evaluations:
        console.print(device_result(msgspec.to_builtins(evaluations[-1])))


def _facts(row: RoundRow, *, evaluates: bool) -> dict[str, object]:
    """Return the table row of one round by column, with a column for evaluation on devices if ``evaluates``."""
    devices = row.evaluation.devices if row.evaluation is not None else None
    return {
        "round": row.round,
        "outcome": row.outcome,
        row.metric: row.metrics.get(row.metric, row.loss),
        **({"on_devices": devices.metrics.get(row.metric) if devices else None} if evaluates else {}),
        "train_loss": row.train_loss,
        "reports": row.reports,
        "up_bytes": row.up_bytes,
        "down_bytes": row.down_bytes,
        "seconds": row.seconds,
    }
