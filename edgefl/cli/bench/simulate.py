"""``edgefl bench simulate``: simulators on one task, edgefl's beside those of others."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.bench.report import measured, mebibytes, report

if TYPE_CHECKING:
    from edgefl.bench.simulate.rows import SimulateRow


class TaskName(StrEnum):
    """Those of :data:`edgefl.bench.simulate.tasks.TASKS`."""

    pfl = "pfl-cifar10"
    flute = "flute-mnist"
    linear = "linear"


def simulate(
    task: Annotated[list[TaskName] | None, typer.Option(help="may be repeated; default: all")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="edgefl, edgefl-1-thread, edgefl-workers, pfl, pfl-1-thread, flower; may be repeated; default: all"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="in place of the task's own; 0: those")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")] = False,
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
    core. Those of others have environments of their own, which are made when they are needed (`edgefl bench peer pfl`, `...
    flower-simulation`); one that cannot be installed is reported and left out.

    Examples:

      edgefl bench simulate --json

      edgefl bench simulate --task flute-mnist --engine edgefl --engine pfl --rounds 20
    """

    from edgefl.bench.simulate.rows import chosen, measure
    from edgefl.bench.simulate.tasks import TASKS

    wanted = chosen(engine or [])
    cases = [
        (size, each)
        for name in task or TaskName
        for each in (wanted if name != TaskName.linear else [one for one in wanted if one.name == "edgefl"])
        for size in TASKS[name]
    ]
    rows, failed = measured(cases, lambda case, tell: measure(*case, rounds=rounds, say=tell), _line)
    # A peer that cannot be had here is told, and is no failure.
    report("simulate", "simulate", rows, _columns, as_json, () if rows else failed)


def _line(row: SimulateRow) -> str:
    """What a run that is cut short leaves."""
    return (
        f"{row.task}, {row.engine} {row.version}: {row.clients_per_s:g} clients/s of {row.clients:,}, "
        f"{mebibytes(row.peak_rss_bytes)} MiB, accuracy {row.final_accuracy:.3f}"
    )


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
