"""The divergence from the reference, taken off rewards: by the stage, for every advantage function, once."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.algorithms.examples import example
from antiphon.algorithms.registry import ADVANTAGES
from antiphon.algorithms.trajectories import token_rewards, trajectories
from antiphon.algorithms.value_targets import value_targets
from antiphon.core.types import REFERENCE_LOGPROBS

from .stages_for_tests import taken_through

KL = {"coefficient": 0.3, "place": "reward", "estimator": "k1"}
SETTINGS = {"gamma": 0.9, "turn_gamma": 0.8, "gae_lambda": 0.5, "step_weight": 0.5, "kl": KL}

# What built-in advantages were when each of them took the divergence off by itself: of two groups of two trajectories of two
# tokens, a turn each.
BEFORE = {
    "dr_grpo": [1.824, 2.06, -1.806, -1.94, -0.261, -0.19, 0.159, 0.31],
    "gae": [2.9595, 2.81, 1.1295, -1.19, 1.5495, -0.19, 1.7445, 0.31],
    "gigpo": [1.08462, 1.12062, -1.06662, -1.00062, -1.09634, -1.00036, 0.99434, 1.12036],
    "grpo": [0.66037, 0.76708, -0.64237, -0.64708, -0.67222, -0.64691, 0.57022, 0.76691],
    "lite_ppo": [1.08169, 1.23522, -1.06369, -1.11522, -0.16821, -0.0869, 0.06621, 0.2069],
    "nothing": [0.024, 0.06, -0.006, 0.06, -0.036, 0.06, -0.066, 0.06],
    "reinforce": [4.524, 5.06, 0.894, 1.06, 1.764, 2.06, 2.184, 2.56],
    "reinforce_plus_plus": [1.41552, 1.79285, -1.13991, -1.02305, -0.52745, -0.31908, -0.23178, 0.03291],
    "reinforce_plus_plus_baseline": [1.32577, 1.49916, -1.3412, -1.43965, -0.20608, -0.15392, 0.10249, 0.21343],
    "rloo": [3.624, 4.06, -3.606, -3.94, -0.486, -0.44, 0.384, 0.56],
    "step_reinforce": [1.09451, 0.53102, -0.30574, -1.18179, 0.63448, -0.9998, 0.95054, -0.56723],
    "turn_reinforce": [4.424, 3.06, 1.194, -0.94, 1.964, 0.06, 2.334, 0.56],
}
TARGETS = [3.7124, 3.06, 1.5224, -0.94, 2.0324, 0.06, 2.2724, 0.56]
TOTALS = [0.03, 0, -0.03, -0.06]  # what each trajectory is paid: 0.3 · (0.2 - 0.1 · its number)


def groups_with_references():
    """Policy log-probs of 0; the reference's of the tokens of trajectory n are -0.1 n and 0.2."""
    numbers = iter(range(1, 5))
    return [
        [
            replace(
                sample,
                streams=sample.streams.with_stream(REFERENCE_LOGPROBS, np.float32([0, -0.1 * next(numbers), 0.2])),
            )
            for sample in group
        ]
        for group in example([5, 1], [2, 2.5], tokens=2, paid=[2], values=[0.5, 0.25], states=["a", "b"])
    ]


def on_tokens(step):
    return [value for sample in step.flat for value in sample.advantages[1:].tolist()]


@pytest.mark.parametrize("name", sorted(ADVANTAGES.known))
def test_built_in_advantages_are_what_they_were(name):
    step = taken_through(groups_with_references(), advantage=name, **SETTINGS)
    assert on_tokens(step) == pytest.approx(BEFORE[name], abs=2e-5)
    assert step.metrics["reward/kl"] == pytest.approx(0.025) and step.metrics["reward/kl_coefficient"] == 0.3


def test_critics_are_told_what_they_were():
    step = taken_through(groups_with_references(), advantage="gae", **SETTINGS)
    found = value_targets(step.samples, step.algorithm, 0.6)
    assert [value for group in found for array in group for value in array[1:]] == pytest.approx(TARGETS, abs=2e-5)


def test_the_example_of_the_guide_is_paid_the_divergence(tmp_path, monkeypatch):
    """Its advantage is the reward less 0.5."""
    page = (Path(__file__).parents[3] / "docs" / "guides" / "algorithm_parts.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def my_advantages" in block)
    (tmp_path / "a_module_of_the_guide.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    estimate = ADVANTAGES.resolve("a_module_of_the_guide:my_advantages")
    step = taken_through(groups_with_references(), estimate, **SETTINGS)
    rewards = [score + paid - 0.5 for score, paid in zip((5, 1, 2, 2.5), TOTALS, strict=True)]
    assert on_tokens(step) == pytest.approx([reward for reward in rewards for _ in range(2)], abs=1e-6)


def by_token(groups, config):
    return [[np.concatenate([[0.0], token_rewards(samples)]) for samples in trajectories(group)] for group in groups]


def test_rewards_of_tokens_have_the_divergence():
    """Turns are paid 2 and the rest; tokens 0.3 · (-0.1 n) and 0.3 · 0.2 beside it."""
    step = taken_through(groups_with_references(), by_token, **SETTINGS)
    wanted = [2 - 0.03, 3 + 0.06, 2 - 0.06, -1 + 0.06, 2 - 0.09, 0 + 0.06, 2 - 0.12, 0.5 + 0.06]
    assert on_tokens(step) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gae", "reinforce_plus_plus", "gigpo"])
def test_a_function_on_top_of_a_built_in_one_pays_once(name):
    own = ADVANTAGES.resolve(name)
    step = taken_through(groups_with_references(), lambda groups, config: own(groups, config), **SETTINGS)
    assert on_tokens(step) == pytest.approx(BEFORE[name], abs=2e-5)


def test_without_a_coefficient_rewards_are_scores():
    step = taken_through(groups_with_references(), advantage="reinforce", kl={"coefficient": 0.3, "place": "loss"})
    assert [sample.reward for sample in step.flat] == [5, 1, 2, 2.5] and "reward/kl" not in step.metrics


def test_with_equal_rewards_only_the_kl_gives_advantage():
    """What is taken off each sibling is no difference of their rewards, to the last bit."""
    groups = [
        [
            replace(one, streams=one.streams.with_stream(REFERENCE_LOGPROBS, np.float32([0, -0.1 * number])))
            for number, one in enumerate(group)
        ]
        for group in example([10_000.1] * 3)
    ]
    step = taken_through(groups, advantage="grpo", kl=KL)
    found = on_tokens(step)
    assert found[0] == 0 and found == pytest.approx([0, -0.03, -0.06])
