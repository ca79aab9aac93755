"""Prefixes that segments share, as a tree of spans: a prompt, or an agent's history, is computed once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    for number, segment in enumerate(segments):
        span = root
        while span.stop < len(segment.tokens):
            span = _insert_next_span(span, number, segments)
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


def _insert_next_span(here: Span, number: int, segments: Sequence[Segment]) -> Span:
    """Return the span of a segment after the one it has come to: its longest prefix shared with another, or the rest of it."""
    own, start = segments[number], here.stop
    candidates = here.children.setdefault(int(own.tokens[start]), [])
    stops = [shared_prefix_end(own, segments[span.owner], start, span.stop) for span in candidates]
    stop = max(stops, default=start)
    if stop == start:
        candidates.append(Span(number, start, len(own.tokens), here))
        return candidates[-1]
    span = candidates[place := stops.index(stop)]
    if stop < span.stop:
        rest, after = span, int(segments[span.owner].tokens[stop])
        span = candidates[place] = Span(rest.owner, start, stop, here, {after: [rest]})
        rest.start, rest.parent = stop, span
    if own.loss_mask[start:stop].any():
        span.owner = number
    return span


def shared_prefix_end(one: Segment, other: Segment, start: int, stop: int) -> int:
    """Return where two segments that are equal up to `start` diverge, at most `stop`.

    They diverge where their tokens do, and where both would have loss tokens in one span; never within tokens that were sampled
    together.
    """
    if one.loss_mask[start] and other.loss_mask[start]:
        return start
    stop = min(stop, len(one.tokens))
    differ = one.tokens[start:stop] != other.tokens[start:stop]
    stop = start + int(differ.argmax()) if differ.any() else stop
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
