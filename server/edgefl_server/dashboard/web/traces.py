"""OpenTelemetry traces of rounds: a span for the round, one for each device with an accepted update, and one for the
evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from edgefl.errors import ConfigError
from edgefl_server import events

_PATH = "/v1/traces"


@dataclass
class _TracedRound:
    """Open round whose trace is being collected.

    ``came`` holds, by device, (epoch seconds at which its update was accepted, tier).
    """

    opened: float
    devices: int
    goal: int
    came: dict[str, tuple[float, str]] = field(default_factory=dict)


class TraceExporter:
    """Exporter of traces to the collector at ``url`` (OTLP over HTTP), in a thread of its own.

    Traces are lost while the collector is unreachable.

    Raises:
        ConfigError: If ``url`` is invalid.
    """

    def __init__(self, url: str, exporter: SpanExporter | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"`otlp` is the address of a collector, such as http://localhost:4318, found {url!r}",
                otlp=url,
            )
        endpoint = url if url.endswith(_PATH) else url.rstrip("/") + _PATH
        self._provider = TracerProvider(resource=Resource.create({"service.name": "edgefl"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("edgefl")
        self._rounds: dict[int, _TracedRound] = {}
        self._ended: dict[int, tuple[float, Context]] = {}
        self._federation = ""

    def take(self, at: float, event: events.Event) -> None:
        """Add an event, which happened at epoch second ``at``, to the traces.

        The end of a round writes its span and a span for each accepted update; :class:`RoundClosed` writes the span of the
        evaluation. Other events are only remembered, or ignored.
        """
        match event:
            case events.Started():
                self._federation = event.federation
                self._rounds.clear()
                self._ended.clear()
            case events.RoundOpened():
                self._rounds[event.round] = _TracedRound(at, len(event.devices), event.goal)
            case events.UpdateAccepted() if event.round in self._rounds:
                self._rounds[event.round].came.setdefault(event.device, (at, event.tier))
            case events.RoundEnded() if (found := self._rounds.pop(event.round, None)) is not None:
                self._ended = {event.round: (at, self._trace_round(at, event, found))}
            case events.RoundClosed() if (ended := self._ended.pop(event.round, None)) is not None:
                self._span(
                    "evaluation", ended[0], at, ended[1], {"accuracy": event.accuracy, "loss": event.loss}
                )

    def flush(self) -> None:
        """Send the buffered traces now. Blocks until they are sent or lost."""
        self._provider.force_flush()

    def _trace_round(self, at: float, event: events.RoundEnded, found: _TracedRound) -> Context:
        facts: dict[str, str | int | float | None] = {
            "federation": self._federation,
            "round": event.round,
            "outcome": event.outcome,
            "devices": found.devices,
            "goal": found.goal,
            "reports": event.reports,
        }
        context = self._span("round", found.opened, at, None, facts)
        for device, (came, tier) in found.came.items():
            self._span("update", found.opened, came, context, {"device": device, "tier": tier})
        return context

    def _span(
        self,
        name: str,
        began: float,
        ended: float,
        parent: Context | None,
        facts: dict[str, str | int | float | None],
    ) -> Context:
        known = {key: value for key, value in facts.items() if value is not None}
        span = self._tracer.start_span(
            name, parent or Context(), attributes=known, start_time=_nanoseconds(began)
        )
        span.end(_nanoseconds(ended))
        return trace.set_span_in_context(span, Context())


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
