"""What events say about who worked when."""

import io
import json

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from antiphon.record.events import RECENT, Events, to_trace
from antiphon.record.timeline import Timeline, union_length

EVENTS = [
    (0.0, {"event": "place", "request": "0.0.0/0", "engine": 0, "prompt": 5}),
    (0.0, {"event": "place", "request": "0.1.0/0", "engine": 1, "prompt": 5}),
    (2.0, {"event": "served", "request": "0.0.0/0", "engine": 0, "tokens": 7}),
    (2.5, {"event": "attempt", "attempt": "0.0.0", "status": "finished"}),
    (3.0, {"event": "take", "groups": [0]}),
    (4.0, {"event": "publish", "version": 1}),
    (4.5, {"event": "load", "engine": 0, "version": 1}),
    (5.0, {"event": "attempt", "attempt": "0.1.0", "status": "redundant"}),
    (5.0, {"event": "place", "request": "1.0.0/0", "engine": 0, "prompt": 6}),
    (6.0, {"event": "take", "groups": [1]}),
    (8.0, {"event": "publish", "version": 2}),
]


def read():
    return Timeline.read(json.dumps({"t": t, **what}) for t, what in EVENTS)


def test_requests_steps_and_loads_are_read():
    timeline = read()
    (request,) = timeline.served
    assert (request.attempt, request.group, request.tokens, request.prompt) == ("0.0.0", "0", 7, 5)
    assert timeline.steps == [(3.0, 4.0), (6.0, 8.0)]
    assert timeline.loads == [0.5]
    assert timeline.finished == {"0.0.0": 2.5}


def test_idle_shares_count_aborted_and_open_requests():
    timeline = read()
    assert timeline.step_seconds(0) == 4.0
    assert timeline.learner_idle(0) == approx(0.5)
    # From 4 to 8: engine 0 works from 5 on, and never comes back; engine 1 until its request is aborted at 5.
    assert timeline.engines_idle(0) == approx((0.25 + 0.75) / 2)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)))
def test_a_union_counts_each_moment_once(spans):
    assert union_length(map(tuple, spans)) == len({tick for start, stop in spans for tick in range(start, stop)})


def test_requests_that_ran_wholly_between_two_moments():
    timeline = read()
    assert [len(timeline.within(since, until)) for since, until in ((0, 2), (0, 1.9), (0.1, 2), (-1, 9))] == [
        1,
        0,
        0,
        1,
    ]


def test_events_are_written_kept_and_told_where_they_are_rare():
    sink, seconds, rare = io.StringIO(), iter(range(100)), []
    events = Events(lambda: next(seconds), sink)
    events.on_rare = lambda event, what: rare.append((event, what))
    events.add("take", groups=[1])
    judge = events.for_pool("judge")
    judge.add("join", engine=next(judge.engine_numbers), version=0)
    judge.add("place", request="judge/0", engine=0)
    assert next(events.engine_numbers) == 1, "an engine's number is its own in the whole run"
    assert [json.loads(line) for line in sink.getvalue().splitlines()] == [
        {"t": 0, "event": "take", "groups": [1]},
        {"t": 1, "event": "join", "pool": "judge", "engine": 0, "version": 0},
    ]
    assert rare == [("join", {"pool": "judge", "engine": 0, "version": 0})]
    assert (
        events.enabled
        and not judge.enabled
        and not Events().enabled
        and events.format_recent() == sink.getvalue().strip()
    )
    assert Events().format_recent() == "none"
    for _ in range(RECENT):
        events.add("take", groups=[])
    assert len(events.format_recent().splitlines()) == RECENT and "join" not in events.format_recent()


def test_trace_has_a_span_for_each_step_request_and_attempt():
    trace = to_trace(json.dumps({"t": t, **what}) for t, what in [*EVENTS, (9.0, {"event": "grow", "engines": 2})])
    events = trace["traceEvents"]
    spans = {
        (begin["name"], begin["tid"]): (begin["ts"] / 1e6, end["ts"] / 1e6)
        for begin in events
        if begin["ph"] == "b"
        for end in events
        if end["ph"] == "e" and (end["id"], end["tid"]) == (begin["id"], begin["tid"])
    }
    assert spans == {
        ("step 1", "learner"): (3.0, 4.0),
        ("step 2", "learner"): (6.0, 8.0),
        ("0.0.0/0", "engine 0"): (0.0, 2.0),
    }
    moments = [(event["name"], event["tid"], event["ts"] / 1e6) for event in events if event["ph"] == "i"]
    assert moments == [("load", "engine 0", 4.5), ("grow", "events", 9.0)]


def test_the_picture_counts_attempts_that_run():
    changes = [
        ("0.0.0", "running"),
        ("0.1.0", "running"),
        ("0.0.0", "finished"),
        ("0.0.0", "trained"),
        ("0.1.0", "stale"),
    ]
    lines = [json.dumps({"t": t, "event": "attempt", "attempt": a, "status": s}) for t, (a, s) in enumerate(changes)]
    events = to_trace(lines)["traceEvents"]
    counts = [event for event in events if event["ph"] == "C"]
    assert [event["args"]["n"] for event in counts] == [1, 2, 1, 1, 0]
    assert {(event["pid"], event["name"]) for event in counts} == {("attempts", "running attempts")}
    spans = [(event["name"], event["ph"], event["ts"] / 1e6) for event in events if event["ph"] in "be"]
    assert spans == [("0.0.0", "b", 0.0), ("0.0.0", "e", 2.0), ("0.1.0", "b", 1.0), ("0.1.0", "e", 4.0)]
