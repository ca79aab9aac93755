"""Spans as an OpenTelemetry collector gets them: what it receives is read by OpenTelemetry's own protocol."""

import contextlib
import pickle
import socket
import threading
import time

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import TracerProvider

from antiphon.record.config import RecordConfig
from antiphon.record.events import Events, SpanBuilder
from antiphon.record.spans import SEND_SECONDS, SpanExporter
from tests.span_collector import attributes

EVENTS = [
    (10.0, "take", {"groups": [3, 4]}),
    (11.0, "attempt", {"attempt": "5.0.0", "status": "running"}),
    (11.5, "place", {"request": "5.0.0/0", "engine": 1, "prompt": 7}),
    (12.5, "served", {"request": "5.0.0/0", "engine": 1, "finish": "stop", "tokens": 9, "versions": [1, 2]}),
    (12.6, "lost", {"engine": 1}),
    (13.0, "role", {"role": "search", "method": "find", "seconds": 0.25}),
    (13.0, "role", {"role": "search", "method": "find", "seconds": 0.5}),
    (14.0, "attempt", {"attempt": "5.0.0", "status": "failed"}),
    (15.0, "publish", {"version": 2}),
    (15.1, "load", {"engine": 0, "version": 2}),
]
BATCH = 512  # spans that OpenTelemetry's SDK sends at once


def size(builder):
    return len(pickle.dumps(builder))


def test_a_collector_gets_each_span_with_its_parent(collector):
    before = time.time()
    exporter = SpanExporter(collector.url, "sums", 1, lambda: 100.0)  # the run's clock began 100 s ago
    after = time.time()
    for event in EVENTS:
        exporter(*event)
    exporter.close()
    spans = {span.name: span for span in collector.spans}
    assert len(collector.spans) == 6 and spans.keys() == {"step 2", "5.0.0", "5.0.0/0", "find", "lost"}
    began = spans["step 2"].start_time_unix_nano
    assert before - 90 - 1e-3 <= began / 1e9 <= after - 90 + 1e-3
    times = {
        name: [10 + (at - began) / 1e9 for at in (span.start_time_unix_nano, span.end_time_unix_nano)]
        for name, span in spans.items()
    }
    assert {name: pytest.approx(at, abs=1e-3) for name, at in times.items()} == {
        "step 2": [10, 15],
        "5.0.0": [11, 14],
        "5.0.0/0": [11.5, 12.5],
        "find": [12.5, 13],
        "lost": [12.6, 12.6],
    }
    request, attempt = spans["5.0.0/0"], spans["5.0.0"]
    assert (request.trace_id, request.parent_span_id) == (attempt.trace_id, attempt.span_id)
    assert not attempt.parent_span_id
    assert len({span.trace_id for span in collector.spans}) == 5, "a trace for each attempt, step, call and loss"
    assert len({span.span_id for span in collector.spans}) == 6
    assert attributes(request) == {
        "antiphon.request": "5.0.0/0",
        "antiphon.engine": 1,
        "antiphon.finish": "stop",
        "antiphon.tokens": 9,
        "antiphon.versions": "[1, 2]",
        "antiphon.track": "engine 1",
    }
    assert attempt.status.code == Status.STATUS_CODE_ERROR and not request.status.code
    (about,) = collector.resources
    assert (
        attributes(about).items() >= {"service.name": "antiphon", "antiphon.run": "sums", "antiphon.lineage": 1}.items()
    )


def test_runs_of_one_name_have_other_ids(collector):
    for _ in range(2):
        exporter = SpanExporter(collector.url, "sums", 0, lambda: 0.0)
        exporter(1.0, "take", {"groups": []})
        exporter(2.0, "publish", {"version": 1})
        exporter.close()
    first, second = collector.spans
    assert first.trace_id != second.trace_id and first.span_id != second.span_id


def test_events_are_exported_as_they_happen():
    found = []
    events = Events(lambda: 3.0, export=lambda *event: found.append(event))
    assert events.enabled and not Events().enabled
    events.add("load", engine=1)
    events.for_pool("judge-sums").add("lost", engine=2)
    assert found == [(3.0, "load", {"engine": 1}), (3.0, "lost", {"pool": "judge-sums", "engine": 2})]


def test_a_collector_that_does_not_answer_ends_no_run_late():
    """It accepts connections, and leaves them as they are; other batches wait behind the first."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporter = SpanExporter(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "sums", 0, lambda: 0.0)
        for number in range(4 * BATCH):
            exporter(float(number), "lost", {"engine": number})
        exporter.close()
        for thread in [each for each in threading.enumerate() if each.name.startswith("OtelBatch")]:
            thread.join(2 * SEND_SECONDS)
            assert not thread.is_alive(), "it goes on trying after the run"
        silent.setblocking(False)
        tries = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                tries += 1
    assert 0 < tries < 4, "the run waited for each batch"


def test_requests_that_come_again_have_spans_of_their_own(collector):
    """As those of evaluations do, and of an engine that died."""
    exporter = SpanExporter(collector.url, "sums", 0, lambda: 0.0)
    for t in (1.0, 2.0):
        exporter(t, "place", {"request": "-1.0.0/0", "engine": 0, "prompt": 7})
        exporter(t, "served", {"request": "-1.0.0/0", "engine": 0, "tokens": 1})
    exporter.close()
    first, second = collector.spans
    assert first.span_id != second.span_id and first.trace_id != second.trace_id


def test_spans_are_no_part_of_what_the_program_traces(collector):
    outer = TracerProvider().get_tracer("a program that trains")
    exporter = SpanExporter(collector.url, "sums", 0, lambda: 0.0)
    with outer.start_as_current_span("outer") as span:
        exporter(1.0, "lost", {"engine": 0})
    exporter.close()
    (sent,) = collector.spans
    assert not sent.parent_span_id and int.from_bytes(sent.trace_id) != span.get_span_context().trace_id


def test_requests_that_are_cancelled_are_forgotten_with_their_attempt():
    builder = SpanBuilder()
    builder.add(0.0, "attempt", {"attempt": "3.0.0", "status": "running"})
    builder.add(1.0, "place", {"request": "3.0.0/1", "engine": 0, "prompt": 3})  # and is never served
    empty = size(SpanBuilder())
    assert size(builder) > empty
    assert builder.add(4.0, "attempt", {"attempt": "3.0.0", "status": "stale"}).until == 4.0
    assert size(builder) == empty


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://127.0.0.1:4317"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="http://"):
        RecordConfig(spans=url)
