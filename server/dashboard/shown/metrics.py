"""The fleet for Prometheus: gauges of what is known at the moment of asking, with labels of few values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.dashboard.shown import rows
from server.dashboard.shown.glance import Glance

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PHASES = ("starting", "waiting", "open", "done", "stopped", "refused")


def exposition(glance: Glance) -> bytes:
    """In the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(glance))
    return generate_latest(registry)


class _Collector:
    def __init__(self, glance: Glance) -> None:
        self._glance = glance

    def collect(self) -> Iterator[Metric]:
        yield from _run(self._glance)
        yield from _rounds(self._glance)
        yield from _devices(self._glance)
        yield from _server(self._glance)


def _gauge(name: str, text: str, value: float | None, federation: str) -> Iterator[Metric]:
    if value is not None:
        made = GaugeMetricFamily(f"edgefl_{name}", text, labels=["federation"])
        made.add_metric([federation], value)
        yield made


def _run(glance: Glance) -> Iterator[Metric]:
    run = rows.run_row(glance.fleet)
    name = run.federation
    phase = GaugeMetricFamily(
        "edgefl_phase", "1 for the phase that the run is in", labels=["federation", "phase"]
    )
    for each in _PHASES:
        phase.add_metric([name, each], float(each == run.phase))
    yield phase
    yield from _gauge("paused", "1 while an operator lets no round open", float(run.paused), name)
    yield from _gauge("rounds_total_planned", "rounds that the run is to have", run.rounds, name)
    yield from _gauge("round", "number of the newest round", run.round, name)
    yield from _gauge("accuracy", "of the newest model that was evaluated", run.accuracy, name)
    yield from _gauge("loss", "of the newest model that was evaluated", run.loss, name)
    yield from _gauge("server_silent_seconds", "since the server last told anything", run.silent_s, name)
    yield from _gauge(
        "broker_up", "0 while the server cannot reach its broker", float(not run.broker_offline), name
    )


def _rounds(glance: Glance) -> Iterator[Metric]:
    fleet, name = glance.fleet, glance.fleet.federation
    ended = [row for row in glance.rounds() if row.state != "open"]
    outcomes = CounterMetricFamily(
        "edgefl_rounds", "rounds that ended, by how", labels=["federation", "outcome"]
    )
    for outcome, count in sorted(Counter(row.state for row in ended).items()):
        outcomes.add_metric([name, outcome], count)
    yield outcomes
    fates = CounterMetricFamily(
        "edgefl_updates", "what became of the devices of rounds that ended", labels=["federation", "fate"]
    )
    for fate in ("arrived", "rejected", "declined", "missing", "late"):
        fates.add_metric([name, fate], sum(getattr(row, fate) for row in ended))
    yield fates
    moved = CounterMetricFamily(
        "edgefl_bytes", "payloads of updates and of weights", labels=["federation", "way"]
    )
    for way in ("up", "down"):
        moved.add_metric([name, way], sum(getattr(row, f"{way}_bytes") for row in ended))
    yield moved
    if ended:
        yield from _gauge("round_seconds", "of the newest round that ended", ended[0].seconds, name)
        yield from _gauge("round_arrived", "updates of the newest round that ended", ended[0].arrived, name)
        yield from _gauge("round_selected", "devices of the newest round that ended", ended[0].selected, name)
    turned = CounterMetricFamily(
        "edgefl_turned_away", "messages left unread, by why", labels=["federation", "reason"]
    )
    for reason, count in sorted(fleet.turned_away.items()):
        turned.add_metric([name, reason], count)
    yield turned


def _devices(glance: Glance) -> Iterator[Metric]:
    fleet, name = glance.fleet, glance.fleet.federation
    counts = Counter((device.tier, rows.state_of(fleet, device)) for device in fleet.devices.values())
    devices = GaugeMetricFamily(
        "edgefl_devices", "devices, by tier and state", labels=["federation", "tier", "state"]
    )
    for (tier, state), count in sorted(counts.items()):
        devices.add_metric([name, tier, state], count)
    yield devices
    for what, text in (
        ("planned_bytes", "memory that the largest graph of a round was planned to take"),
        ("used_bytes", "memory over the idle process, median of the newest reports"),
        ("seconds", "from a round's opening to the report, median of the newest"),
        ("step_ms", "milliseconds of a training step, median of the newest reports"),
    ):
        made = GaugeMetricFamily(f"edgefl_tier_{what}", text, labels=["federation", "tier"])
        for row in glance.tiers:
            if (value := getattr(row, what)) is not None:
                made.add_metric([name, row.tier], value)
        yield made


def _server(glance: Glance) -> Iterator[Metric]:
    fleet, name = glance.fleet, glance.fleet.federation
    if not fleet.vitals:
        return
    last = fleet.vitals[-1]
    yield from _gauge(
        "server_lag_seconds", "that a message waits until the server looks at it", last.server_lag_s, name
    )
    if last.broker_lag_s >= 0:
        yield from _gauge(
            "broker_lag_seconds", "that the broker takes to confirm a message", last.broker_lag_s, name
        )
    yield from _gauge("server_inbox", "messages that wait at the server", last.inbox, name)
    yield from _gauge("server_resident_bytes", "memory of the server's process", last.rss_bytes, name)
    cpu = CounterMetricFamily(
        "edgefl_server_cpu_seconds", "processor time of the server", labels=["federation"]
    )
    cpu.add_metric([name], last.cpu_s)
    yield cpu
