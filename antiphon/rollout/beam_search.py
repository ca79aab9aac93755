"""Beam search over one-token requests: deterministic, on any engine that returns the candidates of a beam search.

The search is that of transformers (`GenerationMixin._beam_search`), for one prompt and its best sequence. An engine finds the
prefix that beams share in its own cache, so a step computes about one token for each beam.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from antiphon.core.errors import UnsupportedError
from antiphon.core.types import (
    BEAM_SCORES,
    BEAM_TOKENS,
    Completion,
    FinishReason,
    GenerateRequest,
    IntArray,
    Sampling,
)
from antiphon.engines.deltas import Delta
from antiphon.rollout.gateway.served_model import Generate
from antiphon.rollout.gathering import gather_or_cancel

NOTHING = np.float32(0)


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of a completion: one piece with one token for each of its C tokens."""

    score: np.float32 = NOTHING  # sum of the log-probs, with penalties; rounded as in transformers
    pieces: tuple[Completion, ...] = ()  # [C]
    ended: bool = False

    @property
    def tokens(self) -> IntArray:
        """The tokens [C]."""
        return np.array([piece.tokens[0] for piece in self.pieces], np.int32)

    def rank(self, length_penalty: float) -> float:
        """Return the score by which ended beams are compared."""
        return float(self.score) / len(self.pieces) ** length_penalty


def with_beam_search(generate: Generate) -> Generate:
    """Return `EnginePool.generate` with beam search for the requests that ask for it."""

    async def run(request: GenerateRequest, on_delta: Callable[[Delta], None] | None = None) -> Completion:
        if request.sampling.num_beams > 1:  # whose tokens are known at the end only
            return await search_beams(generate, request)
        return await generate(request, on_delta)

    return run


async def search_beams(generate: Generate, request: GenerateRequest) -> Completion:
    """Return the completion with the highest score that beam search finds.

    Args:
        generate: Runs a request for one token, whose completion has the streams `BEAM_TOKENS` and `BEAM_SCORES`.
        request: The request, with a `num_beams` above 1. Its log-probs come with penalties, but are not normalized again.

    Raises:
        UnsupportedError: The engine returns no candidates.
    """
    sampling = request.sampling
    running, finished = [Beam()], list[Beam]()
    for length in range(1, sampling.max_tokens + 1):
        longer = await gather_or_cancel(
            _expand(generate, request, beam, f"{request.id}/{length}/{number}") for number, beam in enumerate(running)
        )
        candidates = sorted((beam for beams in longer for beam in beams), key=lambda beam: -beam.score)
        best = candidates[: sampling.num_beams]
        done = [beam for beam in best if beam.ended or length == sampling.max_tokens]
        finished = sorted([*finished, *done], key=lambda beam: -beam.rank(sampling.length_penalty))[
            : sampling.num_beams
        ]
        running = [beam for beam in candidates if not beam.ended][: sampling.num_beams]
        if not running or not _can_improve(sampling, running, finished):
            break
    return _completion(finished[0])


async def _expand(generate: Generate, request: GenerateRequest, beam: Beam, name: str) -> list[Beam]:
    """Return the beams that are longer by one token."""
    tokens = beam.tokens
    piece = await generate(
        replace(
            request,
            id=name,
            tokens=np.concatenate([request.tokens, tokens]),
            sampling=replace(request.sampling, max_tokens=1),
            sampled=request.sampled + len(tokens),
        )
    )
    if BEAM_TOKENS not in piece.streams:
        raise UnsupportedError(
            "an engine returned no candidates for a beam search; engines of kind native do", key="num_beams"
        )
    marked, scores = piece.streams[BEAM_TOKENS][0], piece.streams[BEAM_SCORES][0]
    streams = piece.streams.without([BEAM_TOKENS, BEAM_SCORES])
    return [
        Beam(
            score=beam.score + score,
            pieces=(*beam.pieces, replace(piece, tokens=token[None], logprobs=score[None], streams=streams)),
            ended=bool(mark < 0),
        )
        for mark, token, score in zip(marked, np.abs(marked) - 1, scores, strict=True)
    ]


def _can_improve(sampling: Sampling, running: Sequence[Beam], finished: Sequence[Beam]) -> bool:
    """Return True if a running beam may come to a higher rank than one of those that have finished."""
    if len(finished) < sampling.num_beams:
        return True
    if sampling.early_stopping is True:
        return False
    longest = sampling.early_stopping == "never" and sampling.length_penalty > 0
    length = sampling.max_tokens if longest else len(running[0].pieces)
    return float(running[0].score) / length**sampling.length_penalty > finished[-1].rank(sampling.length_penalty)


def _completion(beam: Beam) -> Completion:
    whole = Completion.join(beam.pieces)
    finish = FinishReason.STOP if beam.ended else FinishReason.LENGTH
    return replace(whole, finish=finish, engines=tuple(dict.fromkeys(whole.engines)))
