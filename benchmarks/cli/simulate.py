"""``python -m benchmarks simulate``, ``buffered`` and ``peer``: simulators and round modes, and environments of others."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli.report import BrokerKind, Json, bench, measured, mebibytes, report
from edgefl.cli.output import errors, print_json, print_table

if TYPE_CHECKING:
    from benchmarks.simulate.rows import SimulateRow
    from benchmarks.versions.rows import VersionsRow
    from edgefl.config import Federation
    from edgefl.simulator.results import RoundRow


class TaskName(StrEnum):
    """Those of :data:`benchmarks.simulate.tasks.TASKS`."""

    pfl = "pfl-cifar10"
    flute = "flute-mnist"
    linear = "linear"


class EngineName(StrEnum):
    """Names in :func:`benchmarks.simulate.rows.engines`."""

    edgefl = "edgefl"
    edgefl_1_thread = "edgefl-1-thread"
    edgefl_workers = "edgefl-workers"
    pfl = "pfl"
    pfl_1_thread = "pfl-1-thread"
    flower = "flower"


def simulate(
    task: Annotated[list[TaskName] | None, typer.Option(help="may be repeated; default: all")] = None,
    engine: Annotated[list[EngineName] | None, typer.Option(help="may be repeated; default: all")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="in place of the task's own; 0: those")] = 0,
    as_json: Json = False,
) -> None:
    """Clients per second of simulators on this machine, one engine after another, each in processes of its own.

    pfl-cifar10: pfl-research's benchmark on CIFAR-10 (JPEG q75): its small CNN with dropout, 1,000 users of 50 samples, 50 a
    round, one epoch in batches of 10, 20 rounds. flute-mnist: logistic regression on MNIST, 1,000 clients of two classes and
    sizes of a power law, 10 a round, 6 steps of 10 samples each, 100 rounds. linear: edgefl with 1,000, 3,000 and 10,000
    clients, 1 % of them a round.

    Every engine has the same arrays, rows of clients, initial weights, steps and batches, and draws clients and batches
    itself. The first round, in which engines get ready, is not counted. Nothing is evaluated until all rounds are over.
    Memory is of all processes of an engine together. The limit is what this processor's cores could train if a step were its
    convolutions and products alone, at the speed of a large product of float32 matrices.

    edgefl runs with its default settings, with one thread (edgefl-1-thread), and with a worker on each core
    (edgefl-workers); pfl 0.6 with torch's default threads and with one (pfl-1-thread); Flower on Ray with an actor on each
    core. Those of others have environments of their own, which are made when they are needed (`python -m benchmarks peer
    pfl`, `... flower-simulation`); one that cannot be installed is reported and left out.

    Examples:

      python -m benchmarks simulate --json

      python -m benchmarks simulate --task flute-mnist --engine edgefl --engine pfl --rounds 20
    """

    from benchmarks.simulate.rows import chosen, measure
    from benchmarks.simulate.tasks import TASKS

    wanted = chosen([each.value for each in engine or ()])
    cases = [
        (size, each)
        for name in task or TaskName
        for each in (wanted if name != TaskName.linear else [one for one in wanted if one.name == "edgefl"])
        for size in TASKS[name]
    ]
    rows, failed = measured(cases, lambda case, tell: measure(*case, rounds=rounds, say=tell), _columns)
    # A peer that cannot be had here is told, and is no failure.
    report("simulate", "simulate", rows, _columns, as_json, () if rows else failed)


def _columns(row: SimulateRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "task": row.task,
        "engine": row.engine,
        "clients": row.clients,
        "a round": row.per_round,
        "clients/s": row.clients_per_s,
        "limit": row.limit_clients_per_s,
        "peak MiB": mebibytes(row.peak_rss_bytes),
        "accuracy": f"{row.final_accuracy:.3f}",
    }


Where = StrEnum("Where", ["simulator", "mqtt"])


def buffered(
    where: Annotated[
        list[Where] | None, typer.Option(help="simulator or mqtt, may be repeated; default: both")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each, from as many seeds")] = 3,
    target: Annotated[float, typer.Option(min=0.1, max=1, help="accuracy that is good enough")] = 0.93,
    rounds: Annotated[int, typer.Option(min=1, help="versions after which a run is given up")] = 100,
    clients: Annotated[int, typer.Option(min=9, help="of a simulation")] = 30,
    devices: Annotated[int, typer.Option(min=3, help="that are processes")] = 6,
    broker: BrokerKind = "auto",
    as_json: Json = False,
) -> None:
    """Seconds until the model is good enough, with rounds that wait and with versions that do not, where a third of the
    devices is slow.

    In the simulator 30 clients, of which 10 take ten times as long for everything, 10 at work at a time, in simulated
    seconds. Over MQTT a broker, a server and 6 devices as processes; two of them make steps in a hundredth of the time, so
    that a round takes them about ten times as long; seconds of a clock, from the opening of the first round.

    synchronous: a round waits for all that it selected. over-selected: it selects half as many more and ends without the
    last ones. buffered: round.mode, with the same number of devices at work.

    Examples:

      python -m benchmarks buffered --json

      python -m benchmarks buffered --where simulator --seeds 5 --target 0.95
    """

    from benchmarks.versions.rows import MODES, measure
    from edgefl.api.simulate import prepare_simulation

    def simulate(federation: Federation, folder: Path) -> Iterable[RoundRow]:
        return prepare_simulation(federation, folder, fresh=True).rounds()

    cases = [
        (mode, place.value, number)
        for place in where or Where
        for number in range(seed, seed + seeds)
        for mode in MODES
    ]
    with TemporaryDirectory(prefix="edgefl-buffered-") as folder:
        bench(
            "buffered",
            f"until accuracy is {target:.0%}",
            cases,
            lambda case, tell: measure(
                case[0],
                case[1],  # type: ignore[arg-type]
                devices=clients if case[1] == "simulator" else devices,
                seed=case[2],
                target=target,
                folder=Path(folder) / "-".join(map(str, case)),
                simulate=simulate,
                rounds=rounds,
                broker=broker,
                tell=tell,
            ),
            _buffered_columns,
            as_json,
        )


def _buffered_columns(row: VersionsRow) -> dict[str, Any]:
    return {
        "mode": row.mode,
        "where": row.where,
        "seed": row.seed,
        "s": row.seconds,
        "versions": row.versions,
        "updates": row.updates,
        "staleness": row.staleness,
        "accuracy": row.accuracy,
    }


def peer(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="whose environment to make")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object for each")] = False,
) -> None:
    """Make an environment for software of others that a benchmark measures, and print the path of its Python.

    Its requirements would hold ours back, so it is apart: in the user's cache folder, made once. Without a name: which there
    are, and whether they are installed.

    Examples:

      python -m benchmarks peer

      python -m benchmarks peer flower
    """

    from benchmarks.common.peers import interpreter, make, peers
    from edgefl.errors import ConfigError

    known = peers()
    if name and name not in known:
        raise ConfigError(f"no peer {name!r}; there are: {', '.join(known)}", name=name)
    if name:
        make(known[name], errors.print)
    rows = [
        {
            "name": each.name,
            "needed_by": each.needed_by,
            "requirements": each.requirements,
            "python": interpreter(each),
        }
        for each in ([known[name]] if name else known.values())
    ]
    if as_json:
        for row in rows:
            print_json(row)
    elif name:
        typer.echo(rows[0]["python"])
    else:
        print_table("peers", rows)
