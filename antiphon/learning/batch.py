"""From groups to packs: samples, counts, coefficients, mini-batches, micro-batches. Pure numpy."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.algorithms.config import Aggregation
from antiphon.core.types import (
    PAIR,
    AttemptId,
    AttemptStatus,
    FloatArray,
    Group,
    IntArray,
    Pack,
    PolicyVersion,
    Sample,
    Score,
    Segment,
    Streams,
    StreamSpec,
    TrainBatch,
    TrajectoryMeta,
    Update,
)

_Row = tuple[Sample, NDArray[np.float64]]  # and the coefficients of its tokens [L]
# Pairs of tokens whose attention costs as much as all else of one token, in a dense model 4,096 wide.
PAIRS = 50_000
_ALONE = {"lengths": 1, "parents": -1, "owners": 0, "ends": 0}  # a pack of one piece
_ARRAYS = tuple(spec.name for spec in fields(Pack) if spec.name != "streams")


def make_samples(groups: Sequence[Group]) -> list[list[Sample]]:
    """The samples of each group: every token at weight 1, no advantages yet."""
    return [
        [
            Sample(
                meta=trajectory.meta,
                segment=segment,
                streams=segment.streams,
                advantages=np.zeros(len(segment.tokens), dtype=np.float32),
                weights=np.ones(len(segment.tokens), dtype=np.float32),
                reward=trajectory.meta.score.value or 0.0,
            )
            for trajectory in group.trajectories
            for segment in trajectory.segments
        ]
        for group in groups
    ]


def pack_samples(
    samples: Sequence[Sample], tokens_per_pack: int, streams: Collection[StreamSpec] = (), share: bool = True
) -> tuple[list[list[int]], list[Pack]]:
    """Packs that cover all samples, with the streams of these names, for scoring; and which samples are in each. With `share`
    what samples begin with alike is there once for all of them."""
    paths = _tree([sample.segment for sample in samples], share)
    members = _fill([[path] for path in paths], tokens_per_pack)
    bare = [replace(sample, streams=sample.streams.only(streams)) for sample in samples]
    return members, [_pack([(bare[i], _counted(bare[i])) for i in pack], [paths[i] for i in pack]) for pack in members]


def split_packs(
    samples: Sequence[Sample], members: Sequence[Sequence[int]], scored: Sequence[FloatArray], share: bool = True
) -> list[FloatArray]:
    """Per-token results [T, …] of packs from `pack_samples`, cut back into those of the samples; 0 on prompts."""
    paths = _tree([sample.segment for sample in samples], share)
    result = [np.zeros((len(sample.segment.tokens), *scored[0].shape[1:]), dtype=np.float32) for sample in samples]
    for indices, values in zip(members, scored, strict=True):
        spans = _owners([samples[i].segment for i in indices], [paths[i] for i in indices])
        for (span, owner), part in zip(
            spans.items(), np.split(values, np.cumsum([len(span) for span in spans])[:-1]), strict=True
        ):
            result[indices[owner]][span.start : span.stop] = part
    return result


def build_batch(
    groups: Sequence[Sequence[Sample]],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    minibatches: int = 1,
    epochs: int = 1,
    tokens_per_pack: int,
    skip_zero_advantage: bool = False,
    whole_groups: bool = False,
    ranks: int = 1,
    share: bool = True,
) -> TrainBatch:
    """Cut the groups of a step into updates, and each update into packs of at most `tokens_per_pack` tokens. With `share` what
    samples begin with alike, a prompt or an agent's history, is in a pack once for all of them.

    `max_tokens` is the constant divisor of `sequence_mean_token_sum_norm`. With `skip_zero_advantage` sequences without
    advantage are counted and measured but not trained on: right for losses that are zero there. With `whole_groups` those of a
    group are in the same pack: for losses that compare them with one another.
    """
    parts = [groups[i * len(groups) // minibatches : (i + 1) * len(groups) // minibatches] for i in range(minibatches)]
    updates = [
        _update(part, aggregation, max_tokens, tokens_per_pack, skip_zero_advantage, whole_groups, ranks, share)
        for part in parts
    ]
    return TrainBatch(updates=tuple(updates * epochs))


def _update(
    groups: Sequence[Sequence[Sample]],
    aggregation: Aggregation,
    max_tokens: int,
    tokens_per_pack: int,
    skip_zero_advantage: bool,
    whole_groups: bool,
    ranks: int,
    share: bool,
) -> Update:
    samples = [sample for group in groups for sample in group]
    counted = [int(np.count_nonzero(_counted(sample))) for sample in samples]
    trajectories: dict[object, int] = {}
    for sample, tokens in zip(samples, counted, strict=True):
        trajectories[sample.meta.id] = trajectories.get(sample.meta.id, 0) + tokens
    trained = sum(tokens > 0 for tokens in trajectories.values())  # those with a token that counts
    total = sum(counted)

    def divisor(sample: Sample) -> int:
        """What the loss of one token of this sample is divided by."""
        match aggregation:
            case "token_mean":
                return total
            case "sequence_mean_token_mean":
                return trained * trajectories[sample.meta.id]
            case "sequence_mean_token_sum":
                return trained
            case "sequence_mean_token_sum_norm":
                return trained * max_tokens

    def weighed(sample: Sample) -> _Row:
        return sample, _counted(sample) * sample.weights / max(divisor(sample), 1)

    rows = [[row for row in map(weighed, group) if row[1].any()] for group in groups]
    learned = [[row for row in group if row[0].advantages.any() or not skip_zero_advantage] for group in rows]
    units = [group for group in learned if group] if whole_groups else [[row] for group in learned for row in group]
    others = [[row] for group in rows for row in group if skip_zero_advantage and not row[0].advantages.any()]
    return Update(
        packs=_shared(_packs(units, tokens_per_pack, share), ranks),
        loss_tokens=total,
        samples=len(trajectories),
        groups=len(groups),
        sequences=sum(map(len, units)),
        forward_only=_shared(_packs(others, tokens_per_pack, share), ranks),
    )


def _packs(units: Sequence[Sequence[_Row]], tokens_per_pack: int, share: bool) -> list[Pack]:
    """Return packs of rows, none of which part a unit."""
    paths = iter(_tree([sample.segment for unit in units for sample, _ in unit], share))
    placed = [[(row, next(paths)) for row in unit] for unit in units]
    packs = []
    for members in _fill([[path for _, path in unit] for unit in placed], tokens_per_pack):
        own = [pair for i in members for pair in placed[i]]
        packs.append(_pack([row for row, _ in own], [path for _, path in own]))
    return packs


def _shared(packs: Sequence[Pack], ranks: int) -> tuple[tuple[Pack, ...], ...]:
    """The packs of each rank: as many for each, because all compute at once, and as much work for each as can be.

    Where they do not come out even, some rank has one without a loss. Source of the differencing: Karmarkar and Karp 1982;
    with parts of equal number Michiels et al. 2003, "Performance ratios for the differencing method".
    """
    if ranks == 1 or not packs:
        return (tuple(packs),) * ranks
    filled = [*packs, *[padding_pack(packs[0])] * (-len(packs) % ranks)]
    work = sorted(((_work(pack), index) for index, pack in enumerate(filled)), reverse=True)
    # Ways to divide some of the packs among ranks: of each rank, its work and its packs.
    ways = [[(cost, [index]) for cost, index in work[i : i + ranks]] for i in range(0, len(work), ranks)]
    while len(ways) > 1:
        ways.sort(key=lambda way: max(way)[0] - min(way)[0])
        one, other = sorted(ways.pop()), sorted(ways.pop(), reverse=True)
        ways.append([(a + b, [*mine, *more]) for (a, mine), (b, more) in zip(one, other, strict=True)])
    return tuple(tuple(filled[index] for index in sorted(mine)) for _, mine in sorted(ways[0], key=lambda s: min(s[1])))


def _work(pack: Pack) -> float:
    """What a pack costs to compute, in tokens: its own, and the pairs that attention looks at."""
    through = np.zeros(len(pack.lengths))  # tokens from the beginning of each piece's sequence to its end
    for piece, (length, parent) in enumerate(zip(pack.lengths, pack.parents, strict=True)):
        through[piece] = length + (through[parent] if parent >= 0 else 0)
    return float(pack.lengths.sum() + (pack.lengths * through).sum() / PAIRS)


def padding_pack(pack: Pack) -> Pack:
    """A token of a pack, and no loss."""
    first = {name: getattr(pack, name)[:1] for name in _ARRAYS}
    alone = {name: np.full(1, value, np.int32) for name, value in _ALONE.items()}
    quiet = {"loss_mask": np.zeros(1, np.bool_), "coefficients": np.zeros(1)}
    return Pack(**(first | alone | quiet), streams=Streams({spec: pack.streams[spec][:1] for spec in pack.streams}))


def _counted(sample: Sample) -> NDArray[np.float64]:
    """1 where a token takes part in the loss, [L]. The first token has nothing before it to be predicted from."""
    counted: NDArray[np.float64] = (sample.segment.loss_mask & (sample.weights != 0)).astype(np.float64)
    counted[:1] = 0
    return counted


@dataclass(slots=True, eq=False)
class _Span:
    """Tokens that some segments have alike after all that comes before: a node of the tree that segments make. The loss that is
    there is that of one of them."""

    owner: int  # which segment has that loss; if none has, the first that was here
    start: int
    stop: int
    parent: "_Span | None"
    children: dict[int, list["_Span"]] = field(default_factory=dict)  # by their first tokens

    def __len__(self) -> int:
        return self.stop - self.start


_Path = list[_Span]  # from the beginning of a segment to its end


def _tree(segments: Sequence[Segment], share: bool) -> list[_Path]:
    """The spans of each segment; with `share` in a tree, else each has one."""
    if not share:
        return [[_Span(number, 0, len(segment.tokens), None)] for number, segment in enumerate(segments)]
    root, ends = _Span(-1, 0, 0, None), []
    for number, segment in enumerate(segments):
        here = root
        while here.stop < len(segment.tokens):
            here = _next(here, number, segments)
        ends.append(here)
    return [_path(end) for end in ends]


def _next(here: _Span, number: int, segments: Sequence[Segment]) -> _Span:
    """The span of a segment after the one it has come to: what it has alike with another, or the rest of it."""
    own, start = segments[number], here.stop
    alike = here.children.setdefault(int(own.tokens[start]), [])
    stops = [_parting(own, segments[span.owner], start, span.stop) for span in alike]
    stop = max(stops, default=start)
    if stop == start:
        alike.append(_Span(number, start, len(own.tokens), here))
        return alike[-1]
    span = alike[place := stops.index(stop)]
    if stop < span.stop:
        rest, after = span, int(segments[span.owner].tokens[stop])
        span = alike[place] = _Span(rest.owner, start, stop, here, {after: [rest]})
        rest.start, rest.parent = stop, span
    if own.loss_mask[start:stop].any():
        span.owner = number
    return span


def _parting(one: Segment, other: Segment, start: int, stop: int) -> int:
    """Where two segments that are alike up to `start` part, at `stop` at the latest: where their tokens do, or where a span
    that has the loss of one would get that of the other; never within tokens that were sampled together."""
    if one.loss_mask[start] and other.loss_mask[start]:
        return start
    stop = min(stop, len(one.tokens))
    differ = one.tokens[start:stop] != other.tokens[start:stop]
    stop = start + int(differ.argmax()) if differ.any() else stop
    first, second = (np.flatnonzero(segment.loss_mask[start:stop]) for segment in (one, other))
    if len(first) and len(second):
        stop = start + max(int(first[0]), int(second[0]))
    for segment in (one, other):
        stop = _between(segment.loss_mask, start, stop)
    return stop


def _between(mask: NDArray[np.bool_], start: int, stop: int) -> int:
    """The last place from `start` to `stop` that does not part tokens of a loss [L] from the one before."""
    while start < stop < len(mask) and mask[stop - 1] and mask[stop]:
        stop -= 1
    return stop


def _path(end: _Span) -> _Path:
    path, span = [end], end.parent
    while span is not None and span.stop:  # not the root
        path.append(span)
        span = span.parent
    return path[::-1]


def _owners(segments: Sequence[Segment], paths: Sequence[_Path]) -> dict[_Span, int]:
    """The spans of the segments of a pack, each after the one that it continues; and the segment whose loss it has."""
    owners: dict[_Span, int] = {}
    for number, (segment, path) in enumerate(zip(segments, paths, strict=True)):
        for span in path:
            if span not in owners or segment.loss_mask[span.start : span.stop].any():
                owners[span] = number
    return owners


@dataclass(slots=True, eq=False)
class _Bin:
    used: int = 0
    members: list[int] = field(default_factory=list)
    spans: set[_Span] = field(default_factory=set)

    def cost(self, unit: "_Unit") -> int:
        return unit.rest + sum(len(span) for span in unit.shared if span not in self.spans)


class _Unit:
    """Segments that are packed together: the spans that others have, too, and how many tokens are theirs alone."""

    __slots__ = ("rest", "shared")

    def __init__(self, paths: Sequence[_Path], places: Mapping[_Span, int]) -> None:
        spans = dict.fromkeys(span for path in paths for span in path)
        self.shared = [span for span in spans if span in places]
        self.rest = sum(map(len, spans)) - sum(map(len, self.shared))

    def key(self, places: Mapping[_Span, int]) -> tuple[int, list[int], int]:
        """In whose order units are packed: those that share most first, what they share one after another."""
        return -sum(map(len, self.shared)), [places[span] for span in self.shared], -self.rest


def _fill(groups: Sequence[Sequence[_Path]], budget: int) -> list[list[int]]:
    """First-fit decreasing: indices of the groups of each pack; a span that the pack has costs nothing more. No group is split,
    and one over the budget has a pack to itself."""
    uses = Counter(span for paths in groups for span in {span for path in paths for span in path})
    places = {span: place for place, span in enumerate(uses) if uses[span] > 1}
    units = [_Unit(paths, places) for paths in groups]
    least = min((unit.rest for unit in units), default=0)
    bins: list[_Bin] = []
    open_: list[_Bin] = []  # those that the shortest may still fit in
    for index in sorted(range(len(units)), key=lambda i: units[i].key(places)):
        unit = units[index]
        fitting = [b for b in open_ if b.used + b.cost(unit) <= budget]
        if not fitting:
            fitting = [_Bin()]
            bins += fitting
            open_ += fitting
        chosen = min(fitting, key=lambda b: b.cost(unit))  # where most of it is, else the first
        chosen.used += chosen.cost(unit)
        chosen.members.append(index)
        chosen.spans |= set(unit.shared)
        if chosen.used + least > budget:
            open_.remove(chosen)
    return [b.members for b in bins]


def _pack(rows: Sequence[_Row], paths: Sequence[_Path]) -> Pack:
    samples = [sample for sample, _ in rows]
    segments = [sample.segment for sample in samples]
    owners = _owners(segments, paths)
    places: dict[_Span | None, int] = {span: place for place, span in enumerate(owners)}
    arrays = {spec: sample.streams[spec] for sample in samples for spec in sample.streams}

    def laid(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([arrays[owner][span.start : span.stop] for span, owner in owners.items()])

    return Pack(
        tokens=laid([segment.tokens for segment in segments]),
        lengths=np.array([len(span) for span in owners], dtype=np.int32),
        parents=np.array([places.get(span.parent, -1) for span in owners], dtype=np.int32),
        owners=np.array(list(owners.values()), dtype=np.int32),
        ends=np.array([places[path[-1]] for path in paths], dtype=np.int32),
        loss_mask=laid([coefficients != 0 for _, coefficients in rows]),
        logprobs=laid([segment.logprobs for segment in segments]),
        advantages=laid([sample.advantages for sample in samples]),
        coefficients=laid([coefficients for _, coefficients in rows]),
        temperatures=laid([_temperatures(segment) for segment in segments]),
        streams=Streams(
            {spec: laid([_stream(sample, spec, any_) for sample in samples]) for spec, any_ in arrays.items()}
        ),
    )


def _stream(sample: Sample, spec: StreamSpec, other: NDArray[Any]) -> NDArray[Any]:
    """Return a stream of the sample; zeros like `other`, that of another sample, where it has none."""
    return sample.streams.get(spec, np.zeros((len(sample.segment.tokens), *other.shape[1:]), other.dtype))


def _temperatures(segment: Segment) -> FloatArray:
    """The temperature each token was sampled at, 1 where it was not sampled, [L]."""
    temperatures = np.ones(len(segment.tokens), dtype=np.float32)
    for turn in segment.turns:
        temperatures[turn.start : turn.stop] = turn.sampling.temperature or 1.0
    return temperatures


def supervised_batch(examples: Sequence[tuple[IntArray, IntArray]], tokens_per_pack: int, ranks: int = 1) -> TrainBatch:
    """One update on (prompt [P], response [C]) pairs: the mean negative log-likelihood of all response tokens."""
    return token_mean_batch(
        [make_response(number, *given) for number, given in enumerate(examples)], tokens_per_pack, ranks
    )


def token_mean_batch(groups: Sequence[Sequence[Sample]], tokens_per_pack: int, ranks: int = 1) -> TrainBatch:
    """One update whose loss is the mean over all response tokens."""
    return build_batch(groups, aggregation="token_mean", max_tokens=1, tokens_per_pack=tokens_per_pack, ranks=ranks)


def pair_mean_batch(pairs: Sequence[Sequence[Sample]], tokens_per_pack: int) -> TrainBatch:
    """One update whose loss is the mean over pairs, see `pair`: the coefficients of each add up to one over their count, and
    none is split between packs."""
    return build_batch(
        pairs,
        aggregation="sequence_mean_token_mean",
        max_tokens=1,
        tokens_per_pack=tokens_per_pack,
        whole_groups=True,
    )


def make_pair(number: int, prompt: IntArray, chosen: IntArray, rejected: IntArray) -> list[Sample]:
    """Two responses to a prompt, tokens [P] and [C] each, the better one first, as `learning.objectives.pairs` wants them."""
    return [
        replace(
            sample,
            streams=Streams({PAIR: np.full(len(sample.advantages), number, dtype=np.int32)}),
            advantages=sample.advantages + np.float32(sign),
        )
        for sibling, (response, sign) in enumerate(((chosen, 1), (rejected, -1)))
        for sample in [_written(AttemptId(number, sibling, 0), prompt, response)]
    ]


def make_scored_pair(number: int, prompt: IntArray, chosen: IntArray, rejected: IntArray) -> list[Sample]:
    """The same, with no token in the loss but the last of each response, at which a reward model is asked for its score."""
    return [
        replace(sample, weights=(np.arange(len(sample.weights)) == len(sample.weights) - 1).astype(np.float32))
        for sample in make_pair(number, prompt, chosen, rejected)
    ]


def make_response(number: int, prompt: IntArray, response: IntArray) -> list[Sample]:
    """The one response to a prompt, tokens [P] and [C]."""
    return [_written(AttemptId(number, 0, 0), prompt, response)]


def _written(identity: AttemptId, prompt: IntArray, response: IntArray) -> Sample:
    """A response that was written, tokens [P] and [C]: those of the response are in the loss."""
    tokens = np.concatenate([prompt, response])
    nothing = np.zeros(len(tokens), dtype=np.float32)
    version = PolicyVersion(0, 0)
    return Sample(
        meta=TrajectoryMeta(
            id=identity,
            prompt_id=str(identity.group),
            task="",
            started=version,
            newest=version,
            status=AttemptStatus.FINISHED,
            score=Score.ungraded("an example"),
        ),
        segment=Segment(
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) >= len(prompt),
            logprobs=nothing,
            versions=nothing.astype(np.int32),
            turns=(),
        ),
        streams=Streams(),
        advantages=nothing,
        weights=nothing + 1,
    )


def digest_batches(batches: Sequence[TrainBatch]) -> str:
    """Names what the learner is trained on: equal for equal bytes in equal order."""
    found = hashlib.blake2b(digest_size=16)
    for update in (update for batch in batches for update in batch.updates):
        found.update(repr((update.loss_tokens, update.samples, update.groups)).encode())
        for pack in (pack for rank in update.packs for pack in rank):
            for name in _ARRAYS:
                found.update(np.ascontiguousarray(getattr(pack, name)).data)
            for spec in sorted(pack.streams, key=lambda spec: spec.name):
                found.update(repr(spec).encode())
                found.update(np.ascontiguousarray(pack.streams[spec]).data)
    return found.hexdigest()
