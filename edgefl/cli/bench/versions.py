"""``edgefl bench buffered``: versions that wait for nobody beside rounds that wait, where a third of the devices is slow."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.bench.report import measured, report

if TYPE_CHECKING:
    from edgefl.bench.versions.rows import VersionsRow
    from edgefl.config import Federation
    from edgefl.simulator.row import Row

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
    broker: Annotated[
        str, typer.Option(help="auto (mosquitto where it is installed), mosquitto or amqtt")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")] = False,
) -> None:
    """Seconds until the model is good enough, with rounds that wait and with versions that do not, where a third of the
    devices is slow.

    In the simulator 30 clients, of which 10 take ten times as long for everything, 10 at work at a time, in simulated
    seconds. Over MQTT a broker, a server and 6 devices as processes; two of them make steps in a hundredth of the time, so
    that a round takes them about ten times as long; seconds of a clock, from the opening of the first round.

    synchronous: a round waits for all that it selected. over-selected: it selects half as many more and ends without the
    last ones. buffered: round.mode, with the same number of devices at work.

    Examples:

      edgefl bench buffered --json

      edgefl bench buffered --where simulator --seeds 5 --target 0.95
    """

    from edgefl.api.simulate import prepare_simulation
    from edgefl.bench.versions.federations import MODES
    from edgefl.bench.versions.rows import measure

    def simulate(federation: Federation, folder: Path) -> Iterable[Row]:
        return prepare_simulation(federation, folder, fresh=True).rounds()

    cases = [
        (mode, place.value, number)
        for place in where or Where
        for number in range(seed, seed + seeds)
        for mode in MODES
    ]
    with TemporaryDirectory(prefix="edgefl-buffered-") as folder:
        rows, failed = measured(
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
            _line,
        )
    report("buffered", f"until accuracy is {target:.0%}", rows, _columns, as_json, failed)


def _line(row: VersionsRow) -> str:
    took = "never" if row.seconds is None else f"{row.seconds:g} s"
    return f"{row.mode}, {row.where}, seed {row.seed}: {took}, {row.versions} versions, {row.updates} updates"


def _columns(row: VersionsRow) -> dict[str, Any]:
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
