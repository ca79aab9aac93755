"""Episodes: what is sampled is what is trained, turns and masks, and failures that are data."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.algorithms.rewards import trajectory_weights
from antiphon.algorithms.sections import LossWeightConfig
from antiphon.core import errors
from antiphon.core.errors import DataError
from antiphon.core.types import (
    MIXED_CACHE,
    AttemptId,
    AttemptStatus,
    Completion,
    Failure,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    Segment,
    Streams,
    Turn,
)
from antiphon.rollout.agents import Outcome
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EpisodeContext
from antiphon.rollout.gateway.attempt_session import CapturedAttempt
from antiphon.rollout.gateway.capture import CaptureCounts
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.simulate import clock

EOS = 0
PROMPT = Prompt(id="p", task="t", messages=(Message("user", "ab"),), seed=3)


class Letters:
    """A tokenizer of one token a character; 0 ends a turn."""

    eos_ids = (EOS,)

    def encode_prompt(self, messages):
        return np.concatenate([self._said(m) for m in messages])

    def _said(self, message):
        end = [EOS] if message.role == "assistant" else []
        return np.array([ord(c) for c in message.content] + end, np.int32)

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
        info = {"state_key": str(self.left), "valid": action != "?", "success": self.left == 0}
        return f"{self.left}", 0.5, self.left == 0, False, info

    def close(self):
        self.closed = True


def play(*, max_length=100, **options):
    requests = []
    episodes = episodes_of(requests, max_length=max_length, **options)
    run = episodes.run(PROMPT, AttemptId(0, 0, 0), PolicyVersion(0, 4), Sampling(max_tokens=8))
    return asyncio.run(run), requests


def episodes_of(
    requests=None,
    *,
    world=None,
    said=("xy",),
    finish=FinishReason.STOP,
    max_turns=1,
    max_length=100,
    grade=None,
    tokenizer=Letters,
    generate=None,
    agents=None,
    **rollout,
):
    requests = [] if requests is None else requests

    async def sample(request):
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

    return EpisodeRunner(
        EpisodeContext(
            encoder=PromptEncoder(tokenizer()),
            generate=generate or sample,
            config=RolloutConfig(groups_per_step=1, max_turns=max_turns, sampling={"max_tokens": 8}, **rollout),
            max_length=max_length,
            seed=1,
        ),
        grade=grade or judge,
        environments={"t": world if callable(world) else lambda _: world} if world else {},
        agents=agents,
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


def test_turns_alternate_with_untrained_observations():
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


def test_observation_that_leaves_no_room_is_cut():
    class Shouts(Countdown):
        async def step(self, action):
            _, *rest = await super().step(action)
            return "x" * 5000, *rest

    for samples, length in (("trajectory", 6), ("turn", 6), ("joined", 6)):
        trajectory, requests = play(world=Shouts(), max_turns=5, max_length=20, samples=samples)
        (segment,) = trajectory.segments
        assert len(requests) == 1 and trajectory.meta.status is AttemptStatus.FINISHED
        assert text_of(segment) == "ab3xy|" and len(segment.tokens) == length
        assert trajectory.meta.truncated


@given(st.integers(3, 40), st.integers(1, 30), st.sampled_from(["trajectory", "turn", "joined"]))
def test_no_segment_is_longer_than_the_model(max_length, observed, samples):
    class Talks(Countdown):
        async def step(self, action):
            _, *rest = await super().step(action)
            return "o" * observed, *rest

    async def generate(request):
        tokens = np.array([ord("x"), EOS][: request.sampling.max_tokens], np.int32)
        return Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.25, np.float32),
            versions=np.full(len(tokens), 4, np.int32),
            finish=FinishReason.STOP if len(tokens) == 2 else FinishReason.LENGTH,
        )

    options = {"max_turns": 5, "max_length": max_length, "samples": samples}
    trajectory, _ = play(world=Talks(), generate=generate, **options)
    for segment in trajectory.segments:
        assert len(segment.tokens) <= max_length
        assert segment.loss_mask[-1], "what is read last is followed by what was sampled of it"


class Ends(Countdown):
    """A world whose third turn is the last; `cut` says that it gave up there."""

    def __init__(self, cut=False):
        super().__init__()
        self.cut = cut

    async def step(self, action):
        observation, reward, over, _, info = await super().step(action)
        return observation, reward, over and not self.cut, over and self.cut, info


TRUNCATED = [  # what ends an episode, and whether it is cut off there
    ("the environment", {}, False),
    ("the environment, at the last turn", {"max_turns": 3}, False),
    ("the environment, at the last token", {"episode_tokens": 6}, False),
    ("a reply that hits its limit", {"finish": FinishReason.LENGTH}, True),
    ("turns", {"max_turns": 2}, True),
    ("length", {"max_length": 9}, True),
    ("tokens", {"episode_tokens": 4}, True),
    ("seconds", {"episode_seconds": 1e-9}, True),
    ("the environment's own limit", {"world": lambda _: Ends(cut=True)}, True),
]


@pytest.mark.parametrize(
    ("options", "truncated"), [case[1:] for case in TRUNCATED], ids=[case[0] for case in TRUNCATED]
)
def test_what_is_truncated(options, truncated):
    seen = []

    async def judge(prompt, transcript):
        seen.append(transcript.truncated)
        return Score.of(1.0)

    options = {"world": lambda _: Ends(), "said": ("x",), "max_turns": 5, "grade": judge} | options
    trajectory, _ = play(**options)
    assert trajectory.meta.status is AttemptStatus.FINISHED, trajectory.meta.failure
    assert trajectory.meta.truncated is truncated and seen == [truncated]
    group = [trajectory.meta, replace(trajectory.meta, truncated=False)]
    masked, whole = trajectory_weights([group], LossWeightConfig(mask_truncated=True))[0]
    assert (masked, whole) == ((0.0, 1.0) if truncated else (1.0, 1.0))


def test_a_world_that_breaks_is_a_failure_and_not_a_score():
    world = Countdown(broken=True)
    trajectory, _ = play(world=world, max_turns=5)
    assert trajectory.meta.status is AttemptStatus.FAILED
    assert trajectory.meta.failure.source == "environment" and "the world ended" in trajectory.meta.failure.message
    assert trajectory.meta.score.value is None and world.closed


class Slow(Countdown):
    """Takes a second for each call; counts those that are at it. The third of them hangs."""

    made, active, most = 0, 0, 0

    def __init__(self):
        super().__init__()
        Slow.made += 1
        self.hangs = Slow.made == 3

    async def _work(self):
        Slow.active += 1
        Slow.most = max(Slow.most, Slow.active)
        try:
            await asyncio.sleep(1e9 if self.hangs else 1.0)
        finally:
            Slow.active -= 1

    async def reset(self, seed):
        await self._work()
        return super().reset(seed)

    async def step(self, action):
        await self._work()
        return await super().step(action)


@pytest.mark.parametrize(("limit", "most", "seconds"), [(0, 6, 10.0), (2, 2, 15.0), (1, 1, 30.0)])
def test_environments_step_in_turns(limit, most, seconds):
    """The wait for a turn is no delay of the environment; one that hangs gives its turn back."""
    Slow.made = Slow.active = Slow.most = 0
    options = {"environment_concurrency": limit, "environment_timeout": 10.0}

    async def main():
        episodes = episodes_of(world=lambda _: Slow(), said=("a",), max_turns=5, **options)
        runs = [
            episodes.run(PROMPT, AttemptId(0, number, 0), PolicyVersion(0, 4), Sampling(max_tokens=8))
            for number in range(6)
        ]
        ended = await asyncio.gather(*runs)
        return [trajectory.meta.status for trajectory in ended], asyncio.get_running_loop().time()

    statuses, took = clock.run(main())
    assert statuses == [AttemptStatus.FAILED if number == 2 else AttemptStatus.FINISHED for number in range(6)]
    assert Slow.most == most and Slow.active == 0
    assert took == seconds  # five times four calls of a second, and one of ten


def test_a_grader_without_a_verdict_is_a_failure():
    async def silent(prompt, transcript):
        return Score.ungraded("timed out after 10 s")

    trajectory, _ = play(grade=silent)
    assert trajectory.meta.failure.source == "reward" and trajectory.meta.failure.message == "timed out after 10 s"


def test_a_prompt_that_leaves_no_room_is_a_failure():
    trajectory, requests = play(max_length=2)
    assert not requests and trajectory.meta.failure.source == "episode"
    assert "a prompt of 2 tokens leaves no room in 2" in trajectory.meta.failure.message


def test_empty_prompt_is_a_failure_of_the_attempt():
    class Mute(Letters):
        def encode_prompt(self, messages):
            return np.array([], np.int32)

    trajectory, requests = play(tokenizer=Mute)
    assert not requests and trajectory.meta.status is AttemptStatus.FAILED
    assert trajectory.meta.failure.source == "episode" and trajectory.segments == ()


def test_text_that_cannot_be_encoded_is_a_failure():
    class Narrow(Letters):
        def encode_observation(self, messages, observation, *, closed=True):
            raise DataError("no token for '2'")

    world = Countdown()
    trajectory, requests = play(tokenizer=Narrow, world=world, max_turns=5)
    assert len(requests) == 1 and trajectory.meta.status is AttemptStatus.FAILED
    assert trajectory.meta.failure == Failure(source="episode", message="no token for '2'")
    assert trajectory.meta.score.value is None and world.closed


@pytest.mark.parametrize("refusal", errors.REFUSALS)
def test_request_that_an_engine_refuses_is_a_failure(refusal):
    async def refuse(request):
        raise refusal("outside the vocabulary")

    episodes = episodes_of(generate=refuse)
    trajectory = asyncio.run(episodes.run(PROMPT, AttemptId(0, 0, 0), PolicyVersion(0, 4), Sampling(max_tokens=8)))
    assert trajectory.meta.failure == Failure(source="engine", message="outside the vocabulary")
    assert trajectory.meta.status is AttemptStatus.FAILED


@pytest.mark.parametrize(
    ("logprob", "fails"),
    [
        (np.nan, True),
        (np.inf, True),
        (-np.inf, True),
        (0.5, True),
        (-9999.0, True),
        (1e-6, False),
        (0.0, False),
        (-100.0, False),
    ],
)
def test_impossible_logprob_fails_the_attempt(logprob, fails):
    asked = []

    async def generate(request):
        logprobs = np.array([-0.25, logprob, -0.25], np.float32)
        versions = np.full(3, 4, np.int32)
        tokens = np.array([120, 121, EOS], np.int32)
        return Completion(tokens=tokens, logprobs=logprobs, versions=versions, finish=FinishReason.STOP)

    async def judge(prompt, transcript):
        asked.append(prompt)
        return Score.of(1.0)

    trajectory, _ = play(generate=generate, grade=judge)
    assert (trajectory.meta.status is AttemptStatus.FAILED) is fails
    assert len(asked) == (0 if fails else 1), "what has failed is not judged"
    assert (trajectory.meta.failure is not None and trajectory.meta.failure.source == "engine") is fails


def test_impossible_logprob_fails_the_attempt_of_an_agent():
    told = np.array([0.0, -0.25, np.nan], np.float32)
    turn = Turn(start=1, stop=3, sampling=Sampling(max_tokens=2))
    mask, tokens = np.array([False, True, True]), np.array([97, 120, EOS], np.int32)
    segment = Segment(tokens=tokens, loss_mask=mask, logprobs=told, versions=0 * tokens, turns=(turn,))

    async def agent(inputs):
        captured = CapturedAttempt((segment,), PROMPT.messages, CaptureCounts(turns=1))
        return Outcome(result=None, failure=None, captured=captured, seconds=0.0)

    trajectory, _ = play(agents={"t": agent})
    assert trajectory.meta.status is AttemptStatus.FAILED and trajectory.meta.failure.source == "engine"


def test_cancelling_an_episode_closes_its_world():
    async def main():
        world, asked = Countdown(), asyncio.Event()

        async def generate(request):
            asked.set()
            await asyncio.get_running_loop().create_future()

        episodes = EpisodeRunner(
            EpisodeContext(
                encoder=PromptEncoder(Letters()),
                generate=generate,
                config=RolloutConfig(groups_per_step=1, max_turns=2, sampling={"max_tokens": 8}),
                max_length=50,
                seed=0,
            ),
            grade=None,
            environments={"t": lambda _: world},
        )
        run = episodes.run(PROMPT, AttemptId(0, 0, 0), PolicyVersion(0, 0), Sampling(max_tokens=8))
        task = asyncio.create_task(run)
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.closed

    asyncio.run(main())


# --- what an episode becomes, and when it is over -------------------------------------------------------------------------


def sampled(segments):
    return "".join(text for segment in segments for text in np.array([*text_of(segment)])[segment.loss_mask])


def test_a_sample_a_turn_shows_as_much_history_as_it_is_told():
    options = {"world": lambda _: Countdown(), "said": ("a", "bb", "c"), "max_turns": 5, "samples": "turn"}
    trajectory, requests = play(**options, history=1)
    assert [text_of(segment) for segment in trajectory.segments] == ["ab3a|", "ab3a|2bb|", "ab2bb|1c|"]
    assert sampled(trajectory.segments) == "a|bb|c|"
    assert [segment.parent for segment in trajectory.segments] == [None, 0, 1]
    assert trajectory.meta.newest == PolicyVersion(0, 7), "the version of the last of its turns"
    assert [turn.state_key for segment in trajectory.segments for turn in segment.turns] == ["3", "2", "1"]
    assert [
        segment.tokens[: len(r.tokens)].tolist() for segment, r in zip(trajectory.segments, requests, strict=True)
    ] == [r.tokens.tolist() for r in requests]
    assert trajectory.meta.turns == 3 and trajectory.meta.completion_tokens == 7
    whole, _ = play(**options)
    assert [text_of(segment) for segment in whole.segments] == ["ab3a|", "ab3a|2bb|", "ab3a|2bb|1c|"]


def test_turns_join_only_where_one_extends_the_last():
    options = {"world": lambda _: Countdown(), "said": ("a", "b", "c"), "max_turns": 5}
    whole, _ = play(**options)
    joined, _ = play(**options, samples="joined")
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        assert np.array_equal(getattr(joined.segments[0], name), getattr(whole.segments[0], name))
    assert joined.segments[0].turns == whole.segments[0].turns and len(joined.segments) == 1

    class Forgets(Letters):
        """Leaves out what it said before the last turn, as templates of models that think do."""

        def encode_prompt(self, messages):
            said = [message for message in messages if message.role == "assistant"]
            return super().encode_prompt([message for message in messages if message not in said[:-1]])

    forked, _ = play(**options, samples="joined", tokenizer=Forgets)
    assert [text_of(segment) for segment in forked.segments] == ["ab3a|2b|", "ab32b|1c|"]
    assert sampled(forked.segments) == "a|b|c|" and forked.meta.score.parts["samples"] == 2


def test_what_the_environment_says_of_the_turns_is_measured():
    trajectory, _ = play(world=Countdown(), said=("a", "?", "?"), max_turns=5)
    assert trajectory.meta.score.parts == {"valid": pytest.approx(1 / 3), "success": 1.0, "turns": 3.0, "samples": 1.0}


def test_episode_over_its_budget_ends_and_is_scored():
    trajectory, requests = play(world=Countdown(), said=("abc", "d"), max_turns=5, episode_tokens=5)
    assert len(requests) == 2 and requests[1].sampling.max_tokens == 1
    assert trajectory.meta.score.value == 1.0 and trajectory.meta.turns == 2

    class Slow(Countdown):
        async def step(self, action):
            await asyncio.sleep(0.02)
            return await super().step(action)

    trajectory, requests = play(world=Slow(), said=("a",), max_turns=5, episode_seconds=0.01)
    assert len(requests) == 1 and trajectory.meta.score.value == 0.5
    with pytest.raises(ValueError, match="history"):
        play(history=1)


@pytest.mark.parametrize(
    "told",
    [None, "done", ("o", 0.0, False, False), ("o", "much", False, False, {}), (3, 0.0, False, False, {}),
     ("o", float("nan"), False, False, {}), ("o", 0.0, False, False, None)],
)  # fmt: skip
def test_an_environment_that_returns_garbage_has_failed(told):
    class Garbage(Countdown):
        async def step(self, action):
            return told

    class Worse(Countdown):
        def reset(self, seed):
            return told

    for world in (Garbage(), Worse()):
        trajectory, _ = play(world=world, max_turns=3)
        assert trajectory.meta.failure.source == "environment" and "TypeError" in trajectory.meta.failure.message
        assert trajectory.meta.score.status == "ungraded"


def test_an_environment_that_cannot_be_made_has_failed():
    def make(prompt):
        raise KeyError("no such room")

    trajectory, _ = play(world=make, max_turns=3)
    assert "no such room" in trajectory.meta.failure.message and trajectory.segments == ()
