"""What a step says of itself: of all its tokens, and of the updates that it made."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.types import MIXED_CACHE, TrainBatch
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.stages import update_actor
from antiphon.learning.step import by_key

from .conftest import make_learner
from .test_learner import examples
from .test_stages import step_of

STILL = OptimizerConfig(learning_rate=1e-12)  # updates leave the model as it is


def measured(directory, samples):
    """Entropy and k3 of the mismatch of each sampled token of these samples, by transformers, [N, 2]."""
    model, rows = AutoModelForCausalLM.from_pretrained(directory), []
    for sample in samples:
        segment = sample.segment
        with torch.no_grad():
            logprobs = model(torch.from_numpy(segment.tokens).long()[None]).logits[0].log_softmax(-1).double().numpy()
        for place in np.flatnonzero(segment.loss_mask):
            said = logprobs[place - 1]
            apart = said[segment.tokens[place]] - segment.logprobs[place]
            rows.append((-(np.exp(said) * said).sum(), np.exp(apart) - 1 - apart))
    return np.array(rows)


def stepped(directory, without, minibatches=1):
    """A step after which the samples of the groups `without` had no advantage."""
    step = step_of(directory, AlgorithmConfig(), groups=4, minibatches=minibatches, tokens_per_pack=30)
    step.samples = [
        [replace(sample, advantages=sample.advantages * (number not in without)) for sample in group]
        for number, group in enumerate(step.samples)
    ]
    step.pipeline.learner.learner.begin(AlgorithmConfig(), STILL, 9)
    asyncio.run(update_actor(step))
    return step


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("without", [(), (1,), (0, 2, 3), (0, 1, 2, 3)])
def test_mismatch_and_entropy_are_of_all_tokens(model_directories, without, minibatches):
    step = stepped(model_directories["llama"], without, minibatches)
    entropy, mismatch = measured(model_directories["llama"], step.flat).mean(0)
    assert step.metrics["learner/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert step.metrics["learner/mismatch_kl"] == pytest.approx(mismatch, rel=1e-4)
    trained = [pack for update in step.batches[0].updates for pack in update.packs[0]]
    assert sum(len(pack.ends) for pack in trained) == 2 * (4 - len(without)), "no gradient is computed of the others"


def test_seconds_are_those_of_the_step(model_directories):
    began = time.perf_counter()
    step = stepped(model_directories["llama"], ())
    assert 0 < step.metrics["learner/seconds"] <= time.perf_counter() - began


def test_updates_with_nothing_to_train_do_not_dilute_means(model_directories):
    """One of them leaves only what it measured; so does a step of nothing else."""
    whole, part = stepped(model_directories["llama"], ()), stepped(model_directories["llama"], (0, 1), minibatches=4)
    own = [
        stepped_alone(model_directories["llama"], replace(part.batches[0], updates=(update,)))
        for update in part.batches[0].updates
    ]
    assert ["loss" in metrics for metrics in own] == ["grad_norm" in metrics for metrics in own]
    assert ["loss" in metrics for metrics in own] == [False, False, True, True]
    for name in ("loss", "grad_norm"):
        assert part.metrics[f"learner/{name}"] == pytest.approx((own[2][name] + own[3][name]) / 2)
        assert f"learner/{name}" in whole.metrics
    nothing = stepped(model_directories["llama"], (0, 1, 2, 3))
    assert not {"learner/loss", "learner/grad_norm"} & nothing.metrics.keys()
    assert nothing.metrics["learner/entropy"] == pytest.approx(whole.metrics["learner/entropy"])


def stepped_alone(directory, batch):
    learner = make_learner(directory)
    learner.begin(AlgorithmConfig(), STILL, 9)
    return learner.step(batch)


def test_mixed_mismatch_is_of_the_mixed_tokens(model_directories):
    """Also where whole updates have none."""
    step = step_of(model_directories["llama"], AlgorithmConfig(), groups=3, minibatches=3)
    mixed = {key: (key.group, key.position) == (1, 0) for key in by_key(step.samples)}
    step.add_stream(MIXED_CACHE, {key: np.full(9, flag) for key, flag in mixed.items()})
    step.pipeline.learner.learner.begin(AlgorithmConfig(), STILL, 9)
    asyncio.run(update_actor(step))
    of_mixed = step.samples[1][0]
    found, everything = (
        measured(model_directories["llama"], [of_mixed]),
        measured(model_directories["llama"], step.flat),
    )
    assert step.metrics["learner/mixed_mismatch_kl"] == pytest.approx(found[:, 1].mean(), rel=1e-4)
    assert step.metrics["learner/mixed_share"] == pytest.approx(len(found) / len(everything))


def test_the_learning_rate_is_that_of_the_last_update_made(model_directories):
    """Two updates rise to 0.1, then it falls to nothing at the sixth."""
    learner = make_learner(model_directories["llama"])
    schedule = OptimizerConfig(learning_rate=0.1, warmup_steps=2, schedule="linear", final_ratio=0.0)
    learner.begin(AlgorithmConfig(loss="sft"), schedule, 6)
    (update,) = supervised_batch(examples(), 100).updates
    steps = [TrainBatch(updates=(update,) * count) for count in (1, 1, 1, 2, 1)]
    assert [learner.step(batch)["lr"] for batch in steps] == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.025])
