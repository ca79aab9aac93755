"""Divide devices between the learner and the engines of a run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.cluster.base import Node
from antiphon.cluster.config import PlacementConfig
from antiphon.core.errors import ConfigError
from antiphon.run.config import RunConfig
from antiphon.simulate.closed_form import ClosedForm, solve_learner_share
from antiphon.simulate.planner import make_scenario, predict
from antiphon.simulate.speeds import Speeds

STRIDE = 1.25  # ratio of the numbers of learner devices that are tried one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of devices between learner and engines; devices that both have, they use in turns."""

    devices: int
    learners: int  # devices
    engines: int  # devices
    seconds: float  # of a simulated step

    @property
    def shared(self) -> int:
        """Number of devices that learner and engines use in turns."""
        return self.learners + self.engines - self.devices

    def __str__(self) -> str:
        if not self.shared:
            return f"{self.engines} generate, {self.learners} train"
        if self.shared == self.devices:
            return "all generate and train in turns"
        return f"all generate, {self.learners} of them train in turns"


def iterate_splits(config: RunConfig, speeds: Speeds, devices: int, most: int = 0) -> Iterator[Split]:
    """Simulate divisions of devices.

    First all devices are used in turns, then divided and overlapping, from the share of the closed form to the number of
    learner devices where both more and fewer are slower.

    Args:
        config: The run.
        speeds: How fast its parts are.
        devices: Number of devices.
        most: Number of devices that can train; 0: all.
    """
    most, size = most or devices, config.engine.devices_per_engine
    if devices < size:
        raise ConfigError(
            f"{devices} are too few: one engine needs {size} (engine.options)", key="--devices", value=devices
        )

    def simulate_split(learners: int, engines: int) -> Split:
        lent = -(-(learners + engines - devices) // size)
        plan = predict(config, speeds, engines=engines // size, learners=learners, lent=lent)
        return Split(devices=devices, learners=learners, engines=engines, seconds=plan.step_seconds)

    if config.rollout.policy == "queue" and most == devices:
        yield simulate_split(devices, devices)
    found: dict[int, float] = {}
    best = min(balance_learners(config, speeds, devices), most) if config.rollout.async_ratio and devices > size else 0
    while best:
        for learners in (best, math.floor(best / STRIDE), math.ceil(best * STRIDE)):
            if learners not in found and 0 < learners <= min(devices - size, most):
                both = simulate_split(learners, devices - learners), simulate_split(learners, devices)
                found[learners] = min(each.seconds for each in both)
                yield from both
        before, best = best, min(found, key=lambda learners: found[learners])
        if best == before:
            return


def split_devices(config: RunConfig, speeds: Speeds, node: Node) -> tuple[RunConfig, Split]:
    """Place a run on all GPUs of a machine, or on its cores if it has none, in the fastest way that a simulation finds."""
    kind, numbers = ("gpu", range(len(node.gpus))) if node.gpus else ("cpu", node.cores)
    most = 1 if node.gpus else len(numbers)  # a learner has threads, but one GPU
    found = list(iterate_splits(config, speeds, len(numbers), most))
    if not found:
        message = f"rollout.policy = {config.rollout.policy} cannot be planned on one device"
        raise ConfigError(message, key="placement.auto")
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


def balance_learners(config: RunConfig, speeds: Speeds, devices: int) -> int:
    """Return how many devices should train by the closed form."""
    size = config.engine.devices_per_engine
    closed = ClosedForm.from_scenario(make_scenario(config, speeds, engines=devices // size, learners=1))
    longest = closed.longest / (1 + closed.ratio)
    share = solve_learner_share(closed.generation * size / devices, closed.training / devices, longest)
    return min(max(round(devices * share), 1), devices - size)
