"""What a run takes over from the declarations of a user's advantage and loss."""

import numpy as np
import pytest

from antiphon.algorithms.declarations import advantage, loss
from antiphon.core.errors import ConfigError
from antiphon.core.types import REFERENCE_LOGPROBS, VALUES
from antiphon.run.config import RunConfig
from antiphon.run.user_algorithm import add_declared_needs


@advantage(needs=[VALUES], grouped=True)
def own_advantage(groups, config):
    return [[np.zeros(len(sample.segment.tokens)) for sample in group] for group in groups]


@loss(needs=[REFERENCE_LOGPROBS], zero_at_zero_advantage=True)
def own_loss(inputs, config):
    return -inputs.advantages * inputs.logprobs, {}


HERE = __name__
OWN = {"advantage": f"{HERE}:own_advantage", "loss": f"{HERE}:own_loss"}


def make_config(**sections):
    task = {"name": "sums", "prompts": {"source": "task:problems"}, "reward": "exact_match"}
    rollout = {"groups_per_step": 4, "sampling": {"max_tokens": 16}}
    base = {"name": "own", "steps": 2, "model": {"path": "model"}, "tasks": [task], "rollout": rollout}
    return RunConfig.model_validate(base | sections)


def test_declared_needs_become_streams_of_the_run():
    """Reading the configuration imports nothing, so it does not know of them yet."""
    config = make_config(algorithm=OWN, learner={"minibatches": 2})
    assert not config.counts["reference"] and not config.algorithm.streams
    with pytest.raises(ConfigError) as refused:
        add_declared_needs(config)
    assert "critic" in str(refused.value)
    declared = add_declared_needs(config.model_copy(update={"critic": make_critic()}))
    assert set(declared.algorithm.streams) == {"values", "reference_logprobs"}
    assert declared.counts["reference"] == 1


def make_critic():
    return make_config(algorithm="ppo", critic={"count": 1}).critic


def test_a_grouped_advantage_needs_siblings():
    config = make_config(
        algorithm={"advantage": f"{HERE}:own_advantage", "streams": ["values"]},
        critic={"count": 1},
        rollout={"groups_per_step": 4, "group_size": 1, "sampling": {"max_tokens": 16}},
    )
    with pytest.raises(ConfigError) as refused:
        add_declared_needs(config)
    assert "rollout.group_size" in str(refused.value)


def test_built_in_functions_change_nothing():
    config = make_config(algorithm="grpo")
    assert add_declared_needs(config) is config
