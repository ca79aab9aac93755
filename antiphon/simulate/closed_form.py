"""The closed form of ROLL Flash (arXiv 2510.11345, propositions 1 and 2) for the seconds of a step.

It is an upper bound: the last responses of a step are taken to be the longest.
"""

import math
from dataclasses import dataclass
from statistics import fmean

from antiphon.simulate.scenario import ScenarioConfig
from antiphon.simulate.workloads import DistributionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """The terms of both propositions, in seconds on one device."""

    generation: float  # N mu_g: of all responses of a step
    longest: float  # L_g: of the longest response
    training: float  # E N mu_t: of training on them
    constant: float  # of a step, whatever its size and however many devices share it
    ratio: float  # alpha
    engines: int

    @staticmethod
    def from_scenario(scenario: ScenarioConfig) -> "ClosedForm":
        """Return the terms of a scenario when all slots of its engines are taken."""
        rollout, speed = scenario.rollout, scenario.engines.speed
        attempts = rollout.groups_per_step * (rollout.group_size + rollout.redundancy)
        live = rollout.capacity * (rollout.group_size + rollout.redundancy)
        running = min(speed.slots, math.ceil(live / scenario.engines.count))
        prompt, mean = mean_of(scenario.prompt_tokens), mean_of(scenario.response_tokens)
        iteration = speed.iteration + running * (speed.per_sequence + speed.per_token * (prompt + mean / 2))
        prefill_seconds = speed.prefill * prompt
        longest = scenario.response_tokens.quantile(1 - 1 / (attempts + 1))
        tokens = rollout.groups_per_step * (prompt + rollout.group_size * mean) * scenario.training.epochs
        return ClosedForm(
            generation=attempts * mean * iteration / running + rollout.groups_per_step * prefill_seconds,
            longest=longest * iteration + prefill_seconds + mean_of(scenario.reward_seconds),
            training=scenario.learner.per_token * tokens,
            constant=scenario.learner.step + (scenario.learner.publish + speed.load) / scenario.weights.every,
            ratio=rollout.async_ratio,
            engines=scenario.engines.count,
        )

    def step_seconds(self) -> float:
        """Return the seconds of a step: the slower of engines and learner, or their sum if they take turns."""
        rollout = self.generation / self.engines + self.longest / (1 + self.ratio)
        learner = self.training + self.constant
        return max(rollout, learner) if self.ratio else rollout + learner


def solve_learner_share(generation: float, training: float, longest: float) -> float:
    """Return the share beta of the devices that should train.

    It solves b / beta = a / (1 - beta) + c for generation a, training b and longest response c, all in seconds on all devices.
    The publication's own beta* = b / (a + b + c) divides c by 1 - beta too, which its first proposition does not.
    """
    a, b, c = generation, training, longest
    whole = a + b + c
    return 2 * b / (whole + math.sqrt(whole * whole - 4 * b * c))  # of the quadratic's roots the one below 1


def mean_of(distribution: DistributionConfig) -> float:
    """Return the mean within the bounds, which `distribution.mean` ignores."""
    return fmean(distribution.quantile((i + 0.5) / 200) for i in range(200))
