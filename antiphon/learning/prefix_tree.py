"""Prefixes that segments share, as a tree of spans: a prompt, or an agent's history, is computed once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.core.types import Segment


@dataclass(slots=True, eq=False)
class Span:
    """Tokens `start` to `stop` that some segments have in common, after all tokens before: a node of the tree.

    At most one of these segments has loss tokens in the span. It is the owner; if none has, the first one is.
    """

    owner: int  # index of the segment
    start: int
    stop: int
    parent: "Span | None"
    children: dict[int, list["Span"]] = field(default_factory=dict)  # by their first tokens

    def __len__(self) -> int:
        return self.stop - self.start


SpanPath = list[Span]  # from the beginning of a segment to its end


def build_prefix_tree(segments: Sequence[Segment], share: bool) -> list[SpanPath]:
    """Return the spans of each segment.

    Args:
        segments: Segments in a fixed order.
        share: Share common prefixes; otherwise each segment is one span.
    """
    if not share:
        return [[Span(number, 0, len(segment.tokens), None)] for number, segment in enumerate(segments)]
    root, ends = Span(-1, 0, 0, None), []
    keys = [segment.token_keys() for segment in segments]
    for number, segment in enumerate(segments):
        span = root
        while span.stop < len(segment.tokens):
            span = _insert_next_span(span, number, segments, keys)
        ends.append(span)
    return [_path_to(end) for end in ends]


def owners_in_pack(segments: Sequence[Segment], paths: Sequence[SpanPath]) -> dict[Span, int]:
    """Return the spans of the segments of a pack, parents first, and the index of the segment that owns each in this pack."""
    owners: dict[Span, int] = {}
    for number, (segment, path) in enumerate(zip(segments, paths, strict=True)):
        for span in path:
            if span not in owners or segment.loss_mask[span.start : span.stop].any():
                owners[span] = number
    return owners


def _insert_next_span(
    here: Span, number: int, segments: Sequence[Segment], keys: Sequence[NDArray[np.integer[Any]]]
) -> Span:
    """Return the span of a segment after the one it has come to: its longest prefix shared with another, or the rest of it.

    `keys` are the `token_keys` of the segments.
    """
    own, start = segments[number], here.stop
    candidates = here.children.setdefault(int(keys[number][start]), [])
    stops = [
        _shared_end(own, segments[span.owner], start, _equal_until(keys[number], keys[span.owner], start, span.stop))
        for span in candidates
    ]
    stop = max(stops, default=start)
    if stop == start:
        candidates.append(Span(number, start, len(own.tokens), here))
        return candidates[-1]
    span = candidates[place := stops.index(stop)]
    if stop < span.stop:
        rest, after = span, int(keys[span.owner][stop])
        span = candidates[place] = Span(rest.owner, start, stop, here, {after: [rest]})
        rest.start, rest.parent = stop, span
    if own.loss_mask[start:stop].any():
        span.owner = number
    return span


def _equal_until(one: NDArray[np.integer[Any]], other: NDArray[np.integer[Any]], start: int, stop: int) -> int:
    """Return the place, at most `stop`, up to which two arrays that are equal up to `start` are equal."""
    stop = min(stop, len(one))
    differ = one[start:stop] != other[start:stop]
    return start + int(differ.argmax()) if differ.any() else stop


def _shared_end(one: Segment, other: Segment, start: int, stop: int) -> int:
    """Return the end of the span that two segments, which are equal up to `stop`, share from `start` on.

    It ends where both would have loss tokens in one span, but never within tokens that were sampled together.
    """
    if one.loss_mask[start] and other.loss_mask[start]:
        return start
    first, second = (np.flatnonzero(segment.loss_mask[start:stop]) for segment in (one, other))
    if len(first) and len(second):
        stop = start + max(int(first[0]), int(second[0]))
    for segment in (one, other):
        stop = _before_loss_run(segment.loss_mask, start, stop)
    return stop


def _before_loss_run(mask: NDArray[np.bool_], start: int, stop: int) -> int:
    """Return the last place from `start` to `stop` that does not split a run of loss tokens, by a mask [L]."""
    while start < stop < len(mask) and mask[stop - 1] and mask[stop]:
        stop -= 1
    return stop


def _path_to(end: Span) -> SpanPath:
    path, span = [end], end.parent
    while span is not None and span.stop:  # not the root
        path.append(span)
        span = span.parent
    return path[::-1]
