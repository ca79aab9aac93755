"""What events say about who worked when."""

import json

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

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
