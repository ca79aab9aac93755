"""The stages of a step on a real learner."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.algorithms.advantages import grpo
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.stages import Step, annotate, update_actor
from antiphon.learning.torch_learner import _turns
from antiphon.types import PROXIMAL_LOGPROBS

from .conftest import make_learner, make_sample


class Here:
    """A learner in this very process."""

    def __init__(self, learner):
        self.learner = learner

    async def score(self, packs):
        return self.learner.score(list(packs))

    async def attend(self, packs):
        return self.learner.attend(list(packs))

    async def step(self, batch):
        return self.learner.step(batch)


def step_of(directory, algorithm, **config):
    rng = np.random.default_rng(3)
    learner, config = make_learner(directory, **config), LearnerConfig(**config)
    learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), 4)
    return Step(
        groups=(),
        samples=[[make_sample(rng, 9, 2 * group + n) for n in range(2)] for group in range(4)],
        learner=Here(learner),
        reference=None,
        estimate=grpo,
        algorithm=algorithm,
        config=config,
        max_tokens=9,
    )


@pytest.mark.parametrize("minibatches, epochs, computed", [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_the_proximal_policy_is_that_of_before_the_first_update(model_directories, minibatches, epochs, computed):
    """... and where there is one update only it is not computed."""
    algorithm = AlgorithmConfig.model_validate("decoupled_ppo")
    step = step_of(model_directories["llama"], algorithm, minibatches=minibatches, epochs=epochs)
    asyncio.run(annotate(step))
    samples = [sample for group in step.samples for sample in group]
    assert [PROXIMAL_LOGPROBS in sample.streams for sample in samples] == [computed] * 8
    before = AutoModelForCausalLM.from_pretrained(model_directories["llama"])
    for sample in samples if computed else []:
        tokens = torch.from_numpy(sample.segment.tokens)[None].long()
        logits = before(tokens).logits[0].log_softmax(-1)
        wanted = logits[:-1].gather(1, tokens[0, 1:, None])[:, 0].detach().numpy()
        mask = sample.segment.loss_mask[1:]
        np.testing.assert_allclose(sample.streams[PROXIMAL_LOGPROBS][1:][mask], wanted[mask], atol=1e-5)
    asyncio.run(update_actor(step))
    assert step.metrics["learner/correction_weight"] > 0
    assert len(step.batches[0].updates) == minibatches * epochs


@pytest.mark.parametrize("loss, computed", [("ppo_clip", False), ("kimi", True)])
def test_what_has_no_advantage_is_left_out_only_where_it_makes_no_gradient(model_directories, loss, computed):
    step = step_of(model_directories["llama"], AlgorithmConfig(loss=loss))
    step.samples = [[replace(sample, advantages=0 * sample.advantages) for sample in group] for group in step.samples]
    asyncio.run(update_actor(step))
    (packs,) = step.batches[0].updates[0].packs
    assert bool(packs) == computed


def test_turns_are_stretches_of_places():
    places, sequence = torch.tensor([3, 4, 7, 8, 9, 20]), torch.tensor([0, 0, 0, 0, 1, 1])
    assert _turns(places, sequence).tolist() == [0, 0, 1, 1, 2, 3]
    assert _turns(places[:0], sequence[:0]).tolist() == []
