"""Attempts by a model behind an API, against those of an engine that says the same."""

import asyncio

import pytest

from antiphon.core.errors import ConfigError
from antiphon.core.types import AttemptId, AttemptStatus, FinishReason, PolicyVersion, Sampling, Score, ScoreStatus
from antiphon.engines.chat_client import ChatReply, ChatRequestError
from antiphon.rollout.chat_episodes import ChatEpisodes
from antiphon.rollout.config import RolloutConfig
from antiphon.run.chat_api import ChatAPI
from tests.raising import raises_with
from tests.unit.rollout.test_episode import PROMPT, Countdown, episodes_of

SAMPLING = Sampling(max_tokens=8)
ENDS = [FinishReason.STOP, FinishReason.LENGTH]


async def judge(prompt, transcript):
    """Pay what the environment paid, and write down what a reward sees."""
    told = [(message.role, message.content) for message in transcript.messages]
    turns = [(turn.reward, turn.state_key, turn.finish) for turn in transcript.turns]
    total = sum(turn.reward or 0.0 for turn in transcript.turns)
    return Score(status=ScoreStatus.SCORED, value=total, detail=repr((told, turns, transcript.truncated)))


def chat(said, world=None, finish=FinishReason.STOP, **rollout):
    """Play with replies in order, the last one again and again; the trajectory, and what was sent."""
    sent = []

    async def ask(messages, sampling):
        sent.append([(message.role, message.content) for message in messages])
        return ChatReply(said[min(len(sent), len(said)) - 1], finish is FinishReason.LENGTH)

    config = RolloutConfig(groups_per_step=1, sampling={"max_tokens": 8}, **rollout)
    episodes = ChatEpisodes(ask, config, judge, {"t": world if callable(world) else lambda _: world} if world else {})
    return play(episodes), sent


def play(episodes):
    async def run():
        return await episodes.score(await episodes.generate(PROMPT, AttemptId(-1, 0, 0), PolicyVersion(0, 0), SAMPLING))

    return asyncio.run(run())


def engine(said, **options):
    """The same by an engine."""
    episodes = episodes_of(said=said, grade=judge, **options)
    return asyncio.run(episodes.run(PROMPT, AttemptId(-1, 0, 0), PolicyVersion(0, 0), SAMPLING))


@pytest.mark.parametrize("finish", ENDS)
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("max_turns", [1, 2, 3, 5])
def test_an_episode_is_that_of_an_engine(finish, broken, max_turns):
    said = ["one", "?", "three"]
    worlds = [Countdown(broken), Countdown(broken)]
    found, _ = chat(said, worlds[0], finish, max_turns=max_turns)
    expected = engine(said, world=worlds[1], finish=finish, max_turns=max_turns)
    assert found.meta.score.value == expected.meta.score.value and found.meta.score.detail == expected.meta.score.detail
    names = {"turns", "valid", "success"}
    assert {name: found.meta.score.parts.get(name) for name in names} == {
        name: expected.meta.score.parts.get(name) for name in names
    }
    assert (found.meta.status, found.meta.truncated) == (expected.meta.status, expected.meta.truncated)
    assert (found.meta.failure and found.meta.failure.source) == (
        expected.meta.failure and expected.meta.failure.source
    )
    assert all(world.closed for world in worlds)


def test_what_an_environment_shows_is_sent():
    shown = []

    class Pictures(Countdown):
        def reset(self, seed):
            return "look <image>", {"images": [b"first"]}

        def step(self, action):
            return "and <image>", 0.0, False, False, {"images": [b"second"]}

    async def ask(messages, sampling):
        shown.append([message.images for message in messages if message.role == "user"])
        return ChatReply("ok", False)

    config = RolloutConfig(groups_per_step=1, sampling={"max_tokens": 8}, max_turns=2)
    play(ChatEpisodes(ask, config, judge, {"t": lambda _: Pictures()}))
    assert [images[-1] for images in shown] == [(b"first",), (b"second",)]


@pytest.mark.parametrize("seconds", [0.01, 600.0])
def test_an_episode_ends_when_its_time_is_up(seconds):
    class Slow(Countdown):
        async def step(self, action):
            await asyncio.sleep(0.02)
            return await super().step(action)

    found, sent = chat(["a"], Slow(), max_turns=5, episode_seconds=seconds)
    expected = engine(["a"], world=Slow(), max_turns=5, episode_seconds=seconds)
    assert found.meta.score.detail == expected.meta.score.detail and found.meta.truncated == expected.meta.truncated
    assert len(sent) == (1 if seconds < 1 else 3)


@pytest.mark.parametrize("finish", ENDS)
def test_a_single_turn_is_that_of_an_engine(finish):
    found, sent = chat(["xy"], finish=finish)
    expected = engine(["xy"], finish=finish)
    assert found.meta.score.detail == expected.meta.score.detail and found.meta.truncated == expected.meta.truncated
    assert sent == [[("user", "ab")]] and found.meta.score.parts == expected.meta.score.parts


def test_the_conversation_is_sent_as_far_back_as_history_says():
    _, sent = chat(["one", "two", "three"], Countdown(), max_turns=3)
    assert sent[2] == [
        *[("user", "ab"), ("user", "3"), ("assistant", "one"), ("user", "2"), ("assistant", "two"), ("user", "1")]
    ]
    _, sent = chat(["one", "two", "three"], Countdown(), max_turns=3, samples="turn", history=1)
    assert sent[2] == [("user", "ab"), ("user", "2"), ("assistant", "two"), ("user", "1")]


def test_what_the_api_refuses_is_a_failure_and_the_environment_is_closed():
    async def ask(messages, sampling):
        raise ChatRequestError("HTTP 400 too long")

    world = Countdown()
    config = RolloutConfig(groups_per_step=1, max_turns=3, sampling={"max_tokens": 8})
    episodes = ChatEpisodes(ask, config, judge, {"t": lambda _: world})
    meta = play(episodes).meta
    assert (
        meta.status is AttemptStatus.FAILED and meta.failure.source == "engine" and "too long" in meta.failure.message
    )
    assert meta.score.value is None and world.closed


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"url": "api.example.com"}, "api.url"),
        ({"concurrency": 0}, "api.concurrency"),
        ({"attempts": 0}, "api.attempts"),
        ({"timeout": 0.0}, "api.timeout"),
        ({"settings": {"messages": []}}, "api.settings.messages"),
    ],
)
def test_an_api_that_cannot_be_is_refused(change, key):
    with raises_with(ConfigError, key=key):
        ChatAPI(**{"url": "https://api.example.com/v1", **change})
