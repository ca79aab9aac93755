"""From the `ScoredDataGroup` of an environment to the score of each attempt: a trajectory is known by its tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from antiphon.core.errors import SandboxError
from antiphon.core.types import Score, ScoreStatus
from antiphon.rollout.atropos.policy import Attempt, Reply, refuse

# What a group may give its trainer beside scores; the run's own configuration decides these.
REFUSED = (
    "advantages",
    "ref_logprobs",
    "group_overrides",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)
Encode = Callable[[Reply], Sequence[int]]  # tokens of a reply and what is before it, as an environment encodes them
_Sequences = Iterator[tuple[int, ...]]


def read_scores(data: Any, attempts: Sequence[Attempt], encode: Encode) -> list[Score]:
    """Return the score of each attempt.

    Args:
        data: What `collect_trajectories` returned, after `postprocess_histories`.
        attempts: The attempts of the group.
        encode: Encodes a reply and what is before it as the environment does if it tokenizes messages or texts itself.

    Raises:
        UnsupportedError: The group has what only a trainer of Atropos can use, or there are several groups.
        SandboxError: A trajectory is none of the attempts, or its score is no finite number.
    """
    group = _only_group(data)
    if not group:
        return _drop(attempts, "the environment returned no scores of the group")
    if given := [key for key in REFUSED if (value := group.get(key)) is not None and len(value)]:
        raise refuse(f"returns {given[0]}, which only a trainer of Atropos can use")
    trajectories, values = [tuple(map(int, each)) for each in group["tokens"]], group["scores"]
    if len(trajectories) != len(attempts):
        return _drop(attempts, f"the environment returned {len(trajectories)} trajectories of {len(attempts)} attempts")
    scores: dict[int, Score] = {}
    for number, value in zip(_match(trajectories, attempts, encode), values, strict=True):
        scores[number] = _score_of(value)
    return [scores[number] for number in range(len(attempts))]


def _only_group(data: Any) -> Mapping[str, Any] | None:
    groups = [group for group in (data if isinstance(data, list) else [data]) if group]
    if len(groups) > 1:
        raise refuse(f"returns {len(groups)} groups for one item; a group is rewarded as one")
    return groups[0] if groups else None


def _drop(attempts: Sequence[Attempt], detail: str) -> list[Score]:
    return [Score(status=ScoreStatus.DROPPED, detail=detail)] * len(attempts)


def _score_of(value: Any) -> Score:
    try:
        return Score.of(float(value))
    except (TypeError, ValueError) as error:
        raise SandboxError(f"the environment scored a trajectory with {value!r}: {error}") from None


def _match(trajectories: Sequence[tuple[int, ...]], attempts: Sequence[Attempt], encode: Encode) -> list[int]:
    """Return the number of the attempt of each trajectory. Attempts with equal tokens are exchangeable."""
    found: list[int | None] = [None] * len(trajectories)
    for sequences in (_last_tokens, _all_tokens, lambda attempt: _encoded(attempt, encode)):
        for number, attempt in enumerate(attempts):
            if number in found:
                continue
            known = set(sequences(attempt))
            place = next((at for at, each in enumerate(trajectories) if found[at] is None and each in known), None)
            if place is not None:
                found[place] = number
        if None not in found:
            return [number for number in found if number is not None]
    missing = found.index(None)
    raise SandboxError(
        f"trajectory {missing} of the environment has {len(trajectories[missing])} tokens that are those of no attempt: use "
        "the nodes of managed_server, or tokenize_for_trainer on the messages of the conversation"
    )


def _last_tokens(attempt: Attempt) -> _Sequences:
    yield from (reply.tokens for reply in attempt.replies[-1:])


def _all_tokens(attempt: Attempt) -> _Sequences:
    yield from (reply.tokens for reply in attempt.replies)


def _encoded(attempt: Attempt, encode: Encode) -> _Sequences:
    """Yield the replies of an attempt as an environment encodes them; `tokenize_for_trainer` cuts the end of some."""
    for reply in attempt.replies:
        tokens = tuple(encode(reply))
        yield tokens
        yield tokens[:-1]
