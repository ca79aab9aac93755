"""Declared per-token arrays that travel beside the tokens, and the streams that this package knows."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Declaration of a per-token array: one row of `shape` and `dtype` a token."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()


_dtype = lru_cache(maxsize=None)(np.dtype)


class Streams:
    """Immutable per-token arrays of equal length, keyed by their declarations.

    Examples: critic values [L, M], top-k teacher logits [L, K], routed experts [L, layers, k], a user's own.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[StreamSpec, NDArray[Any]] | None = None) -> None:
        self._arrays = dict(arrays or {})
        for spec, array in self._arrays.items():
            if array.dtype != _dtype(spec.dtype) or array.shape[1:] != spec.shape:
                raise ValueError(
                    f"stream {spec.name!r} is {array.dtype}{array.shape[1:]}, declared {spec.dtype}{spec.shape}"
                )
        if len({len(array) for array in self._arrays.values()}) > 1:
            raise ValueError(f"streams differ in length: { {s.name: len(a) for s, a in self._arrays.items()} }")

    @property
    def length(self) -> int | None:
        """Number of tokens covered; None if there is no stream."""
        return next((len(array) for array in self._arrays.values()), None)

    def __getitem__(self, spec: StreamSpec) -> NDArray[Any]:
        return self._arrays[spec]

    def get(self, spec: StreamSpec, default: NDArray[Any]) -> NDArray[Any]:
        """Return a stream, or `default` if it is missing."""
        return self._arrays.get(spec, default)

    def named(self, name: str) -> NDArray[Any]:
        """Return the stream with this name, whatever its shape; `KeyError` if there is none."""
        for spec, array in self._arrays.items():
            if spec.name == name:
                return array
        raise KeyError(f"there is no stream {name!r}, only {[spec.name for spec in self._arrays]}")

    def __contains__(self, spec: StreamSpec) -> bool:
        return spec in self._arrays

    def __iter__(self) -> Iterator[StreamSpec]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def with_stream(self, spec: StreamSpec, array: NDArray[Any]) -> "Streams":
        """Return a copy with one stream added or replaced."""
        return Streams({**self._arrays, spec: array})

    def only(self, names: Collection[str]) -> "Streams":
        """Return a copy with only the streams of these names."""
        return Streams({spec: array for spec, array in self._arrays.items() if spec.name in names})

    def without(self, names: Collection[str]) -> "Streams":
        """Return a copy without the streams of these names."""
        return Streams({spec: array for spec, array in self._arrays.items() if spec.name not in names})

    @staticmethod
    def join(pieces: Sequence["Streams"]) -> "Streams":
        """Concatenate pieces along the tokens; those that are not empty have the same streams."""
        whole = [piece for piece in pieces if piece.length] or pieces[-1:]
        return Streams({spec: np.concatenate([piece[spec] for piece in whole]) for spec in whole[-1]})

    @staticmethod
    def placed(length: int, pieces: Mapping[int, "Streams"]) -> "Streams":
        """Lay pieces out over `length` tokens, each at its start offset; zeros elsewhere."""
        arrays: dict[StreamSpec, NDArray[Any]] = {}
        for start, piece in pieces.items():
            for spec, array in piece._arrays.items():
                if spec not in arrays:
                    arrays[spec] = np.zeros((length, *spec.shape), _dtype(spec.dtype))
                arrays[spec][start : start + len(array)] = array
        return Streams(arrays)

    def check_length(self, owner: str, length: int) -> None:
        """Raise `ValueError` unless the streams, if any, cover `length` tokens."""
        if self.length not in (None, length):
            raise ValueError(f"{owner}.streams cover {self.length} tokens, expected {length}")


PROXIMAL_LOGPROBS = StreamSpec("proximal_logprobs")
REFERENCE_LOGPROBS = StreamSpec("reference_logprobs")
TEACHER_LOGPROBS = StreamSpec("teacher_logprobs")
KL_REWARD = StreamSpec(
    "kl_reward", "float64"
)  # what the divergence from the reference adds to each sampled token's reward
TOKEN_AGE = StreamSpec("token_age")  # versions between the one that sampled the token and the one before the step
ENTROPY_WEIGHT = StreamSpec("entropy_weight")  # what each token's entropy counts in the bonus
RETURNS = StreamSpec("returns")  # what a critic is to say
OLD_VALUE = StreamSpec("old_value")  # what it said before the step
VALUES = "values"  # [L, M] what M critics say of the state in which each token was chosen
ATTENTION_RHYTHM = StreamSpec(
    "attention_rhythm", "float32", (2,)
)  # WAAD and FAI, see `learning.model.attention_rhythm`
PAIR = StreamSpec("pair", "int32")  # which pair the answer is of; in the better one the advantage is 1, in the other -1
TEACHER_TOKENS = "teacher_tokens"  # [L, K] those that a teacher holds most likely, the likeliest first; K may be 0
TEACHER_DISTRIBUTION = (
    "teacher_distribution"  # [L, K + 1] log-probs: theirs, of all others together; [L, V] of all if K is 0
)
ROUTED_EXPERTS = "routed_experts"  # [L, layers, k] experts whose output the token was drawn from, plus 1; 0: not known
MIXED_CACHE = StreamSpec("mixed_cache", "bool")  # True: sampled from a KV cache that no single version made
