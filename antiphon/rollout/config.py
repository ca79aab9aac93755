"""Configuration of producing samples. Importing it imports no torch."""

import math
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.core.types import OnUpdate, Sampling


class SamplingConfig(Config):
    """Sampling of tokens in rollouts."""

    max_tokens: int = Field(gt=0)
    """Most tokens of one completion."""
    temperature: float = Field(1.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 means no limit."""
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    stop: tuple[str, ...] = ()
    """Strings that end a completion; kept in it."""

    def sampling(self, **changes: object) -> Sampling:
        """The record that travels with every completion."""
        return Sampling(**{**self.model_dump(), **changes})


class Policy(StrEnum):
    """When groups are let in. All but the first are the baselines it is measured against."""

    QUEUE = "queue"
    """One queue without a barrier: a slot that is free is given to the next group."""
    BATCH = "batch"
    """Synchronous rounds: groups_per_step groups at once, the next ones when all of them have ended. What a filter has
    rejected is made up for by rounds that are as large, as far as extra_groups leave room for the surplus."""
    ONE_STEP_OFF = "one_step_off"
    """Rounds as above, one of them running while the one before is trained on."""
    TAIL_BATCHING = "tail_batching"
    """Short rounds of more groups than needed, of which the first to finish win; the prompts of the others wait for a long
    round of their own, without extras. Source: RollPacker."""


class RolloutConfig(Config):
    """Scheduling and freshness."""

    policy: Policy = Policy.QUEUE
    """`queue`; or a baseline to compare with: `batch`, `one_step_off`, `tail_batching`."""
    placement: Literal["spread", "pinned"] = "spread"
    """Siblings go where there is room, each by itself; or a group goes whole to an engine that has room for all of it, and
    holds that room until the last sibling is done, as a request for G answers does."""
    groups_per_step: int = Field(gt=0)
    """B: groups that one training step consumes."""
    group_size: int = Field(8, gt=0)
    """G: siblings that answer one prompt."""
    async_ratio: float = Field(1.0, ge=0.0)
    """alpha: 0 is synchronous; a trajectory is at most ceil(alpha) versions old when it is trained on."""
    extra_groups: int = Field(0, ge=0)
    """Live groups beyond (1 + alpha) B."""
    redundancy: int = Field(0, ge=0)
    """Siblings started beyond the group size; the first to finish win."""
    order: Literal["fifo", "ready"] = "fifo"
    """Groups are consumed as admitted, or as they become ready."""
    on_expiry: Literal["abort", "wait"] = "abort"
    """A group that would become too old is dropped, or the step waits for it."""
    on_update: OnUpdate = OnUpdate.KEEP
    """Treatment of requests in flight when new weights arrive."""
    filter: str | None = None
    """Filter of complete groups: `spread` drops groups whose scores are all equal; or package.module:function."""
    sampler: str | None = None
    """Your own way to sample a group, package.module:function; see `rollout.sampling_loop`."""
    max_attempts: int = Field(3, gt=0)
    """Tries at one sibling before its group fails."""
    max_turns: int = Field(1, gt=0)
    """Completions in one episode."""
    deterministic: bool = False
    """Requests go to engines in sealed waves, sorted, and the learner works between two waves, so that a run on CPUs repeats
    bit for bit. Nothing overlaps: for tests and for debugging."""
    timeout: float = Field(600.0, gt=0.0)
    """Seconds that a step may wait for its groups, a request for an engine and its end, and a run for engines to start; then
    it ends. All else has deadlines of its own: `learner.timeout`, `weights.timeout`, `checkpoint.timeout`."""
    engine_timeout: float = Field(60.0, gt=0.0)
    """Seconds an engine may be silent; then it is killed, and its requests go on elsewhere. Longer than any engine step."""
    load_timeout: float = Field(300.0, gt=0.0)
    """Seconds an engine may be silent while it loads weights, if that is more than `engine_timeout`."""
    engine_restarts: int = Field(3, ge=0)
    """Dead engines that are replaced in one run; of dead rollout workers as many, and as many engines in the life of each."""
    workers: int = Field(0, ge=0)
    """Processes that run episodes, environments and rewards, each with its share of the engines, on the node where these are;
    stages of a step then run on the learner's node. 0 runs all that beside the loop, and engines wherever they are placed."""
    environment_timeout: float = Field(120.0, gt=0.0)
    """Seconds an environment may take to reset or to step; then the attempt has failed."""
    episode_tokens: int = Field(0, ge=0)
    """Tokens that one episode may sample in all its turns; then it is over, and judged as it is. 0 means no limit."""
    episode_seconds: float = Field(0.0, ge=0.0)
    """Seconds after which no further turn of an episode begins; it is then judged as it is. 0 means no limit."""
    samples: Literal["trajectory", "turn", "joined"] = "trajectory"
    """Samples made of an episode of several turns. `trajectory`: one sample; what is said is appended to its tokens. `turn`: a
    sample a turn, whose prompt is the conversation as the chat template renders it anew. `joined`: as `turn`, but turns whose
    prompt goes on exactly where the last ended are one sample."""
    tool_format: str = "hermes"
    """Format in which the policy writes tool calls to agents: `hermes`, `qwen3_coder`, or package.module:attribute."""
    history: int | None = Field(None, ge=0)
    """Turns before the present one that a prompt shows, after the messages of the task; null means all. Fewer than all are
    for samples: turn, or joined."""
    sampling: SamplingConfig

    @model_validator(mode="after")
    def _possible(self) -> "RolloutConfig":
        if self.history is not None and self.samples == "trajectory":
            raise ValueError("history shows less than was said before: samples must be turn or joined, not trajectory")
        if self.sampler and self.redundancy:
            raise ValueError("a sampler of your own starts the siblings itself: redundancy must be 0")
        ratio = {Policy.BATCH: 0.0, Policy.ONE_STEP_OFF: 1.0, Policy.TAIL_BATCHING: 0.0}.get(self.policy)
        if ratio is not None and self.async_ratio != ratio:
            raise ValueError(f"policy {self.policy} has async_ratio {ratio:g}, not {self.async_ratio:g}")
        if self.deterministic and (self.order != "fifo" or self.redundancy):
            raise ValueError(
                "deterministic needs order: fifo and redundancy: 0: who finishes first is up to the machine"
            )
        if self.policy in (Policy.BATCH, Policy.ONE_STEP_OFF) and self.redundancy:
            raise ValueError(f"policy {self.policy} waits for all: redundancy must be 0")
        if self.policy is Policy.ONE_STEP_OFF and self.extra_groups:
            raise ValueError("policy one_step_off has no use for extra_groups")
        if self.policy is Policy.TAIL_BATCHING and not (self.extra_groups and self.order == "ready"):
            raise ValueError("policy tail_batching takes the first to finish: it needs extra_groups and order: ready")
        return self

    @property
    def in_rounds(self) -> bool:
        """Groups are let in all at once, and not while any is running."""
        return self.policy is not Policy.QUEUE

    @property
    def capacity(self) -> int:
        """Groups that may be alive at once: ceil((1 + alpha) B) + extra groups."""
        return _ceil((1 + self.async_ratio) * self.groups_per_step) + self.extra_groups

    @property
    def max_age(self) -> int:
        """Versions that may be published between the start of a trajectory and the step that uses it: ceil(alpha)."""
        return _ceil(self.async_ratio)

    @property
    def max_oldest(self) -> int:
        """Groups of one step that may have the greatest age: frac(alpha) B, rounded up, or all where alpha is whole."""
        fraction = self.async_ratio - math.floor(self.async_ratio)
        return _ceil(fraction * self.groups_per_step) if fraction else self.groups_per_step


def _ceil(number: float) -> int:
    """The next whole number, forgiving the rounding of products such as 1.1 * 10."""
    return math.ceil(number - 1e-9)
