"""Groups that an environment of Atropos runs and scores: who answers what, who gets which score, and who waits for whom.

Whole runs, with the package itself, are in tests/system/test_atropos.py.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from antiphon.core.errors import ConfigError, SandboxError, UnsupportedError
from antiphon.core.types import AttemptId, AttemptStatus, FinishReason, Prompt, Score, ScoreStatus, Timing
from antiphon.rollout.atropos.agent import AtroposAgent
from antiphon.rollout.atropos.policy import TRAJECTORY, Attempt, PolicyGroup, Reply
from antiphon.rollout.atropos.scores import REFUSED, read_scores
from antiphon.rollout.attempt import AttemptInputs, UnscoredAttempt
from antiphon.rollout.gateway.chat import ApiError
from antiphon.rollout.gateway.server import Gateway
from antiphon.tasks.base import Transcript
from tests.unit.rollout.gateway_support import PROMPT, SAMPLING, STARTED, TEMPLATES, Logger, make, model

ITEM = Prompt(id="p", task="t", messages=(), payload={"index": 7})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


def inputs(group=0, sibling=0, attempt=0):
    return AttemptInputs(
        prompt=ITEM, attempt=AttemptId(group, sibling, attempt), started=STARTED, sampling=SAMPLING, priority=0
    )


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# --- the policy ----------------------------------------------------------------------------------------------------------


class Stage:
    """A group of attempts at a real gateway, whose engine says what it is told to."""

    def __init__(self, renderer, *said, size=2):
        self.engine = Logger(renderer, *((text, FinishReason.STOP) for text in said))
        self.gateway = Gateway(model(renderer, self.engine))
        self.keys = [self.gateway.open_attempt(inputs(sibling=sibling)) for sibling in range(size)]
        self.group = PolicyGroup(self.keys, self.gateway.answer)

    async def chat(self, *messages, **request):
        completion, _ = await self.group.chat({"messages": messages, **request})
        return [choice.message.content for choice in completion.choices]

    def spoken(self):
        """Close the attempts; return the texts of each one's segments."""
        found = [self.gateway.close_attempt(key).segments for key in self.keys]
        decode = self.engine.renderer.decode
        return [[decode(segment.tokens[segment.loss_mask]) for segment in segments] for segments in found]


def test_answers_have_the_tokens_of_the_engine(renderer):
    async def run():
        stage = Stage(renderer, "one")
        body = {"model": "policy", "messages": [user("Hi")]}
        answer = await stage.gateway.answer(stage.keys[0], body)
        with pytest.raises(ApiError) as caught:
            await stage.gateway.answer("another key", body)
        return answer, stage.engine.log, caught.value

    answer, [(request, completion)], refused = asyncio.run(run())
    assert answer.response["choices"][0]["message"]["content"] == "one"
    assert answer.prompt.tolist() == request.tokens.tolist()
    [(tokens, logprobs)] = answer.replies
    assert tokens.tolist() == completion.tokens.tolist() and logprobs.tolist() == completion.logprobs.tolist()
    assert refused.status == 401


def test_each_choice_is_one_attempt(renderer):
    async def run():
        stage = Stage(renderer, "a", "b", "c", size=3)
        assert await stage.chat(user("Hi"), n=3) == ["a", "b", "c"]
        return stage.spoken()

    assert asyncio.run(run()) == [["a"], ["b"], ["c"]]


def test_a_continued_conversation_stays_with_its_attempt(renderer):
    async def run():
        stage = Stage(renderer, "a", "b", "of b", "of a", "again of b")
        await stage.chat(user("Hi"), n=2)
        await stage.chat(user("Hi"), assistant("b "), user("go on"))
        await stage.chat(user("Hi"), assistant("a"), user("go on"))
        await stage.chat(user("Hi"), assistant("b"), user("go on"), assistant("of b"), user("and on"))
        return stage.spoken()

    assert asyncio.run(run()) == [["aof a"], ["bof bagain of b"]]


def test_equal_replies_are_continued_in_different_attempts(renderer):
    async def run():
        stage = Stage(renderer, "a", "a", "x", "y", "p", "q")
        await stage.chat(user("Hi"), n=2)
        for _ in range(2):
            await stage.chat(user("Hi"), assistant("a"), user("go on"))
        for _ in range(2):  # only one attempt said this, so that both are its own
            await stage.chat(user("Hi"), assistant("a"), user("go on"), assistant("y"), user("and on"))
        return stage.spoken()

    assert asyncio.run(run()) == [["ax"], ["ayp", "q"]]


def test_a_continued_text_goes_on_from_its_tokens(renderer):
    tokenizer = AutoTokenizer.from_pretrained(renderer.directory)

    async def run():
        stage = Stage(renderer, "a", "a", "x", "y", "z")

        async def complete(prompt, n=1):
            completion, answers = await stage.group.complete({"prompt": prompt, "n": n, "max_tokens": 9}, tokenizer)
            return [choice.text for choice in completion.choices], answers

        assert (await complete("1+1=", n=2))[0] == ["a", "a"]
        assert (await complete("1+1=a;"))[0] == ["x"]
        _, [answer] = await complete("1+1=a<|end|>;")  # the mark that was sampled comes once
        assert answer.prompt.tolist() == [*stage.group.attempts[1].replies[0].tokens, *renderer.encode(";").tolist()]
        assert (await complete("1+1=a;x,"))[0] == ["z"]
        with pytest.raises(UnsupportedError):
            await complete(["1", "2"])
        return stage.spoken()

    assert asyncio.run(run()) == [["axz"], ["ay"]]


@pytest.mark.parametrize("bos", [True, False])
def test_a_text_begins_with_one_mark(renderer, bos):
    tokenizer = AutoTokenizer.from_pretrained(renderer.directory)
    tokenizer.bos_token = "<|system|>"
    encode = tokenizer.encode
    tokenizer.encode = lambda text, add_special_tokens=True: (
        [tokenizer.bos_token_id] * (bos and add_special_tokens) + encode(text, add_special_tokens=False)
    )

    async def run():
        stage = Stage(renderer, size=1)
        _, [answer] = await stage.group.complete({"prompt": "<|system|>ab"}, tokenizer)
        return answer.prompt.tolist()

    assert asyncio.run(run()) == renderer.encode("<|system|>ab").tolist()


def test_a_trajectory_of_its_own_asks_as_one_attempt(renderer):
    async def collect(stage):
        TRAJECTORY.set(stage.group.begin(1)[0])
        await stage.chat(user("Hi"))
        await stage.chat(user("something else"), n=2)

    async def run():
        stage = Stage(renderer, "a", "b", "c", "d", "e", "f")
        for _ in range(2):
            await asyncio.create_task(collect(stage))
        return stage.spoken()

    assert asyncio.run(run()) == [["a", "b", "c"], ["d", "e", "f"]]


def test_more_conversations_than_attempts_are_refused(renderer):
    async def run():
        stage = Stage(renderer)
        await stage.chat(user("Hi"))
        with pytest.raises(UnsupportedError) as caught:
            await stage.chat(user("Hi"), n=2)
        assert stage.group.refusal is caught.value and caught.value.key == "tasks.agent.atropos"
        assert len(stage.engine.log) == 1
        return stage.spoken()

    assert asyncio.run(run()) == [["ok"], []]


# --- scores --------------------------------------------------------------------------------------------------------------


def attempt_of(*sequences):
    return Attempt(
        "key", True, [Reply(tokens=tokens, messages=[user("Hi"), assistant(str(tokens))]) for tokens in sequences]
    )


def encode(reply):
    """Encode a conversation as no engine does: by the characters of its reply."""
    return [1000, *map(ord, reply.messages[-1]["content"])]


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@given(st.data())
def test_each_attempt_gets_the_score_of_its_tokens(data):
    attempts = [attempt_of(*each) for each in data.draw(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1))]
    own = [attempt.replies[-1].tokens for attempt in attempts]
    scored = data.draw(st.permutations(own))
    values = [float(place) for place in range(len(scored))]
    found = read_scores({"tokens": [[*each] for each in scored], "scores": values}, attempts, encode)
    assert Counter(zip(own, (score.value for score in found), strict=True)) == Counter(zip(scored, values, strict=True))


@given(st.data(), st.booleans())
def test_conversations_rendered_again_are_recognized(data, cut):
    own = data.draw(st.lists(tokens, min_size=1, unique=True))
    attempts = [attempt_of(each) for each in own]
    order = data.draw(st.permutations(range(len(own))))
    rendered = [encode(attempts[number].replies[0]) for number in order]
    group = {"tokens": [each[:-1] if cut else each for each in rendered], "scores": [10 * number for number in order]}
    assert [score.value for score in read_scores(group, attempts, encode)] == [
        10 * number for number in range(len(own))
    ]


def test_an_earlier_reply_counts_if_no_last_one_has_the_tokens():
    attempts = [attempt_of((1,), (2,)), attempt_of((2,), (3,))]
    found = read_scores({"tokens": [[2], [2]], "scores": [0.0, 1.0]}, attempts, encode)
    assert sorted(score.value for score in found) == [0.0, 1.0]


@pytest.mark.parametrize("data", [None, [], [None], {}, {"tokens": [[1]], "scores": [1.0]}])
def test_a_group_without_scores_is_dropped(data):
    found = read_scores(data, [attempt_of((1,)), attempt_of((2,))], encode)
    assert [score.status for score in found] == [ScoreStatus.DROPPED] * 2
    assert {score.value for score in found} == {None}


@pytest.mark.parametrize("key", REFUSED)
def test_what_only_its_trainer_can_use_is_refused(key):
    group = {"tokens": [[1]], "scores": [1.0]}
    assert read_scores(group | {key: []}, [attempt_of((1,))], encode) == [Score.of(1.0)]
    with pytest.raises(UnsupportedError) as caught:
        read_scores(group | {key: [{"a": 1}]}, [attempt_of((1,))], encode)
    assert key in str(caught.value)


def test_several_groups_are_refused():
    group = {"tokens": [[1]], "scores": [1.0]}
    assert read_scores([None, group], [attempt_of((1,))], encode) == [Score.of(1.0)]
    with pytest.raises(UnsupportedError):
        read_scores([group, group], [attempt_of((1,))], encode)


@pytest.mark.parametrize("group", [{"tokens": [[9]], "scores": [1.0]}, {"tokens": [[1]], "scores": [float("nan")]}])
def test_scores_that_cannot_be_given_fail_the_group(group):
    with pytest.raises(SandboxError):
        read_scores(group, [attempt_of((1,))], encode)


@pytest.mark.parametrize(
    ("score", "status"),
    [
        (Score.of(0.5), AttemptStatus.FINISHED),
        (Score(status=ScoreStatus.DROPPED), AttemptStatus.FINISHED),
        (Score.ungraded("no answer"), AttemptStatus.FAILED),
        (Score(status=ScoreStatus.INFRASTRUCTURE), AttemptStatus.FAILED),
    ],
)
def test_only_a_verdict_finishes_an_attempt(score, status):
    unscored = UnscoredAttempt(
        attempt=AttemptId(0, 0, 0),
        prompt=PROMPT,
        started=STARTED,
        transcript=Transcript(()),
        segments=(),
        measures={},
        prompt_tokens=0,
        failure=None,
        timing=Timing(queued=0.0, started=0.0, finished=0.0),
    )
    meta = unscored.to_trajectory(score, 1.0).meta
    assert meta.status is status and meta.score is score


# --- groups --------------------------------------------------------------------------------------------------------------


class Groups:
    """Groups of three attempts, and what was collected of them."""

    def __init__(self, renderer, *, errors=()):
        self.gateway = Gateway(model(renderer, Logger(renderer)))
        self.agent = AtroposAgent(self.collect, self.gateway, 3, 60.0)
        self.errors = list(errors)
        self.collected = []  # number of the item, and of attempts
        self.gate = asyncio.Event()
        self.gate.set()

    async def collect(self, index, keys):
        self.collected.append((index, len(keys)))
        for key in keys:
            await self.gateway.answer(key, {"messages": [user("Hi")]})
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        return [Score.of(place) for place in range(len(keys))]

    def start(self, *attempts, group=0):
        return [asyncio.ensure_future(self.agent.run(inputs(group, *each))) for each in attempts]


def failures(outcomes):
    return [(outcome.failure.source, outcome.result) for outcome in outcomes]


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_group_is_collected_once_all_have_come(renderer):
    async def run():
        groups = Groups(renderer)
        first = groups.start((2, 0), (0, 0))
        other = groups.start((0, 0), group=1)
        await settle()
        assert not groups.collected
        outcomes = await asyncio.gather(*first, *groups.start((1, 0)))
        other[0].cancel()
        return [outcome.result.value for outcome in outcomes], groups.collected

    assert asyncio.run(run()) == ([2.0, 0.0, 1.0], [(7, 3)])


def test_an_attempt_of_an_evaluation_is_its_own_group(renderer):
    async def run():
        groups = Groups(renderer)
        outcomes = await asyncio.gather(*groups.start((0, 0), (1, 0), group=-1))
        return [outcome.result.value for outcome in outcomes], groups.collected

    assert asyncio.run(run()) == ([0.0, 0.0], [(7, 1), (7, 1)])


def test_a_group_that_fails_is_collected_again(renderer):
    async def run():
        groups = Groups(renderer, errors=[SandboxError("it broke")])
        failed = await asyncio.gather(*groups.start((0, 0), (1, 0), (2, 0)))
        again = await asyncio.gather(*groups.start((0, 1), (1, 1), (2, 1)))
        return failures(failed), [outcome.result.value for outcome in again]

    failed, again = asyncio.run(run())
    assert failed == [("environment", None)] * 3 and again == [0.0, 1.0, 2.0]


def test_what_cannot_work_is_raised(renderer):
    async def run():
        groups = Groups(renderer, errors=[UnsupportedError("no", key="k")])
        return await asyncio.gather(*groups.start((0, 0), (1, 0), (2, 0)), return_exceptions=True)

    assert {type(found) for found in asyncio.run(run())} == {UnsupportedError}


def test_an_attempt_that_ends_takes_its_siblings_along(renderer):
    async def run():
        groups = Groups(renderer)
        groups.gate.clear()
        running = groups.start((0, 0), (1, 0), (2, 0))
        await settle()
        assert groups.collected
        running[1].cancel()
        await asyncio.wait(running)
        return failures(running[number].result() for number in (0, 2)), groups.gateway.open_keys

    assert asyncio.run(run()) == ([("environment", None)] * 2, 0)


def test_an_attempt_that_ends_early_leaves_its_place(renderer):
    async def run():
        groups = Groups(renderer)
        gone, stays = groups.start((0, 0), (1, 0))
        await settle()
        gone.cancel()
        await asyncio.wait([gone])
        later = groups.start((2, 0))
        await settle()
        assert not groups.collected
        outcomes = await asyncio.gather(*groups.start((0, 1)), stays, *later)
        return [outcome.result.value for outcome in outcomes]

    assert asyncio.run(run()) == [0.0, 1.0, 2.0]


def test_a_try_after_the_verdict_fails_at_once(renderer):
    async def run():
        groups = Groups(renderer)
        await asyncio.gather(*groups.start((0, 0), (1, 0), (2, 0)))
        return failures(await asyncio.gather(*groups.start((1, 1)))), groups.collected

    assert asyncio.run(run()) == ([("environment", None)], [(7, 3)])


@pytest.mark.parametrize("payload", [None, {}, {"index": -1}, {"index": "3"}])
def test_a_prompt_without_an_item_ends_the_run(renderer, payload):
    async def run():
        groups = Groups(renderer)
        await groups.agent.run(replace(inputs(group=-1), prompt=replace(ITEM, payload=payload)))

    with pytest.raises(ConfigError) as caught:
        asyncio.run(run())
    assert caught.value.key == "tasks.prompts.source" and caught.value.valid == ("numbered",)
