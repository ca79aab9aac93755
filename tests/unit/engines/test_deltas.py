"""Deltas on their way: joining some of them changes nothing for whoever reads them all."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engines.base import Delta
from antiphon.types import MIXED_CACHE, FinishReason, Streams


def apply(deltas):
    """What a reader holds after `deltas`: rows of (token, logprob, version, mixed), and the finish."""
    rows, finish = [], None
    for delta in deltas:
        if delta.restarted:
            rows = []
        columns = (delta.tokens, delta.logprobs, delta.versions, delta.streams.get(MIXED_CACHE, np.empty(0)))
        rows += list(zip(*(column.tolist() for column in columns), strict=True))
        finish = delta.finish
    return rows, finish


@st.composite
def streams(draw):
    """The deltas of one request, and where to cut them into bundles."""
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    restarted = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    tokens = iter(range(sum(sizes)))
    deltas = []
    for number, (size, again) in enumerate(zip(sizes, restarted, strict=True)):
        own = np.array([next(tokens) for _ in range(size)], np.int32)
        deltas.append(
            Delta(
                request="r",
                tokens=own,
                logprobs=own.astype(np.float32) / -8,
                versions=own + 100,
                streams=Streams({MIXED_CACHE: own % 2 == 0}) if size else Streams(),
                restarted=again,
                finish=FinishReason.STOP if number == count - 1 else None,
            )
        )
    return deltas, draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()


@given(streams())
def test_bundles_tell_the_same(stream):
    deltas, cuts = stream
    edges = [0, *sorted(cuts), len(deltas)]
    bundles = [Delta.join(deltas[start:stop]) for start, stop in pairwise(edges)]
    assert apply(bundles) == apply(deltas)


def test_of_nothing_at_all_there_are_the_streams_that_there_would_be():
    joined = Delta.join([Delta.empty("r"), Delta.empty("r", finish=FinishReason.ABORT)])
    assert MIXED_CACHE in joined.streams and joined.streams.length == 0
