"""Spans of a run for an OpenTelemetry collector, sent while it runs: steps, attempts, requests, and calls of roles.

A request is a child of its attempt. Rare events, such as the loss of an engine, are spans without duration. A batch of spans is
sent every few seconds by a thread of OpenTelemetry's SDK, which drops spans where the collector is too slow: no run waits.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from antiphon.core.optional_packages import import_optional
from antiphon.record.events import ATTEMPTS, RARE, Span, SpanBuilder

PACKAGE = "opentelemetry-exporter-otlp-proto-http"
SEND_SECONDS = 5  # that one try to send may take, and what is left to send when a run ends
PLAIN = (str, bool, int, float)  # types of OpenTelemetry's attributes


class SpanExporter:
    """Sends the spans that events end to a collector that speaks OTLP over HTTP."""

    def __init__(self, url: str, run: str, lineage: int, clock: Callable[[], float]) -> None:
        """Prepare to send.

        Args:
            url: Of the collector, such as http://127.0.0.1:4318/v1/traces.
            run: Name of the run, an attribute of all spans.
            lineage: Its lineage, likewise.
            clock: Returns the seconds on the run's clock, on which events are.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        sdk = import_optional("opentelemetry.sdk.trace", "record.spans", PACKAGE)
        exporter = import_optional("opentelemetry.exporter.otlp.proto.http.trace_exporter", "record.spans", PACKAGE)
        resources = import_optional("opentelemetry.sdk.resources", "record.spans", PACKAGE)
        batches = import_optional("opentelemetry.sdk.trace.export", "record.spans", PACKAGE)
        self._api: Any = import_optional("opentelemetry.trace", "record.spans", PACKAGE)
        self._ids = _make_ids(sdk)
        about = {"service.name": "antiphon", "antiphon.run": run, "antiphon.lineage": lineage}
        self._provider: Any = sdk.TracerProvider(
            resource=resources.Resource.create(about), id_generator=self._ids, shutdown_on_exit=False
        )
        self._sender: Any = exporter.OTLPSpanExporter(endpoint=url, timeout=SEND_SECONDS)
        self._provider.add_span_processor(batches.BatchSpanProcessor(self._sender))
        self._tracer: Any = self._provider.get_tracer("antiphon")
        self._began = time.time() - clock()
        self._salt = secrets.token_bytes(16)  # runs of one name have other ids
        self._sent = 0
        self._spans = SpanBuilder()

    def __call__(self, t: float, event: str, fields: Mapping[str, Any]) -> None:
        """Take an event, which may end a span."""
        if span := self._spans.add(t, event, fields):
            self._send(span)
        elif event in RARE:
            self._send(Span(event, "events", t, t, f"{event} {t}", "", fields))

    def close(self) -> None:
        """Send what is left, for `SEND_SECONDS` at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(SEND_SECONDS)
        if ending.is_alive():
            self._sender.shutdown()  # else a process that goes on, such as a notebook, would try again for half a minute

    def _send(self, span: Span) -> None:
        self._sent += 1
        key = span.key if span.track == ATTEMPTS else f"{span.key} {self._sent}"  # a request may be sent again
        root = span.parent or key
        self._ids.trace, self._ids.span = self._number(f"trace {root}", 16), self._number(key, 8)
        parent = self._api.INVALID_SPAN  # and not what this process may be in
        if span.parent:
            ids = self._ids.trace, self._number(span.parent, 8)
            about = self._api.SpanContext(*ids, is_remote=False, trace_flags=self._api.TraceFlags(1))
            parent = self._api.NonRecordingSpan(about)
        context = self._api.set_span_in_context(parent)
        attributes = {name: value for name, value in map(_attribute, span.fields.items()) if value is not None}
        made = self._tracer.start_span(
            span.name,
            context,
            attributes=attributes | {"antiphon.track": span.track},
            start_time=self._time(span.since),
        )
        if span.fields.get("status") == "failed" or span.fields.get("error"):
            made.set_status(self._api.StatusCode.ERROR)
        made.end(self._time(span.until))

    def _number(self, key: str, size: int) -> int:
        """Return an id of so many bytes; OpenTelemetry has no id 0."""
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=size, key=self._salt).digest()) or 1

    def _time(self, seconds: float) -> int:
        """Return nanoseconds since 1970."""
        return int((self._began + seconds) * 1e9)


def _make_ids(sdk: Any) -> Any:
    """Return a generator of ids that gives those which it was told."""

    class Ids(sdk.IdGenerator):
        trace = span = 1

        def generate_trace_id(self) -> int:
            return self.trace

        def generate_span_id(self) -> int:
            return self.span

    return Ids()


def _attribute(field: tuple[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of an attribute; lists and mappings are text, and nothing stays nothing."""
    name, value = field
    return f"antiphon.{name}", value if value is None or isinstance(value, PLAIN) else str(value)
