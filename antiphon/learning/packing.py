"""Packs: sequences end to end in one row of at most so many tokens, with shared prefixes once. Pure numpy."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.core.types import FloatArray, Pack, PlacedImage, Sample, Segment, Streams, StreamSpec
from antiphon.core.types.streams import pad_rows
from antiphon.learning.prefix_tree import Span, SpanPath, build_prefix_tree, owners_in_pack

PACK_ARRAYS = tuple(spec.name for spec in fields(Pack) if spec.name not in ("streams", "images"))
_ONE_SPAN = {"lengths": 1, "parents": -1, "owners": 0, "ends": 0}


class WeightedSample(NamedTuple):
    """A sample and the coefficients of its tokens, see `Pack.coefficients`."""

    sample: Sample
    coefficients: NDArray[np.float64]  # [L]


def pack_weighted(
    bundles: Sequence[Sequence[WeightedSample]], tokens_per_pack: int, share: bool
) -> tuple[list[list[int]], list[Pack]]:
    """Pack bundles of samples. All samples of a bundle go to the same pack.

    Returns:
        Indices of the bundles in each pack, and the packs.
    """
    paths = iter(build_prefix_tree([sample.segment for bundle in bundles for sample, _ in bundle], share))
    placed = [[(each, next(paths)) for each in bundle] for bundle in bundles]
    members = _fill_bins([[path for _, path in bundle] for bundle in placed], tokens_per_pack)
    return members, [_make_pack([pair for index in pack for pair in placed[index]]) for pack in members]


def pack_samples(
    samples: Sequence[Sample], tokens_per_pack: int, streams: Collection[StreamSpec] = (), share: bool = True
) -> tuple[list[list[int]], list[Pack]]:
    """Pack all samples with the given streams, for `Predictor.predict`.

    Args:
        samples: The samples.
        tokens_per_pack: Most tokens of a pack, unless one sample has more.
        streams: Streams that the packs have.
        share: Have common prefixes once in a pack.

    Returns:
        Indices of the samples in each pack, and the packs.
    """
    bare = [replace(sample, streams=sample.streams.only(streams)) for sample in samples]
    return pack_weighted([[WeightedSample(sample, loss_tokens(sample))] for sample in bare], tokens_per_pack, share)


def split_packs(
    samples: Sequence[Sample], members: Sequence[Sequence[int]], predicted: Sequence[FloatArray], share: bool = True
) -> list[FloatArray]:
    """Cut results of packs from `pack_samples` back into results of the samples.

    Args:
        samples: The samples that were packed.
        members: Indices of the samples in each pack.
        predicted: Result [T, …] of each pack.
        share: As in `pack_samples`.

    Returns:
        One array [L, …] for each sample; 0 on prompts.
    """
    paths = build_prefix_tree([sample.segment for sample in samples], share)
    result = [np.zeros((len(sample.segment.tokens), *predicted[0].shape[1:]), dtype=np.float32) for sample in samples]
    for indices, values in zip(members, predicted, strict=True):
        owners = owners_in_pack([samples[i].segment for i in indices], [paths[i] for i in indices])
        parts = np.split(values, np.cumsum([len(span) for span in owners])[:-1])
        for (span, owner), part in zip(owners.items(), parts, strict=True):
            result[indices[owner]][span.start : span.stop] = part
    return result


def padding_pack(pack: Pack) -> Pack:
    """Return a pack of the first token of another, without loss: for a rank that has nothing to compute."""
    first = {name: getattr(pack, name)[:1] for name in PACK_ARRAYS}
    alone = {name: np.full(1, value, np.int32) for name, value in _ONE_SPAN.items()}
    no_loss = {"loss_mask": np.zeros(1, np.bool_), "coefficients": np.zeros(1)}
    return Pack(**(first | alone | no_loss), streams=Streams({spec: pack.streams[spec][:1] for spec in pack.streams}))


def loss_tokens(sample: Sample) -> NDArray[np.float64]:
    """Return 1 where a token takes part in the loss, [L]; never at the first, which nothing predicts."""
    counted: NDArray[np.float64] = (sample.segment.loss_mask & (sample.weights != 0)).astype(np.float64)
    counted[:1] = 0
    return counted


# --- bin packing -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Bin:
    used: int = 0
    members: list[int] = field(default_factory=list)
    spans: set[Span] = field(default_factory=set)

    def cost(self, bundle: "_Bundle") -> int:
        """Return the tokens that a bundle would add."""
        return bundle.own_tokens + sum(len(span) for span in bundle.shared if span not in self.spans)

    def add(self, index: int, bundle: "_Bundle") -> None:
        self.used += self.cost(bundle)
        self.members.append(index)
        self.spans |= set(bundle.shared)


class _Bundle:
    """Segments that are packed together: the spans that others share, and how many tokens are theirs alone."""

    __slots__ = ("own_tokens", "shared")

    def __init__(self, paths: Sequence[SpanPath], places: Mapping[Span, int]) -> None:
        spans = dict.fromkeys(span for path in paths for span in path)
        self.shared = [span for span in spans if span in places]
        self.own_tokens = sum(map(len, spans)) - sum(map(len, self.shared))

    def sort_key(self, places: Mapping[Span, int]) -> tuple[int, list[int], int]:
        """Return the key of the packing order: those that share most first, and what they share one after another."""
        return -sum(map(len, self.shared)), [places[span] for span in self.shared], -self.own_tokens


def _fill_bins(groups: Sequence[Sequence[SpanPath]], budget: int) -> list[list[int]]:
    """Return the indices of the groups of each pack, first fit decreasing.

    Adding a group costs only the tokens of the spans that the pack lacks. No group is split; one over the budget has a
    pack to itself.
    """
    uses = Counter(span for paths in groups for span in {span for path in paths for span in path})
    places = {span: place for place, span in enumerate(uses) if uses[span] > 1}
    bundles = [_Bundle(paths, places) for paths in groups]
    least = min((bundle.own_tokens for bundle in bundles), default=0)
    bins: list[_Bin] = []
    open_bins: list[_Bin] = []  # those that the shortest bundle may still fit in
    for index in sorted(range(len(bundles)), key=lambda i: bundles[i].sort_key(places)):
        bundle = bundles[index]
        fitting = [b for b in open_bins if b.used + b.cost(bundle) <= budget]
        if not fitting:
            fitting = [_Bin()]
            bins += fitting
            open_bins += fitting
        chosen = min(fitting, key=lambda b: b.cost(bundle))  # which has most of it, else the first
        chosen.add(index, bundle)
        if chosen.used + least > budget:
            open_bins.remove(chosen)
    return [b.members for b in bins]


# --- one pack ----------------------------------------------------------------------------------------------------------


def _make_pack(placed: Sequence[tuple[WeightedSample, SpanPath]]) -> Pack:
    weighted, paths = [each for each, _ in placed], [path for _, path in placed]
    samples = [each.sample for each in weighted]
    segments = [sample.segment for sample in samples]
    owners = owners_in_pack(segments, paths)
    places: dict[Span | None, int] = {span: place for place, span in enumerate(owners)}
    rows = _row_shapes(samples)

    def concatenate(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([arrays[owner][span.start : span.stop] for span, owner in owners.items()])

    return Pack(
        tokens=concatenate([segment.tokens for segment in segments]),
        lengths=np.array([len(span) for span in owners], dtype=np.int32),
        parents=np.array([places.get(span.parent, -1) for span in owners], dtype=np.int32),
        owners=np.array(list(owners.values()), dtype=np.int32),
        ends=np.array([places[path[-1]] for path in paths], dtype=np.int32),
        loss_mask=concatenate([each.coefficients != 0 for each in weighted]),
        logprobs=concatenate([segment.logprobs for segment in segments]),
        advantages=concatenate([sample.advantages for sample in samples]),
        coefficients=concatenate([each.coefficients for each in weighted]),
        temperatures=concatenate([_temperatures(segment) for segment in segments]),
        streams=Streams(
            {spec: concatenate([_stream(each, spec, row) for each in samples]) for spec, row in rows.items()}
        ),
        images=_pack_images(segments, owners),
    )


def _pack_images(segments: Sequence[Segment], owners: Mapping[Span, int]) -> tuple[PlacedImage, ...]:
    """Return the images of a pack: no span begins or ends within one."""
    found, begin = list[PlacedImage](), 0
    for span, owner in owners.items():
        own = (image for image in segments[owner].images if span.start <= image.start < span.stop)
        found += [image.shifted(begin - span.start) for image in own]
        begin += len(span)
    return tuple(found)


def _row_shapes(samples: Sequence[Sample]) -> dict[StreamSpec, tuple[int, ...]]:
    """Return the largest row shape of each stream."""
    shapes: dict[StreamSpec, tuple[int, ...]] = {}
    for streams in (sample.streams for sample in samples):
        for spec in streams:
            own = streams[spec].shape[1:]
            shapes[spec] = tuple(map(max, shapes.get(spec, own), own))
    return {replace(spec, shape=shape): shape for spec, shape in shapes.items()}


def _stream(sample: Sample, spec: StreamSpec, row: tuple[int, ...]) -> NDArray[Any]:
    """Return a stream of the sample with rows of a shape; zeros where it has none."""
    missing = np.zeros((len(sample.segment.tokens), *row), spec.dtype)
    return pad_rows(sample.streams.get(spec, missing), row)


def _temperatures(segment: Segment) -> FloatArray:
    """Return the temperature each token was sampled at, 1 where it was not sampled, [L]."""
    temperatures = np.ones(len(segment.tokens), dtype=np.float32)
    for turn in segment.turns:
        temperatures[turn.start : turn.stop] = turn.sampling.temperature or 1.0
    return temperatures
