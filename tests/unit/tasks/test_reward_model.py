"""Reward models in workers of their own: what they say, whatever is read beside it, and who shares them."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma3TextConfig,
)

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import load
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.types import Message, Prompt, ScoreStatus
from antiphon.learning.classifier import Classifier, _Waiting, batches
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.graders import start_graders
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards import build_reward
from antiphon.tasks.rewards.reward_model import ClassifierOptions, iterate_classifiers
from tests.raising import raises_with


def classifier_at(model, folder, **settings):
    """Save a classifier that begins as the model of tests, and its tokenizer."""
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_pretrained(model, **{"num_labels": 1, **settings})
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    return classifier_at(model, tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module", params=["padding token", "no padding token"])
def loaded(request, model, tmp_path_factory):
    """A classifier that knows how to pad, or does not, and the plain model of transformers beside it."""
    pad = 0 if request.param == "padding token" else None
    path = classifier_at(model, tmp_path_factory.mktemp("padded"), pad_token_id=pad)
    return Classifier(path, "cpu"), AutoModelForSequenceClassification.from_pretrained(path).eval()


def score_alone(plain, conversations):
    """Scores by transformers' own classifier, one conversation at a time."""
    with torch.inference_mode():
        return [plain(torch.from_numpy(each)[None].long()).logits.item() for each in conversations]


@given(
    groups=st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(1, 40), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    first=st.integers(0, 1),  # 0 is the token of padding, where the model has one
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_a_conversation_has_its_score_whatever_is_read_beside_it(loaded, groups, first, seed):
    classifier, plain = loaded
    draw = np.random.default_rng(seed)
    conversations = []
    for prompt, responses in groups:
        beginning, *ends = (draw.integers(first, 8, size=length).astype(np.int32) for length in (prompt, *responses))
        conversations += [np.concatenate([beginning, end]) for end in ends]
    assert classifier.packs
    assert classifier.score(conversations) == pytest.approx(score_alone(plain, conversations), abs=1e-4)


def test_what_a_group_begins_with_is_read_once(path):
    classifier = Classifier(path, "cpu")
    prompt, read = np.arange(1, 41, dtype=np.int32), []
    classifier._model.base_model.register_forward_pre_hook(
        lambda module, args, inputs: read.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    classifier.score([np.append(prompt, [token, 1]).astype(np.int32) for token in range(8)])
    assert read == [40 + 8 * 2]


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    "configure",
    [
        pytest.param(
            lambda vocabulary: Gemma2Config(
                vocab_size=vocabulary, num_key_value_heads=1, head_dim=8, attn_logit_softcapping=1.0, **SIZES
            ),
            id="soft capping",
        ),
        pytest.param(
            lambda vocabulary: Gemma3TextConfig(
                vocab_size=vocabulary, num_key_value_heads=1, head_dim=8, use_bidirectional_attention=True, **SIZES
            ),
            id="attention to later tokens",
        ),
        pytest.param(lambda vocabulary: BertConfig(vocab_size=vocabulary, **SIZES), id="encoder"),
    ],
)
def test_models_that_cannot_read_packs_read_padded_rows(model, tmp_path, configure):
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = configure(len(tokenizer))
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_config(config)
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    classifier = Classifier(str(tmp_path), "cpu")
    draw = np.random.default_rng(0)
    conversations = [draw.integers(1, len(tokenizer), size=length).astype(np.int32) for length in (3, 9, 20)]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert classifier.score(conversations) == pytest.approx(score_alone(plain, conversations), abs=1e-5)
    assert not classifier.packs


CONVERSATIONS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=50), max_size=40)


@given(conversations=CONVERSATIONS, most=st.integers(50, 200), packs=st.booleans())
def test_batches_hold_each_conversation_once_and_no_more_tokens_than_allowed(conversations, most, packs):
    async def main():
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(np.array(tokens, np.int32), loop.create_future()) for tokens in conversations]
        return [[each.tokens.tolist() for each in batch] for batch in batches(waiting, most, packs)]

    def count(batch):
        beginnings = {tuple(tokens[: 1 + n]) for tokens in batch for n in range(len(tokens))}  # one for each token read
        return len(beginnings) if packs else len(batch) * max(map(len, batch))

    found = asyncio.run(main())
    assert sorted(tokens for batch in found for tokens in batch) == sorted(conversations)
    assert all(batch and count(batch) <= most for batch in found)


def configured(tasks, **rollout):
    prompts = {"source": "jsonl", "path": "x"}
    return load(
        {
            "name": "x",
            "steps": 1,
            "model": {"path": "x"},
            "rollout": {"groups_per_step": 1, "group_size": 2, "sampling": {"max_tokens": 8}, **rollout},
            "tasks": [{"name": name, "prompts": prompts, **task} for name, task in tasks.items()],
        },
        model=RunConfig,
    )


def scored(config, *asked):
    """Scores of (task, response), all asked at once, and the names of the workers that were started."""

    async def main():
        cluster = LocalCluster(ClusterConfig())
        names, spawn = [], cluster.spawn
        cluster.spawn = lambda name, *args, **more: names.append(name) or spawn(name, *args, **more)
        try:
            async with start_graders(LaunchContext(cluster=cluster, config=config)) as graders:
                scores = await asyncio.gather(
                    *(
                        graders.router.score(
                            Prompt(id="p", task=task, messages=(), payload={}),
                            Transcript(
                                [Message("user", "1+1="), *([Message("assistant", response)] if response else [])]
                            ),
                        )
                        for task, response in asked
                    )
                )
                return scores, names
        finally:
            await cluster.close()

    return asyncio.run(main())


def test_tasks_share_the_workers_of_a_model(path):
    model = {"reward": "reward_model", "reward_options": {"path": path, "workers": 2}}
    parts = {
        "model": {"reward": "reward_model", "options": {"path": path, "workers": 2}},
        "long": {"reward": "length", "options": {"low": 4, "high": 8}},
    }
    config = configured({"a": model, "b": model, "c": {"reward": "composed", "reward_options": {"parts": parts}}})
    scores, names = scored(config, *[(task, response) for task in "abc" for response in ("2", "three")], ("a", ""))
    first, second = scores[0].value, scores[1].value
    same = pytest.approx([first, second], abs=1e-5)  # the last bits depend on what was read beside it
    assert abs(first - second) > 1e-4 and [score.value for score in scores[2:4]] == same
    assert [score.parts["model"] for score in scores[4:6]] == same
    assert scores[6].status is ScoreStatus.UNGRADED
    assert sorted(names) == ["reward-model-0-0", "reward-model-0-1"]


def test_conversation_that_is_too_long_is_ungraded(path):
    config = configured({"a": {"reward": "reward_model", "reward_options": {"path": path, "batch_tokens": 16}}})
    (long, short), _ = scored(config, ("a", "1" * 40), ("a", "1"))
    assert long.status is ScoreStatus.UNGRADED and "batch_tokens" in long.detail
    assert short.status is ScoreStatus.SCORED


def test_deterministic_runs_read_each_conversation_alone(path):
    config = configured({"a": {"reward": "reward_model", "reward_options": {"path": path}}}, deterministic=True)
    asked = [("a", "123"[: 1 + n % 3] * (1 + n)) for n in range(24)]
    scores, _ = scored(config, *asked)
    classifier, prompt, threads = Classifier(path, "cpu"), Message("user", "1+1="), torch.get_num_threads()
    torch.set_num_threads(1)  # as the worker has
    alone = [classifier.score([classifier.encode([prompt, Message("assistant", text)])]) for _, text in asked]
    torch.set_num_threads(threads)
    assert [[score.value] for score in scores] == alone


def test_conversation_beyond_the_positions_of_the_model_fails_alone(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, num_labels=1, **sizes)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = configured({"a": {"reward": "reward_model", "reward_options": {"path": str(tmp_path)}}})
    (first, long, second), names = scored(config, ("a", "1"), ("a", "1" * 40), ("a", "2"))
    assert long.status is ScoreStatus.UNGRADED and "cannot read" in long.detail
    assert first.status is second.status is ScoreStatus.SCORED
    assert names == ["reward-model-0-0"], "no worker died of it"


def test_models_that_are_no_reward_models_end_the_start(model, tmp_path):
    with raises_with(DataError, match="no/such/place"):
        scored(configured({"a": {"reward": "reward_model", "reward_options": {"path": "no/such/place"}}}))
    path = classifier_at(model, tmp_path, num_labels=3)
    with raises_with(DataError, match="3 labels"):
        scored(configured({"a": {"reward": "reward_model", "reward_options": {"path": path}}}))


def test_options_that_a_reward_model_does_not_take(path):
    with raises_with(ConfigError, match="speed"):
        scored(configured({"a": {"reward": "reward_model", "reward_options": {"path": path, "speed": 3}}}))
    with raises_with(ConfigError, value=path):
        build_reward("reward_model", {"path": path})


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"workers": "2"}, {"workers": 1.5}, {"batch_tokens": -1}])
def test_numbers_that_no_worker_can_have(wrong):
    (number,) = wrong.values()
    with raises_with(ConfigError, value=number):
        scored(configured({"a": {"reward": "reward_model", "reward_options": {"path": "x", **wrong}}}))


def test_models_are_found_in_parts_of_parts():
    inner = {"reward": "composed", "options": {"parts": {"x": {"reward": "reward_model", "options": {"path": "m"}}}}}
    found = iterate_classifiers("composed", {"parts": {"one": inner, "two": {"reward": "math"}}})
    assert [*found] == [ClassifierOptions("m")]
