"""Predict a run before it starts: step time, idle time and staleness.

A plan simulates the run's own configuration with parts as fast as `Speeds` says: measured by a probe on the machine, or
estimated by `sizes.estimate` from the model's size and what devices can do.
"""

import io
from dataclasses import dataclass
from statistics import fmean

from antiphon.record.timeline import Timeline
from antiphon.run.config import RunConfig
from antiphon.simulate.closed_form import ClosedForm
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import EnginesConfig, ScenarioConfig
from antiphon.simulate.speeds import Speeds

WARM_UP = 4  # steps that a prediction leaves out
ATTEMPTS = 12_000  # to simulate, about
STEPS = (12, 40)  # to simulate, at least and at most
FOREVER = 1e9  # seconds: a plan has no deadlines


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Averages over steps. Shares are of time."""

    step_seconds: float
    bound: float  # upper bound of the closed form, seconds
    learner_idle: float
    engines_idle: float
    ages: dict[int, float]  # versions between start and use -> share of trajectories
    tokens_per_second: float  # trained on
    stale: float  # groups a step that were too old

    def table(self) -> dict[str, float]:
        """Return the measures that `antiphon plan` prints."""
        return {
            "seconds a step": self.step_seconds,
            "seconds a step, bound of the closed form": self.bound,
            "share of time the learner is idle": self.learner_idle,
            "share of time the engines are idle": self.engines_idle,
            "tokens a second, trained": self.tokens_per_second,
            "groups dropped a step: stale": self.stale,
            **{f"share of trajectories of age {age}": share for age, share in self.ages.items()},
        }


def predict(
    config: RunConfig, speeds: Speeds, *, engines: int = 0, learners: int = 0, lent: int = 0, attempts: int = ATTEMPTS
) -> Prediction:
    """Simulate a few steps of a run.

    Args:
        config: The run.
        speeds: How fast its parts are.
        engines: Number of engines; 0: as many as the configuration has.
        learners: Number of learner devices, which divide the tokens evenly; 0: as many as the configuration has.
        lent: Number of engines that sleep while the learner trains.
        attempts: Number of attempts to simulate, about.
    """
    scenario = make_scenario(config, speeds, engines=engines, learners=learners, lent=lent, attempts=attempts)
    events = io.StringIO()
    outcome = simulate(scenario, events)
    timeline = Timeline.read(events.getvalue().splitlines())
    steps = outcome.steps[WARM_UP:]
    seconds = timeline.step_seconds(WARM_UP)
    return Prediction(
        step_seconds=seconds,
        bound=ClosedForm.from_scenario(scenario).step_seconds(),
        learner_idle=timeline.learner_idle(WARM_UP),
        engines_idle=timeline.engines_idle(WARM_UP),
        ages={age: fmean(step[f"age/{age}"] for step in steps) for age in range(config.rollout.max_age + 1)},
        tokens_per_second=fmean(step["learner/tokens"] for step in steps) / seconds,
        stale=fmean(step["groups/stale"] for step in steps),
    )


def make_scenario(
    config: RunConfig, speeds: Speeds, *, engines: int = 0, learners: int = 0, lent: int = 0, attempts: int = ATTEMPTS
) -> ScenarioConfig:
    """Return the scenario that simulates a run; arguments as in `predict`."""
    rollout = config.rollout
    steps = attempts // (rollout.groups_per_step * (rollout.group_size + rollout.redundancy))
    no_deadlines = dict.fromkeys(("timeout", "engine_timeout", "environment_timeout"), FOREVER)
    parallel = speeds.learner.parallel
    ranks = config.learner.mesh.world
    per_token = speeds.learner.per_token * (1 - parallel + parallel * ranks / (learners or ranks))
    learner = speeds.learner.model_copy(update={"per_token": per_token})
    return ScenarioConfig(
        name=config.name,
        seed=config.seed,
        steps=WARM_UP + min(max(steps, STEPS[0]), STEPS[1]),
        rollout=rollout.model_copy(update=no_deadlines),
        algorithm=config.algorithm,
        training=config.learner.model_copy(update={"timeout": FOREVER}),
        engines=EnginesConfig(
            count=engines or config.engine.replicas,
            lent=lent,
            speed=speeds.engine.model_copy(update={"slots": config.engine.slots}),
        ),
        learner=learner,
        prompt_tokens=speeds.prompt_tokens,
        response_tokens=speeds.response_tokens,
        reward_seconds=speeds.reward_seconds,
        success=speeds.success,
        environment=speeds.environment,
        weights=config.weights,
    )
