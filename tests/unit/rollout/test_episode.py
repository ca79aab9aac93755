"""Episodes: what is sampled is what is trained, turns and masks, and failures that are data."""

import asyncio
import itertools

import numpy as np
import pytest

from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import Episodes
from antiphon.types import (
    MIXED_CACHE,
    AttemptId,
    AttemptStatus,
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Streams,
)

EOS = 0
PROMPT = Prompt(id="p", task="t", messages=(Message("user", "ab"),), seed=3)


class Letters:
    """A tokenizer of one token a character; 0 ends a turn."""

    eos_ids = (EOS,)

    def encode_prompt(self, messages):
        return np.array([ord(c) for m in messages for c in m.content], np.int32)

    def encode_observation(self, messages, observation, *, closed=True):
        return np.array(([] if closed else [EOS]) + [ord(c) for c in observation.content], np.int32)

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens if token != EOS)


class Countdown:
    """A world of three steps; `broken` raises in the second."""

    def __init__(self, broken=False):
        self.left, self.broken, self.closed = 3, broken, False

    def reset(self, seed):
        return f"{self.left}", {"state_key": "3"}

    async def step(self, action):
        self.left -= 1
        if self.broken and self.left == 1:
            raise OSError("the world ended")
        return f"{self.left}", 0.5, self.left == 0, False, {"state_key": str(self.left)}

    def close(self):
        self.closed = True


def play(*, max_length=100, **options):
    requests = []
    episodes = episodes_of(requests, max_length=max_length, **options)
    run = episodes.run(PROMPT, AttemptId(0, 0, 0), PolicyVersion(0, 4), Sampling(max_tokens=8))
    return asyncio.run(run), requests


def episodes_of(
    requests=None, *, world=None, said=("xy",), finish=FinishReason.STOP, max_turns=1, max_length=100, grade=None
):
    requests = [] if requests is None else requests

    async def generate(request):
        requests.append(request)
        text = said[min(len(requests), len(said)) - 1]
        closing = [EOS] if finish is FinishReason.STOP else []
        tokens = np.array([ord(c) for c in text] + closing, np.int32)
        return Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.25, np.float32),
            versions=np.full(len(tokens), 4 + len(requests), np.int32),
            finish=finish,
            streams=Streams({MIXED_CACHE: np.zeros(len(tokens), np.bool_)}),
        )

    async def judge(prompt, transcript):
        return Score.of(sum(turn.reward or 0.0 for turn in transcript.turns) or 1.0)

    return Episodes(
        tokenizer=Letters(),
        generate=generate,
        grade=grade or judge,
        environments={"t": world if callable(world) else lambda _: world} if world else {},
        config=RolloutConfig(groups_per_step=1, max_turns=max_turns, sampling={"max_tokens": 8}),
        max_length=max_length,
        seed=1,
    )


def text_of(segment):
    return "".join("|" if token == EOS else chr(token) for token in segment.tokens)


def test_one_turn():
    trajectory, (request,) = play()
    (segment,) = trajectory.segments
    assert text_of(segment) == "abxy|"
    assert segment.loss_mask.tolist() == [False, False, True, True, True]
    assert segment.versions.tolist() == [0, 0, 5, 5, 5]
    assert request.min_version == 4 and request.tokens.tolist() == [97, 98]
    assert trajectory.meta.newest == PolicyVersion(0, 5)
    assert trajectory.meta.status is AttemptStatus.FINISHED and trajectory.meta.score.value == 1.0


def test_turns_alternate_with_observations_that_are_not_trained_on():
    world = Countdown()
    trajectory, requests = play(world=world, said=("a", "bb", "c"), max_turns=5)
    (segment,) = trajectory.segments
    assert text_of(segment) == "ab3a|2bb|1c|"
    trained = "".join(c for c, mask in zip(text_of(segment), segment.loss_mask, strict=True) if mask)
    assert trained == "a|bb|c|"
    assert [(turn.start, turn.stop, turn.reward, turn.state_key) for turn in segment.turns] == [
        (3, 5, 0.5, "3"),
        (6, 9, 0.5, "2"),
        (10, 12, 0.5, "1"),
    ]
    for earlier, later in itertools.pairwise(requests):
        assert later.tokens[: len(earlier.tokens)].tolist() == earlier.tokens.tolist(), "each turn extends the last"
    assert len({request.sampling.seed for request in requests}) == 3
    assert trajectory.meta.score.value == 1.5 and trajectory.meta.turns == 3
    assert world.closed


def test_a_turn_that_ran_into_the_limit_ends_the_episode():
    trajectory, requests = play(world=Countdown(), finish=FinishReason.LENGTH, max_turns=5)
    assert len(requests) == 1 and trajectory.meta.truncated


def test_limits_on_turns_and_length():
    assert len(play(world=Countdown(), max_turns=2)[1]) == 2
    _, requests = play(world=Countdown(), max_turns=5, max_length=9)
    assert [request.sampling.max_tokens for request in requests] == [6, 2]


def test_a_world_that_breaks_is_a_failure_and_not_a_score():
    world = Countdown(broken=True)
    trajectory, _ = play(world=world, max_turns=5)
    assert trajectory.meta.status is AttemptStatus.FAILED
    assert trajectory.meta.failure.source == "environment" and "the world ended" in trajectory.meta.failure.message
    assert trajectory.meta.score.value is None and world.closed


def test_a_grader_without_a_verdict_is_a_failure():
    async def silent(prompt, transcript):
        return Score.ungraded("timed out after 10 s")

    trajectory, _ = play(grade=silent)
    assert trajectory.meta.failure.source == "reward" and trajectory.meta.failure.message == "timed out after 10 s"


def test_a_prompt_that_leaves_no_room_is_a_failure():
    trajectory, requests = play(max_length=2)
    assert not requests and trajectory.meta.failure.source == "episode"
    assert "a prompt of 2 tokens leaves no room in 2" in trajectory.meta.failure.message


def test_cancelling_an_episode_closes_its_world():
    async def main():
        world, asked = Countdown(), asyncio.Event()

        async def generate(request):
            asked.set()
            await asyncio.get_running_loop().create_future()

        episodes = Episodes(
            tokenizer=Letters(),
            generate=generate,
            grade=None,
            environments={"t": lambda _: world},
            config=RolloutConfig(groups_per_step=1, max_turns=2, sampling={"max_tokens": 8}),
            max_length=50,
            seed=0,
        )
        run = episodes.run(PROMPT, AttemptId(0, 0, 0), PolicyVersion(0, 0), Sampling(max_tokens=8))
        task = asyncio.create_task(run)
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.closed

    asyncio.run(main())
