"""Penalties on the tokens that a sequence has already, and the candidates of beam search."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from antiphon.engines.native.slots import Indices, SlotTable

Candidates = tuple[
    NDArray[np.int32], NDArray[np.float32]
]  # the streams `BEAM_TOKENS` and `BEAM_SCORES` [1, K] of one token


def adjust_scores(logits: Tensor, table: SlotTable, slots: Indices, positions: Indices) -> Tensor:
    """Return logits [R, V] with the penalties of the rows that have any, in float32; other rows keep their values.

    Logits of a beam search become log-probs first, and these have the penalties, as in transformers.

    Args:
        logits: Logits of the model, which may be overwritten.
        table: Tokens and requests of the slots.
        slots: Slot of each row [R].
        positions: Position, in the sequence of its slot, of the token that is sampled from each row [R].
    """
    rows = np.flatnonzero(table.adjusted[slots])
    if not len(rows):
        return logits
    logits, chosen = logits.float(), torch.from_numpy(rows).to(logits.device)
    scores, slots, positions = logits[chosen], slots[rows], positions[rows]
    beams = torch.from_numpy(table.beams[slots] > 1).to(logits.device)[:, None]
    scores = torch.where(beams, F.log_softmax(scores, -1), scores)
    requests = [table.requests[slot] for slot in slots.tolist()]
    repetition, presence, frequency = (
        torch.tensor([getattr(request.sampling, name) for request in requests], device=logits.device)[:, None]
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    sampled_from = table.prompt[slots] - np.array([request.sampled for request in requests])
    everywhere = _count_tokens(table, slots, np.zeros_like(sampled_from), positions, scores)
    sampled = _count_tokens(table, slots, sampled_from, positions, scores)
    penalized = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(everywhere > 0, penalized, scores)
    logits[chosen] = scores - frequency * sampled - presence * (sampled > 0)
    return logits


def _count_tokens(table: SlotTable, slots: Indices, starts: Indices, stops: Indices, like: Tensor) -> Tensor:
    """Return how often each token of the vocabulary is between two positions of each slot, [R, V] as `like`."""
    places = np.arange(int(stops.max()))
    tokens = table.tokens[slots, : len(places)]
    inside = (places >= starts[:, None]) & (places < stops[:, None]) & (tokens >= 0)  # others are of images
    flat = np.arange(len(slots))[:, None] * like.shape[1] + tokens
    counts = torch.zeros_like(like)
    counts.view(-1).index_add_(
        0, torch.from_numpy(flat[inside]).to(like.device), torch.ones((), device=like.device).expand(int(inside.sum()))
    )
    return counts


def rank_candidates(scores: Tensor, count: int, ends: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> Candidates:
    """Return the candidates of a beam search for the next token, best first.

    Args:
        scores: Of all tokens [V].
        count: Number of candidates; all tokens, if there are fewer.
        ends: Returns which of some tokens end the completion.
    """
    best = scores.topk(min(count, len(scores)))
    tokens = best.indices.cpu().numpy()
    marked = np.where(ends(tokens), -tokens - 1, tokens + 1).astype(np.int32)
    return marked[None], best.values.cpu().numpy()[None]
