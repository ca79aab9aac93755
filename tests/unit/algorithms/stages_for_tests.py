"""The stages that make rewards and advantages, without a model."""

import asyncio

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import declaration_of
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.learning.config import LearnerConfig
from antiphon.learning.stages import advantages, rewards
from antiphon.learning.step import Step, StepPipeline


def taken_through(groups, estimate=None, **algorithm):
    """The step of these groups of samples, after `rewards` and `advantages`; `estimate` is a function of your own."""
    config = AlgorithmConfig(**algorithm)
    training = StepPipeline(
        learner=None,
        algorithm=config,
        config=LearnerConfig(),
        critic_ranks=1,
        estimate_advantages=estimate or ADVANTAGES.resolve(config.advantage),
        loss=declaration_of(LOSSES.resolve(config.loss)),
        stages=[],
        max_tokens=9,
    )
    step = Step(number=1, version=0, samples=[list(group) for group in groups], pipeline=training)
    for stage in (rewards, advantages):
        asyncio.run(stage(step))
    return step
