"""A round as a trace."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from edgefl_server.dashboard.web.traces import TraceExporter
from edgefl_server.events import RoundEnded, RoundOpened, UpdateAccepted
from tests.support.errors import ConfigError, refuses


def test_a_round_is_a_trace_of_its_devices() -> None:
    exporter = InMemorySpanExporter()
    traces = TraceExporter("http://localhost:4318", exporter)
    traces.take(10.0, RoundOpened(round=4, goal=1, devices=("a", "b"), deadline=60.0))
    traces.take(12.5, UpdateAccepted(device="a", tier="strong", round=4, nonce="", sha256="", weight=1))
    traces.take(13.0, RoundEnded(round=4, outcome="closed", reports=1, missing={"b": "late"}, seconds=3.0))
    traces.flush()

    round_, update = exporter.get_finished_spans()

    assert (round_.name, round_.start_time, round_.end_time) == ("round", 10 * 10**9, 13 * 10**9)
    assert round_.attributes is not None and round_.attributes["devices"] == 2
    assert (update.name, update.end_time) == ("update", 12_500_000_000)
    assert update.parent is not None and update.parent.span_id == round_.get_span_context().span_id


def test_what_is_no_address_is_refused() -> None:
    with refuses(ConfigError, otlp="localhost:4318"):
        TraceExporter("localhost:4318")
