"""The slots of an engine: which request each runs, and which tokens' keys and values it holds.

A slot is a row of arrays. `tokens` are those of its sequence, `length` how many there are, `cached` for how many of them
the KV cache holds keys and values, and `weights_id` which weights made all of those. A sequence is ready to be sampled once
all but its last token are cached. A slot that is freed keeps all this until it is given away, so that whatever comes
later with the same beginning finds it: a sibling, or the next turn of a conversation.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from antiphon.core.types import GenerateRequest
from antiphon.engines.request_queue import Progress

Indices = NDArray[np.int64]

MIXED = -1  # the weights_id of a cache that no single set of weights made


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The slot whose tokens begin like those asked for, and how many they share."""

    slot: int
    tokens: int


NO_MATCH = PrefixMatch(-1, 0)


@dataclass(slots=True)
class SlotTable:
    """Arrays with one entry a slot. The host's memory of the tokens is touched only where it is written."""

    slots: int
    max_length: int
    tokens: NDArray[np.int32] = field(init=False)  # [slots, max_length]
    length: Indices = field(init=False)
    cached: Indices = field(init=False)
    weights_id: Indices = field(init=False)
    active: NDArray[np.bool_] = field(init=False)
    arrival: Indices = field(init=False)  # order of admission
    released: Indices = field(init=False)  # order of release
    prompt: Indices = field(init=False)  # tokens of the prompt
    limit: Indices = field(init=False)  # length at which generation ends
    temperature: NDArray[np.float32] = field(init=False)
    top_p: NDArray[np.float32] = field(init=False)
    top_k: Indices = field(init=False)
    min_p: NDArray[np.float32] = field(init=False)
    support: Indices = field(init=False)  # see `Sampling.support_size`
    beams: Indices = field(init=False)  # see `Sampling.num_beams`
    adjusted: NDArray[np.bool_] = field(init=False)  # `penalties.adjust_scores` changes the logits
    seed: NDArray[np.uint64] = field(init=False)
    requests: dict[int, GenerateRequest] = field(init=False, default_factory=dict)
    _clock: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = np.zeros((self.slots, self.max_length), np.int32)
        for name in (
            "length",
            "cached",
            "weights_id",
            "arrival",
            "released",
            "prompt",
            "limit",
            "top_k",
            "support",
            "beams",
        ):
            setattr(self, name, np.zeros(self.slots, np.int64))
        for name in ("temperature", "top_p", "min_p"):
            setattr(self, name, np.zeros(self.slots, np.float32))
        self.active, self.adjusted = np.zeros(self.slots, bool), np.zeros(self.slots, bool)
        self.seed = np.zeros(self.slots, np.uint64)
        self.weights_id[:] = MIXED

    def admit(self, request: GenerateRequest, weights_id: int, tokens: NDArray[np.int32] | None = None) -> int:
        """Put a request into a free slot (there must be one) and return the slot.

        Reuses a free slot's cache if the request begins with most of it. `tokens` are put into the table instead of the
        request's.
        """
        prompt = request.tokens if tokens is None else tokens
        free = np.flatnonzero(~self.active)
        usable = free[(self.weights_id[free] == weights_id) & (self.cached[free] > 0)]
        found = self.match_prefix(prompt, usable, self.cached, len(prompt) - 1)
        kept = 0
        if found.tokens and 2 * found.tokens >= self.cached[found.slot]:
            slot, kept = found.slot, found.tokens
        else:
            slot = self._least_useful(free, weights_id)
        self._occupy(slot, request, weights_id, kept)
        self.tokens[slot, : len(prompt)] = prompt
        return slot

    def _least_useful(self, free: Indices, weights_id: int) -> int:
        """Return the free slot to overwrite: one whose cache no request can use, else the one released longest ago."""
        useful = (self.weights_id[free] == weights_id) & (self.cached[free] > 0)
        return int(free[np.argmin(np.where(useful, self.released[free] + 1, 0))])

    def _occupy(self, slot: int, request: GenerateRequest, weights_id: int, kept: int) -> None:
        sampling, prompt = request.sampling, len(request.tokens)
        self._clock += 1
        self.length[slot] = self.prompt[slot] = prompt
        self.cached[slot], self.weights_id[slot] = kept, weights_id
        self.active[slot], self.arrival[slot] = True, self._clock
        self.limit[slot] = prompt + sampling.max_tokens
        self.temperature[slot], self.min_p[slot] = sampling.temperature, sampling.min_p
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.support[slot] = sampling.support_size
        self.beams[slot] = sampling.num_beams
        self.adjusted[slot] = sampling.penalized or sampling.num_beams > 1
        self.seed[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.requests[slot] = request

    def release(self, slot: int) -> GenerateRequest:
        """Free a slot; what it holds stays until it is given away."""
        self._clock += 1
        self.active[slot], self.released[slot] = False, self._clock
        return self.requests.pop(slot)

    def match_prefix(self, query: NDArray[np.int32], candidates: Indices, lengths: Indices, limit: int) -> PrefixMatch:
        """Return the slot that shares the longest prefix with `query`; the lowest of equals.

        Args:
            query: Tokens to look for.
            candidates: Slots to compare.
            lengths: Number of leading tokens to compare of each slot [slots].
            limit: Longest prefix that counts.
        """
        if not len(candidates) or limit <= 0:
            return NO_MATCH
        width = min(len(query), limit, int(lengths[candidates].max()))
        differs = self.tokens[candidates, :width] != query[:width]
        first = np.where(differs.any(1), differs.argmax(1), width)
        shared = np.minimum(first, lengths[candidates])
        best = int(shared.argmax())
        return PrefixMatch(int(candidates[best]), int(shared[best]))

    def progress(self, slot: int) -> Progress:
        """Return how far the request in a slot is."""
        return Progress(sampled=bool(self.length[slot] > self.prompt[slot]), cached=bool(self.cached[slot] > 0))

    def invalidate_cache(self, slot: int, weights_id: int) -> None:
        """Drop the cache of an active slot: its tokens are to be computed again, by the weights of `weights_id`."""
        self.cached[slot] = 0
        self.weights_id[slot] = weights_id
