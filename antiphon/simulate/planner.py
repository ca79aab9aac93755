"""What a run will be like, before it is run: step time, who is idle, how stale, and how to divide devices.

A plan is the run's own configuration on simulated parts, as fast as `Speeds` says. A probe measures them on the machine;
`sizes.estimate` derives them from the model's size and what devices can do. Beside the simulation stands the closed
form of ROLL Flash (arXiv 2510.11345, propositions 1 and 2), an upper bound in which the last answers of a step are long ones.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from antiphon.cluster.base import Node
from antiphon.cluster.config import PlacementConfig
from antiphon.core.config import Config
from antiphon.core.errors import ConfigError
from antiphon.record.timeline import Timeline
from antiphon.run.config import RunConfig
from antiphon.simulate.components import EnvironmentConfig, LearnerSpeed
from antiphon.simulate.engine import EngineSpeed
from antiphon.simulate.scenario import EnginesConfig, ScenarioConfig, simulate
from antiphon.simulate.workloads import DistributionConfig

WARM_UP = 4  # steps that a prediction leaves out
ATTEMPTS = 12_000  # to simulate, about
STEPS = (12, 40)  # to simulate, at least and at most
STRIDE = 1.25  # from one number of learner devices to the next that is tried
FOREVER = 1e9  # seconds: a plan has no deadlines


class Speeds(Config):
    """How fast the parts of a run are, the learner on all its ranks, and what their work is like. Whatever the configuration
    says itself, it decides."""

    engine: EngineSpeed = EngineSpeed()
    learner: LearnerSpeed = LearnerSpeed()
    prompt_tokens: DistributionConfig = DistributionConfig(mean=100)
    response_tokens: DistributionConfig = DistributionConfig(mean=100)
    reward_seconds: DistributionConfig = DistributionConfig(mean=0)
    success: DistributionConfig = DistributionConfig(mean=0.5)
    environment: EnvironmentConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step, on average. Shares are of time."""

    step_seconds: float
    bound: float  # of the closed form
    learner_idle: float
    engines_idle: float
    ages: dict[int, float]  # versions between start and use -> share of trajectories
    tokens_per_second: float  # trained on
    stale: float  # groups a step that were too old

    def table(self) -> dict[str, float]:
        """For a person."""
        return {
            "seconds a step": self.step_seconds,
            "seconds a step, bound of the closed form": self.bound,
            "share of the learner's time without work": self.learner_idle,
            "share of the engines' time without work": self.engines_idle,
            "tokens a second, trained": self.tokens_per_second,
            "groups dropped a step: stale": self.stale,
            **{f"share of trajectories of age {age}": share for age, share in self.ages.items()},
        }


def predict(
    config: RunConfig, speeds: Speeds, *, engines: int = 0, learners: int = 0, lent: int = 0, attempts: int = ATTEMPTS
) -> Prediction:
    """Simulate a few steps of the run, with so many `attempts` about, on so many engines, `lent` of which sleep while there is
    training, and learner devices that share its tokens evenly; 0: as many as the configuration has."""
    scenario = make_scenario(config, speeds, engines=engines, learners=learners, lent=lent, attempts=attempts)
    events = io.StringIO()
    outcome = simulate(scenario, events)
    timeline = Timeline.read(events.getvalue().splitlines())
    steps = outcome.steps[WARM_UP:]
    seconds = timeline.step_seconds(WARM_UP)
    return Prediction(
        step_seconds=seconds,
        bound=ClosedForm.of(scenario).step_seconds(),
        learner_idle=timeline.learner_idle(WARM_UP),
        engines_idle=timeline.engines_idle(WARM_UP),
        ages={age: fmean(step[f"age/{age}"] for step in steps) for age in range(config.rollout.max_age + 1)},
        tokens_per_second=fmean(step["learner/tokens"] for step in steps) / seconds,
        stale=fmean(step["groups/stale"] for step in steps),
    )


def make_scenario(
    config: RunConfig, speeds: Speeds, *, engines: int = 0, learners: int = 0, lent: int = 0, attempts: int = ATTEMPTS
) -> ScenarioConfig:
    """The simulation of a run."""
    rollout = config.rollout
    steps = attempts // (rollout.groups_per_step * (rollout.group_size + rollout.redundancy))
    no_deadlines = dict.fromkeys(("timeout", "engine_timeout", "environment_timeout"), FOREVER)
    divided = speeds.learner.parallel
    ranks = config.learner.mesh.world
    per_token = speeds.learner.per_token * (1 - divided + divided * ranks / (learners or ranks))
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
    )


# --- the closed form ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """The terms of both propositions, in seconds on one device: all generation of a step, its longest answer, its training."""

    generation: float  # N mu_g
    longest: float  # L_g
    training: float  # E N mu_t
    constant: float  # of a step, whatever is in it and however many share it
    ratio: float  # alpha
    engines: int

    @staticmethod
    def of(scenario: ScenarioConfig) -> "ClosedForm":
        """Of a scenario's engines when all their slots are taken."""
        rollout, speed = scenario.rollout, scenario.engines.speed
        attempts = rollout.groups_per_step * (rollout.group_size + rollout.redundancy)
        alive = rollout.capacity * (rollout.group_size + rollout.redundancy)
        running = min(speed.slots, math.ceil(alive / scenario.engines.count))
        prompt, mean = _mean(scenario.prompt_tokens), _mean(scenario.response_tokens)
        iteration = speed.iteration + running * (speed.per_sequence + speed.per_token * (prompt + mean / 2))
        reading = speed.prefill * prompt
        longest = scenario.response_tokens.quantile(1 - 1 / (attempts + 1))
        tokens = rollout.groups_per_step * (prompt + rollout.group_size * mean) * scenario.training.epochs
        return ClosedForm(
            generation=attempts * mean * iteration / running + rollout.groups_per_step * reading,
            longest=longest * iteration + reading + _mean(scenario.reward_seconds),
            training=scenario.learner.per_token * tokens,
            constant=scenario.learner.step + scenario.learner.publish + speed.load,
            ratio=rollout.async_ratio,
            engines=scenario.engines.count,
        )

    def step_seconds(self) -> float:
        """Of engines and a learner with devices of their own: the slower of the two; or their sum, if they take turns."""
        rollout = self.generation / self.engines + self.longest / (1 + self.ratio)
        learner = self.training + self.constant
        return max(rollout, learner) if self.ratio else rollout + learner


def best_share(generation: float, training: float, longest: float) -> float:
    """The share beta of the devices that should train, so that b / beta = a / (1 - beta) + c for generation a, training b
    and longest answer c, all in seconds on all devices. The publication's own beta* = b / (a + b + c) divides c by 1 - beta
    too, which its first proposition does not; this is the balance point."""
    a, b, c = generation, training, longest
    whole = a + b + c
    return 2 * b / (whole + math.sqrt(whole * whole - 4 * b * c))  # of the quadratic's roots the one below 1


def _mean(distribution: DistributionConfig) -> float:
    """With the bounds, which `distribution.mean` does not know of."""
    return fmean(distribution.quantile((i + 0.5) / 200) for i in range(200))


# --- dividing devices --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """So many of the devices for the learner, and so many for engines: if these are more than there are, some have both, in
    turns."""

    devices: int
    learners: int
    engines: int  # devices of theirs
    seconds: float  # a step, simulated

    @property
    def shared(self) -> int:
        """Devices that learner and engines have in turns."""
        return self.learners + self.engines - self.devices

    def __str__(self) -> str:
        if not self.shared:
            return f"{self.engines} generate, {self.learners} train"
        if self.shared == self.devices:
            return "all generate and train in turns"
        return f"all generate, {self.learners} of them train in turns"


def iterate_splits(config: RunConfig, speeds: Speeds, devices: int, most: int = 0) -> Iterator[Split]:
    """Steps of the run on so many devices, `most` of which can train (0: all): co-located first, all in turns; then divided and
    overlapping, from the share of the closed form to where more and fewer learner devices are both slower."""
    most, each = most or devices, config.engine.devices_per_engine
    if devices < each:
        raise ConfigError(f"--devices {devices}: an engine alone has {each} (engine.options)")

    def split(learners: int, engines: int) -> Split:
        lent = -(-(learners + engines - devices) // each)
        plan = predict(config, speeds, engines=engines // each, learners=learners, lent=lent)
        return Split(devices=devices, learners=learners, engines=engines, seconds=plan.step_seconds)

    if config.rollout.policy == "queue" and most == devices:
        yield split(devices, devices)
    found: dict[int, float] = {}
    best = min(balance_learners(config, speeds, devices), most) if config.rollout.async_ratio and devices > each else 0
    while best:
        for learners in (best, math.floor(best / STRIDE), math.ceil(best * STRIDE)):
            if learners not in found and 0 < learners <= min(devices - each, most):
                both = split(learners, devices - learners), split(learners, devices)
                found[learners] = min(each.seconds for each in both)
                yield from both
        before, best = best, min(found, key=lambda learners: found[learners])
        if best == before:
            return


def split_devices(config: RunConfig, speeds: Speeds, node: Node) -> tuple[RunConfig, Split]:
    """The run on all GPUs of a machine, or on its cores if it has none, divided in the way that is fastest."""
    kind, numbers = ("gpu", range(len(node.gpus))) if node.gpus else ("cpu", node.cores)
    most = 1 if node.gpus else len(numbers)  # a learner has threads, but one GPU
    found = list(iterate_splits(config, speeds, len(numbers), most))
    if not found:
        raise ConfigError(f"placement.auto: nothing is known of rollout.policy = {config.rollout.policy} on one device")
    best = min(found, key=lambda split: split.seconds)
    names = [f"{kind}:{number}-{number}" for number in numbers]
    placement = PlacementConfig(
        learner=", ".join(names[: best.learners]), engine=", ".join(names[best.devices - best.engines :])
    )
    threads = best.learners if kind == "cpu" else config.learner.threads
    changes = {
        "placement": placement,
        "engine": config.engine.model_copy(update={"replicas": best.engines // config.engine.devices_per_engine}),
        "learner": config.learner.model_copy(update={"threads": threads}),
    }
    return config.model_copy(update=changes), best


def parallel_share(alone: LearnerSpeed, together: LearnerSpeed, devices: int) -> float:
    """The share of a token's seconds that is divided among devices, from what one takes and what so many take."""
    return min((1 - together.per_token / alone.per_token) / (1 - 1 / devices), 1.0) if alone.per_token else 1.0


def balance_learners(config: RunConfig, speeds: Speeds, devices: int) -> int:
    """How many devices should train, by the closed form."""
    each = config.engine.devices_per_engine
    closed = ClosedForm.of(make_scenario(config, speeds, engines=devices // each, learners=1))
    longest = closed.longest / (1 + closed.ratio)
    share = best_share(closed.generation * each / devices, closed.training / devices, longest)
    return min(max(round(devices * share), 1), devices - each)


def trace(values: Sequence[float], points: int = 100, shared: float = 0.0) -> DistributionConfig:
    """What was measured, as that many quantiles."""
    ordered = sorted(values)
    kept = (
        [ordered[int((i + 0.5) / points * len(ordered))] for i in range(points)] if len(ordered) > points else ordered
    )
    return DistributionConfig(
        kind="trace", mean=0, values=tuple(round(float(value), 6) for value in kept), shared=shared
    )
