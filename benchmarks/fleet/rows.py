"""``python -m benchmarks fleet``: a row for each fleet that was measured."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.fleet.federation import Case, running_broker, running_server
from benchmarks.fleet.run import FleetFigures, Run
from benchmarks.generator.settings import quantile
from edgefl.lab.broker import check_room, free_port
from edgefl.system.structs import filled

__all__ = ["Case", "FleetRow", "measure"]


class FleetRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in bytes, over the rounds that count (:attr:`Case.uncounted`).

    ``connect_s``: from the first connection until the server had taken in all devices but one. ``round_*``: from a
    round's opening to its end as the server tells them; ``cycle_p50_s``: from one opening to the next.
    ``updates_per_s``: accepted over the time of all cycles. ``server_start_bytes``: resident before a device was there;
    ``server_idle_bytes``: with all of them connected and no round so far; ``server_peak_bytes``: the highest since then;
    ``server_rest_bytes``: the lowest since the end of the first round, which is that between rounds where devices take
    their time; children count too, but for the server's process that composed the run and ends where nobody needs it.
    ``idle_device_bytes``: what an idle device costs the server. ``ack_*``: from an update's first chunk to the server's
    word. ``resent_share``: of all updates, those that were sent again. ``dropped_messages``: by the broker.
    ``journal_bytes``, ``out_bytes``: the most that the journal, and all of the server's folder, took.
    ``closed`` of ``rounds`` were closed. ``fates``: what the server said to updates of which manner, in all rounds.
    ``unanswered``: those on which it said nothing before the last round's end, late ones of that round.
    """

    devices: int
    selected: int
    workers: int
    update: str
    update_bytes: int
    rounds: int
    closed: int
    connect_s: float
    round_p50_s: float
    round_p99_s: float
    cycle_p50_s: float
    updates_per_s: float
    server_cpu_s_per_1000: float
    server_cpu_s: float
    broker_cpu_s: float
    generator_cpu_s: float
    generator_cpu_s_per_1000: float
    server_start_bytes: int
    server_idle_bytes: int
    server_peak_bytes: int
    server_rest_bytes: int
    idle_device_bytes: int
    broker_peak_bytes: int
    ack_p50_s: float
    ack_p99_s: float
    resent_share: float
    resent_chunks: int
    dropped_messages: int
    journal_bytes: int
    out_bytes: int
    vanished: int
    unanswered: int
    fates: Mapping[str, int]


def measure(case: Case, tell: Callable[[str], None]) -> FleetRow:
    """A broker, a server, and a fleet in this process. EdgeflError if one of them cannot go on."""
    check_room(case.devices)
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder, port = Path(name), free_port()
        with running_broker(port, folder / "broker") as broker, running_server(case, port, folder) as server:
            run = Run(case, port, broker, server, folder, tell)
            run.go()
            return _row(case, run.measured, run)


def _row(case: Case, measured: FleetFigures, run: Run) -> FleetRow:
    first, last = run.marks[case.uncounted], run.marks[-1]
    accepted = sum(measured.reports[case.uncounted :])
    server_s, broker_s = last.server_s - first.server_s, last.broker_s - first.broker_s
    generator_s = last.generator_s - first.generator_s
    cycles = [end.at - start.at for start, end in pairwise(run.marks[case.uncounted :])]
    rounds = sorted(measured.seconds[case.uncounted :])
    acks = sorted(run.fleet.tally.ack_s[first.acks : last.acks])
    per_thousand = 1000 / max(1, accepted)
    summary = run.fleet.summary()
    return filled(
        FleetRow,
        case,
        measured,
        summary,
        selected=case.tasks,
        closed=sum(outcome == "closed" for outcome in measured.outcomes[case.uncounted :]),
        connect_s=round(measured.connect_s, 3),
        round_p50_s=round(statistics.median(rounds), 4),
        round_p99_s=round(quantile(rounds, 0.99), 4),
        cycle_p50_s=round(statistics.median(cycles), 4),
        updates_per_s=round(accepted / max(1e-9, sum(cycles)), 1),
        server_cpu_s_per_1000=round(server_s * per_thousand, 3),
        server_cpu_s=round(server_s, 3),
        broker_cpu_s=round(broker_s, 3),
        generator_cpu_s=round(generator_s, 3),
        generator_cpu_s_per_1000=round(generator_s * per_thousand, 3),
        idle_device_bytes=max(0, measured.server_idle_bytes - measured.server_start_bytes) // case.devices,
        ack_p50_s=round(quantile(acks, 0.5), 4),
        ack_p99_s=round(quantile(acks, 0.99), 4),
    )
