"""Metrics of a fleet in the format of Prometheus: gauges and counters with few label values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from edgefl_server.dashboard.views import summary
from edgefl_server.dashboard.views.summary import FleetSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PHASES = ("starting", "waiting", "open", "done", "stopped", "refused")


def exposition(glance: FleetSnapshot) -> bytes:
    """Return the metrics of the fleet in the text format of Prometheus, UTF-8."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(glance))
    return generate_latest(registry)


_Family = CounterMetricFamily | GaugeMetricFamily
_Value = tuple[Sequence[str], float]
"""Label values, and the number of the metric with these labels."""


class _MetricsCollector:
    def __init__(self, glance: FleetSnapshot) -> None:
        self._glance = glance

    def collect(self) -> Iterator[Metric]:
        yield from _run(self._glance)
        yield from _rounds(self._glance)
        yield from _devices(self._glance)
        yield from _evaluation(self._glance)
        yield from _server(self._glance)


def _family(
    kind: type[_Family], name: str, text: str, labels: Sequence[str], values: Iterable[_Value]
) -> Metric:
    """Return a Prometheus metric of this ``kind``, named ``edgefl_<name>`` and described by ``text``.

    ``values`` are pairs of label values, in the order of ``labels``, and a number.
    """
    made = kind(f"edgefl_{name}", text, labels=labels)
    for of, value in values:
        made.add_metric(of, value)
    return made


def _gauge(name: str, text: str, value: float | None, federation: str) -> Iterator[Metric]:
    if value is not None:
        yield _family(GaugeMetricFamily, name, text, ["federation"], [([federation], value)])


def _run(glance: FleetSnapshot) -> Iterator[Metric]:
    run = summary.run_row(glance.fleet)
    name = run.federation
    phases = (([name, each], float(each == run.phase)) for each in _PHASES)
    text = "1 for the phase that the run is in"
    yield _family(GaugeMetricFamily, "phase", text, ["federation", "phase"], phases)
    yield from _gauge("paused", "1 while an operator lets no round open", float(run.paused), name)
    yield from _gauge("rounds_total_planned", "rounds that the run is to have", run.rounds, name)
    yield from _gauge("round", "number of the newest round", run.round, name)
    yield from _gauge("accuracy", "of the newest model that was evaluated", run.accuracy, name)
    yield from _gauge("loss", "of the newest model that was evaluated", run.loss, name)
    yield from _gauge("server_silent_seconds", "since the server last told anything", run.silent_s, name)
    up = float(not run.broker_offline)
    yield from _gauge("broker_up", "0 while the server cannot reach its broker", up, name)


def _rounds(glance: FleetSnapshot) -> Iterator[Metric]:
    fleet, name = glance.fleet, glance.fleet.federation
    ended = [row for row in glance.rounds() if row.state != "open"]

    def counted(what: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        values = (([name, each], count) for each, count in counts.items())
        return _family(CounterMetricFamily, what, text, ["federation", label], values)

    def total(field: str) -> float:
        return float(sum(getattr(row, field) for row in ended))

    outcomes = dict(sorted(Counter(row.state for row in ended).items()))
    yield counted("rounds", "rounds that ended, by how", "outcome", outcomes)
    fates = {fate: total(fate) for fate in ("arrived", "rejected", "declined", "missing", "late")}
    yield counted("updates", "what became of the devices of rounds that ended", "fate", fates)
    moved = {way: total(f"{way}_bytes") for way in ("up", "down")}
    yield counted("bytes", "payloads of updates and of weights", "way", moved)
    if ended:
        yield from _gauge("round_seconds", "of the newest round that ended", ended[0].seconds, name)
        yield from _gauge("round_arrived", "updates of the newest round that ended", ended[0].arrived, name)
        yield from _gauge("round_selected", "devices of the newest round that ended", ended[0].selected, name)
    turned = dict(sorted(fleet.turned_away.items()))
    yield counted("turned_away", "messages left unread, by why", "reason", turned)


def _devices(glance: FleetSnapshot) -> Iterator[Metric]:
    fleet, name = glance.fleet, glance.fleet.federation
    counts = Counter((device.tier, summary.state_of(fleet, device)) for device in fleet.devices.values())
    states = (([name, *tier_and_state], count) for tier_and_state, count in sorted(counts.items()))
    labels = ["federation", "tier", "state"]
    yield _family(GaugeMetricFamily, "devices", "devices, by tier and state", labels, states)
    for what, text in (
        ("planned_bytes", "memory that the largest graph of a round was planned to take"),
        ("used_bytes", "memory over the idle process, median of the newest reports"),
        ("seconds", "from a round's opening to the report, median of the newest"),
        ("step_ms", "milliseconds of a training step, median of the newest reports"),
    ):
        values = (
            ([name, row.tier], value) for row in glance.tiers if (value := getattr(row, what)) is not None
        )
        yield _family(GaugeMetricFamily, f"tier_{what}", text, ["federation", "tier"], values)


def _evaluation(glance: FleetSnapshot) -> Iterator[Metric]:
    """Yield the metrics of the newest evaluation on devices."""
    found, name = summary.newest_evaluation(glance.fleet), glance.fleet.federation
    if found is None:
        return
    if (group := found.devices) is not None:
        stats = {"total": group.metrics, "median": group.median, "worst_decile": group.worst_decile}
        values = [
            ([name, metric, stat], value)
            for stat, by_metric in stats.items()
            for metric, value in by_metric.items()
        ]
        text = "of the model on held-out rows of devices: over all rows, and median and worst decile of the devices"
        yield _family(GaugeMetricFamily, "devices_metric", text, ["federation", "metric", "stat"], values)
    tiers = [
        ([name, tier, metric], value)
        for tier, group in found.tiers.items()
        for metric, value in group.metrics.items()
    ]
    text = "of the model of a tier on held-out rows of its devices"
    yield _family(GaugeMetricFamily, "tier_metric", text, ["federation", "tier", "metric"], tiers)


def _server(glance: FleetSnapshot) -> Iterator[Metric]:
    fleet, name = glance.fleet, glance.fleet.federation
    if not fleet.vitals:
        return
    last = fleet.vitals[-1]
    text = "that a message waits until the server looks at it"
    yield from _gauge("server_lag_seconds", text, last.server_lag_s, name)
    if last.broker_lag_s >= 0:
        text = "that the broker takes to confirm a message"
        yield from _gauge("broker_lag_seconds", text, last.broker_lag_s, name)
    yield from _gauge("server_inbox", "messages that wait at the server", last.inbox, name)
    yield from _gauge("server_resident_bytes", "memory of the server's process", last.rss_bytes, name)
    text = "processor time of the server"
    yield _family(CounterMetricFamily, "server_cpu_seconds", text, ["federation"], [([name], last.cpu_s)])
