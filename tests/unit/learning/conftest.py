"""Small models and random samples for the tests of the learner."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    FinishReason,
    PolicyVersion,
    Sample,
    Sampling,
    Score,
    Segment,
    Streams,
    TrajectoryMeta,
    Turn,
)
from antiphon.learning.config import LearnerConfig
from antiphon.learning.torch_learner import TorchLearner

VOCABULARY = 31
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "tied llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
}


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory):
    """A directory with random weights for each kind of model."""
    torch.set_num_threads(1)
    directories = {}
    for name, make in MODELS.items():
        torch.manual_seed(7)
        directories[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        make().save_pretrained(directories[name])
    return directories


def make_learner(directory, **config) -> TorchLearner:
    """A learner on the CPU unless `config` says otherwise: references are computed there, in double precision."""
    return TorchLearner(str(directory), LearnerConfig(**{"device": "cpu", **config}), seed=0)


def histories(rng: np.random.Generator, count: int) -> list[Sample]:
    """Segments of an agent that begin alike, here and there with the loss of one, or of two: of two tokens, at random."""
    found = []
    for number in range(count):
        sample = make_sample(rng, int(rng.integers(2, 14)), 200 + number)
        length = len(sample.segment.tokens)
        mask = np.arange(length) == length - 1
        for start in rng.integers(1, length, 2):  # some turns are another's to train, or nobody's
            mask[start : start + rng.integers(0, 4)] = True
        segment = replace(
            sample.segment,
            tokens=rng.integers(0, 2, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
            turns=(replace(sample.segment.turns[0], start=1),),
        )
        found.append(replace(sample, segment=segment, advantages=(mask * rng.normal(size=length)).astype(np.float32)))
    return found


def make_sample(
    rng: np.random.Generator, length: int, number: int | AttemptId, temperature: float = 1.0, score: float = 1.0
) -> Sample:
    """A segment of one turn, sampled after a prompt of at least one token."""
    start = int(rng.integers(1, length))
    mask = np.arange(length) >= start
    sampling = Sampling(max_tokens=length, temperature=temperature)
    return Sample(
        meta=TrajectoryMeta(
            id=number if isinstance(number, AttemptId) else AttemptId(number, 0, 0),
            prompt_id=str(number),
            task="test",
            started=PolicyVersion(0, 0),
            newest=PolicyVersion(0, 0),
            status=AttemptStatus.FINISHED,
            score=Score.of(score),
        ),
        segment=Segment(
            tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -rng.random(length) * 4, 0).astype(np.float32),
            versions=np.zeros(length, np.int32),
            turns=(Turn(start=start, stop=length, sampling=sampling, finish=FinishReason.STOP),),
        ),
        streams=Streams(),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        weights=np.ones(length, np.float32),
        reward=score,
    )
