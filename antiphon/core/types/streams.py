"""Streams: per-token arrays beside the tokens, and the table of those that Antiphon computes.

A stream is declared once, by a `StreamSpec`; a user's own stream is declared in the same way. The functions that compute
and read streams declare that themselves, with the decorators of `antiphon.algorithms.declarations`. From these declarations
follows what models are asked for in a step, and which streams the learner gets.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

D = TypeVar("D")

Producer = Literal["engine", "learner", "reference", "critics", "teachers", "stage", "data"]


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Declares a per-token array. Specs of one name declare the same stream.

    Attributes:
        name: Unique name.
        dtype: Name of a numpy dtype.
        shape: Shape of one token's row; None for a size that is known once the array exists, such as the number of critics.
        producer: What computes the stream: an engine, as it samples; a model that the `annotate` stage asks (`learner` is
            the policy before the step); a stage; or the data set of an offline command. A stream of your own has `stage` or
            `engine`.
    """

    name: str
    dtype: str = field(default="float32", compare=False)
    shape: tuple[int | None, ...] = field(default=(), compare=False)
    producer: Producer = field(default="stage", compare=False, repr=False)

    def matches(self, array: NDArray[Any]) -> bool:
        """Return True if an array [L, …] has the declared dtype and row shape."""
        sizes = array.shape[1:]
        return (
            array.dtype == _dtype(self.dtype)
            and len(sizes) == len(self.shape)
            and all(size is None or size == own for size, own in zip(self.shape, sizes, strict=True))
        )

    def of_array(self, array: NDArray[Any]) -> "StreamSpec":
        """Return this spec with the row shape of an array [L, …] in place of sizes that were open."""
        if None not in self.shape:
            return self
        return StreamSpec(self.name, self.dtype, array.shape[1:], self.producer)


_dtype = lru_cache(maxsize=None)(np.dtype)


class Streams:
    """The streams of one sequence: an immutable mapping from specs to arrays [L, …] of one length.

    Raises:
        ValueError: An array has another dtype or row shape than its spec, or the arrays differ in length.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[StreamSpec, NDArray[Any]] | None = None) -> None:
        for spec, array in (arrays or {}).items():
            if not spec.matches(array):
                raise ValueError(
                    f"stream {spec.name!r} has dtype {array.dtype} and rows of shape {array.shape[1:]}; it is declared "
                    f"with dtype {spec.dtype} and rows of shape {spec.shape}"
                )
        self._arrays = {spec.of_array(array): array for spec, array in (arrays or {}).items()}
        if len({len(array) for array in self._arrays.values()}) > 1:
            raise ValueError(f"streams differ in length: { {s.name: len(a) for s, a in self._arrays.items()} }")

    @property
    def length(self) -> int | None:
        """Tokens covered; None when there is no stream."""
        return next((len(array) for array in self._arrays.values()), None)

    def __getitem__(self, spec: StreamSpec) -> NDArray[Any]:
        if spec not in self._arrays:
            there = ", ".join(each.name for each in self._arrays) or "none"
            raise KeyError(f"no stream {spec.name!r}; there are: {there}")
        return self._arrays[spec]

    def get(self, spec: StreamSpec, default: D) -> NDArray[Any] | D:
        """Return a stream, or `default` if it is not there."""
        return self._arrays.get(spec, default)

    def __contains__(self, spec: StreamSpec) -> bool:
        return spec in self._arrays

    def __iter__(self) -> Iterator[StreamSpec]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def with_stream(self, spec: StreamSpec, array: NDArray[Any]) -> "Streams":
        """Return a copy that has this stream, instead of the one of its name if there is one."""
        return Streams({**self.without([spec])._arrays, spec: array})

    def only(self, specs: Collection[StreamSpec]) -> "Streams":
        """Return a copy that has these streams and no others."""
        return Streams({spec: array for spec, array in self._arrays.items() if spec in specs})

    def without(self, specs: Collection[StreamSpec]) -> "Streams":
        """Return a copy that lacks these streams."""
        return Streams({spec: array for spec, array in self._arrays.items() if spec not in specs})

    @staticmethod
    def join(pieces: Sequence["Streams"]) -> "Streams":
        """Return the streams of consecutive pieces, which have the same streams unless they are empty."""
        whole = [piece for piece in pieces if piece.length] or pieces[-1:]
        return Streams({spec: np.concatenate([piece[spec] for piece in whole]) for spec in whole[-1]})

    @staticmethod
    def placed(length: int, pieces: Mapping[int, "Streams"]) -> "Streams":
        """Return streams over `length` tokens with each piece at its start; 0 where there is none, and behind shorter rows."""
        arrays: dict[StreamSpec, NDArray[Any]] = {}
        for start, piece in pieces.items():
            for spec, array in piece._arrays.items():
                whole = arrays.pop(spec, np.zeros((length, *array.shape[1:]), array.dtype))
                row = tuple(map(max, whole.shape[1:], array.shape[1:]))
                arrays[replace(spec, shape=row)] = whole = pad_rows(whole, row)
                whole[start : start + len(array)] = pad_rows(array, row)
        return Streams(arrays)

    def check_length(self, owner: str, length: int) -> None:
        """Raise `ValueError` unless the streams, if any, cover `length` tokens."""
        if self.length not in (None, length):
            raise ValueError(f"{owner}.streams cover {self.length} tokens, expected {length}")


def pad_rows(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array [L, …] with zeros behind its rows, so that these have a shape, which is not smaller than theirs."""
    if array.shape[1:] == shape:
        return array
    return np.pad(array, [(0, 0), *((0, most - size) for most, size in zip(shape, array.shape[1:], strict=True))])


def _declare(
    name: str, producer: Producer, *, dtype: str = "float32", shape: tuple[int | None, ...] = ()
) -> StreamSpec:
    return StreamSpec(name, dtype, shape, producer)


# --- from engines ------------------------------------------------------------------------------------------------------

# True where a token was sampled from a KV cache that no single version made.
MIXED_CACHE = _declare("mixed_cache", "engine", dtype="bool")
# The experts [layers, k] that computed the output a token was drawn from, plus 1; 0 where they are not known.
ROUTED_EXPERTS = _declare("routed_experts", "engine", dtype="int16", shape=(None, None))

# Ids, plus 1, of the tokens that truncated sampling chose from, likeliest first, then 0; all 0 is the whole vocabulary. Where
# it is recorded (`Sampling.support_size`), log-probs are those of the truncated distribution.
SAMPLING_SUPPORT = _declare("sampling_support", "engine", dtype="int32", shape=(None,))

# The candidates of a beam search in the place of a token, best first: ids, plus 1, negative where one ends the completion; and
# their log-probs, with penalties. `rollout.beam_search` reads them; nothing else sees them, so `STREAMS` lacks them.
BEAM_TOKENS = _declare("beam_tokens", "engine", dtype="int32", shape=(None,))
BEAM_SCORES = _declare("beam_scores", "engine", shape=(None,))

# --- from models that the `annotate` stage asks ------------------------------------------------------------------------

REFERENCE_LOGPROBS = _declare("reference_logprobs", "reference")
PROXIMAL_LOGPROBS = _declare("proximal_logprobs", "learner")  # log-probs under the policy before the step
POLICY_ENTROPY = _declare("policy_entropy", "learner")  # of the distribution that the token was chosen from, in nats
TEACHER_LOGPROBS = _declare("teacher_logprobs", "teachers")  # mean over the teachers of the task
VALUES = _declare(
    "values", "critics", shape=(None,)
)  # one value per critic, of the state in which the token was chosen
ATTENTION_RHYTHM = _declare("attention_rhythm", "learner", shape=(2,))  # WAAD and FAI

# --- from stages -------------------------------------------------------------------------------------------------------

TOKEN_AGE = _declare("token_age", "stage")  # versions from the one that sampled the token to that before the step
KL_REWARD = _declare("kl_reward", "stage", dtype="float64")  # KL penalty in the token's reward
ENTROPY_WEIGHT = _declare("entropy_weight", "stage")  # weight of the token's entropy in the entropy bonus
RETURNS = _declare("returns", "stage")  # regression target of a critic
OLD_VALUE = _declare("old_value", "stage")  # a critic's value before the step; exists in batches of critics only

# --- of the offline commands, from data sets and teachers --------------------------------------------------------------

PAIR = _declare("pair", "data", dtype="int32")  # number of the preference pair; its better response has advantage 1
# The K likeliest tokens of a teacher, likeliest first; K may be 0.
TEACHER_TOKENS = _declare("teacher_tokens", "teachers", dtype="int32", shape=(None,))
# Log-probs of these and of all other tokens together, [K + 1]; of the whole vocabulary where K is 0.
TEACHER_DISTRIBUTION = _declare("teacher_distribution", "teachers", shape=(None,))

# Streams that the learner itself reads, whatever the loss.
LEARNER_STREAMS = frozenset({MIXED_CACHE, ROUTED_EXPERTS, SAMPLING_SUPPORT})

STREAMS: Mapping[str, StreamSpec] = {
    spec.name: spec
    for spec in (
        MIXED_CACHE,
        ROUTED_EXPERTS,
        SAMPLING_SUPPORT,
        REFERENCE_LOGPROBS,
        PROXIMAL_LOGPROBS,
        POLICY_ENTROPY,
        TEACHER_LOGPROBS,
        VALUES,
        ATTENTION_RHYTHM,
        TOKEN_AGE,
        KL_REWARD,
        ENTROPY_WEIGHT,
        RETURNS,
        OLD_VALUE,
        PAIR,
        TEACHER_TOKENS,
        TEACHER_DISTRIBUTION,
    )
}
