"""Configuration of rollouts: scheduling, freshness, sampling, episodes. Importing it imports no torch."""

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from antiphon.core.config import Config, unit
from antiphon.core.errors import ValidatorError
from antiphon.core.types import OnUpdate, Sampling


class SamplingConfig(Config):
    """Sampling of tokens in rollouts."""

    max_tokens: Annotated[int, unit("tokens")] = Field(gt=0)
    """Maximum number of tokens of one completion."""
    temperature: Annotated[float, unit("factor")] = Field(1.0, ge=0.0)
    """0 is greedy."""
    top_p: Annotated[float, unit("probability")] = Field(1.0, gt=0.0, le=1.0)
    """Sample from the most probable tokens whose probabilities add up to this; 1 means no limit. Training needs `top_k`
    with it."""
    top_k: Annotated[int, unit("tokens")] = Field(0, ge=0)
    """Sample from this many most probable tokens; 0 means no limit. In training at most 1024: learner and engine then compute
    log-probs of the truncated distribution."""
    min_p: Annotated[float, unit("probability")] = Field(0.0, ge=0.0, lt=1.0)
    """Sample from tokens of at least this probability, relative to that of the most probable token; 0 means no limit.
    Training needs `top_k` with it."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they remain part of it."""

    def sampling(self, **changes: object) -> Sampling:
        """Return the sampling parameters that are recorded with every completion."""
        return Sampling(**{**self.model_dump(), **changes})


class Policy(StrEnum):
    """When groups are admitted. All policies but `QUEUE` are baselines to compare with."""

    QUEUE = "queue"
    """One queue without a barrier: a free slot is given to the next group."""
    BATCH = "batch"
    """Synchronous rounds: groups_per_step groups at once, and the next ones when all of them have ended. Groups that a
    filter rejected are replaced by further rounds of the same size, as far as extra_groups leave room for the surplus."""
    ONE_STEP_OFF = "one_step_off"
    """Rounds as in `BATCH`; one round runs while the previous one is trained on."""
    TAIL_BATCHING = "tail_batching"
    """Short rounds of more groups than needed, which end with the first groups to finish; the prompts of the others get a
    long round of their own, without extra groups. Source: RollPacker."""


class RolloutConfig(Config):
    """Production of samples: scheduling, freshness, episodes and sampling."""

    policy: Policy = Policy.QUEUE
    """When groups are admitted: `queue`, or a baseline to compare with: `batch`, `one_step_off`, `tail_batching`."""
    placement: Literal["spread", "pinned"] = "spread"
    """`spread`: each sibling goes to an engine with a free slot. `pinned`: a group goes to one engine with slots for all
    siblings, and keeps these slots until the last sibling is done, as one request for G completions does."""
    groups_per_step: Annotated[int, unit("groups")] = Field(gt=0)
    """B: groups per training step."""
    group_size: Annotated[int, unit("attempts")] = Field(8, gt=0)
    """G: siblings of a group, the attempts at one prompt."""
    async_ratio: Annotated[float, unit("steps")] = Field(1.0, ge=0.0)
    """alpha: 0 is synchronous. A trajectory is at most ceil(alpha) versions old when it is trained on."""
    extra_groups: Annotated[int, unit("groups")] = Field(0, ge=0)
    """Live groups in addition to (1 + alpha) B."""
    redundancy: Annotated[int, unit("attempts")] = Field(0, ge=0)
    """Siblings started in addition to the group size; the first to finish are used, the others are aborted."""
    order: Literal["fifo", "ready"] = "fifo"
    """Order in which steps take groups: as they were admitted (`fifo`), or as they complete (`ready`)."""
    on_expiry: Literal["abort", "wait"] = "abort"
    """What happens to a group that would become too old: `abort` drops it; `wait`, with `order: ready`, makes the step wait for
    the oldest groups, so that only surplus ones (`extra_groups`) are dropped."""
    on_update: OnUpdate = OnUpdate.KEEP
    """What happens to running requests when new weights arrive: `keep`, `recompute`, `restart` or `drain`."""
    filter: str | None = None
    """Filter of complete groups: `spread` drops groups whose scores are all equal; or package.module:function. A task can also
    have a `mean_range`."""
    sampler: str | None = None
    """Your own way to sample a group, package.module:function; see `antiphon/rollout/sampling_loop.py`."""
    max_attempts: Annotated[int, unit("attempts")] = Field(3, gt=0)
    """Attempts at one sibling before its group fails."""
    max_turns: Annotated[int, unit("completions")] = Field(1, gt=0)
    """Maximum number of completions in one episode."""
    deterministic: bool = False
    """Send requests to engines in sorted waves, and train between two waves, so that a run on CPUs repeats bit for bit.
    Generation and training do not overlap: for tests and for debugging."""
    timeout: Annotated[float, unit("seconds")] = Field(600.0, gt=0.0)
    """Time limit in seconds, each, of the wait of a step for its groups, of a request from its queue to its end, and of the
    start of the first engines; when it passes, the run ends. Others are `learner.timeout`, `weights.timeout` and
    `checkpoint.timeout`."""
    engine_timeout: Annotated[float, unit("seconds")] = Field(60.0, gt=0.0)
    """Seconds without a message after which an engine is killed and its requests continue on other engines. It must be
    longer than any step of an engine."""
    load_timeout: Annotated[float, unit("seconds")] = Field(300.0, gt=0.0)
    """Seconds that an engine may be silent while it loads weights, if that is longer than `engine_timeout`."""
    engine_restarts: Annotated[int, unit("restarts")] = Field(3, ge=0)
    """How many dead engines a run replaces. With `workers`, how many dead rollout workers, and how many engines of each."""
    workers: Annotated[int, unit("processes")] = Field(0, ge=0)
    """Rollout workers: processes that run episodes, environments and rewards, each with its share of the engines and on
    their node. The stages of a step then run on the learner's node. With 0 all this runs in the controller."""
    environment_timeout: Annotated[float, unit("seconds")] = Field(120.0, gt=0.0)
    """Seconds that an environment may take to reset or to step; after that the attempt has failed."""
    environment_concurrency: Annotated[int, unit("calls")] = Field(0, ge=0)
    """Number of environments that reset or step at once, in each process that runs episodes; the others wait, which does not
    count as `environment_timeout`. 0 means no limit."""
    episode_tokens: Annotated[int, unit("tokens")] = Field(0, ge=0)
    """Maximum number of tokens sampled in all turns of an episode; after that it ends, and is scored as it is. 0 means no
    limit."""
    episode_seconds: Annotated[float, unit("seconds")] = Field(0.0, ge=0.0)
    """Seconds after which an episode begins no further turn, and is scored as it is. 0 means no limit."""
    samples: Literal["trajectory", "turn", "joined"] = "trajectory"
    """Samples made of an episode with several turns. `trajectory`: one sample, to which observations and completions are
    appended. `turn`: one sample per turn; its prompt is the conversation, rendered anew by the chat template. `joined`: as
    `turn`, but turns whose prompt continues exactly where the last turn ended are one sample."""
    tool_format: str = "hermes"
    """Format in which the policy writes tool calls to agents: `hermes`, `qwen3_coder`, or package.module:attribute."""
    history: Annotated[int, unit("turns")] | None = Field(None, ge=0)
    """Number of earlier turns in a prompt, after the messages of the task; null means all. A number needs `samples: turn` or
    `joined`."""
    sampling: SamplingConfig
    """How tokens are sampled."""

    @model_validator(mode="after")
    def _possible(self) -> "RolloutConfig":
        if self.history is not None and self.samples == "trajectory":
            message = "needs samples: turn or joined; a sample of a whole trajectory contains all turns"
            raise ValidatorError([("history", message)])
        if self.sampler and self.redundancy:
            raise ValidatorError([("redundancy", "must be 0 with sampler, which starts the siblings itself")])
        ratio = {Policy.BATCH: 0.0, Policy.ONE_STEP_OFF: 1.0, Policy.TAIL_BATCHING: 0.0}.get(self.policy)
        if ratio is not None and self.async_ratio != ratio:
            raise ValidatorError(
                [("async_ratio", f"{self.async_ratio:g} must be {ratio:g} with policy: {self.policy}")]
            )
        if self.deterministic and (self.order != "fifo" or self.redundancy):
            message = "needs order: fifo and redundancy: 0, which do not depend on timing"
            raise ValidatorError([("deterministic", message)])
        if self.policy in (Policy.BATCH, Policy.ONE_STEP_OFF) and self.redundancy:
            raise ValidatorError(
                [("redundancy", f"must be 0 with policy: {self.policy}, which waits for all siblings")]
            )
        if self.policy is Policy.ONE_STEP_OFF and self.extra_groups:
            raise ValidatorError([("extra_groups", "must be 0 with policy: one_step_off")])
        if self.policy is Policy.TAIL_BATCHING and not (self.extra_groups and self.order == "ready"):
            raise ValidatorError([("policy", "'tail_batching' needs extra_groups above 0 and order: ready")])
        return self

    @property
    def in_rounds(self) -> bool:
        """True if groups are admitted in rounds, and none while any of a round is running."""
        return self.policy is not Policy.QUEUE

    @property
    def capacity(self) -> int:
        """Maximum number of live groups: ceil((1 + alpha) B) + extra groups."""
        return _ceil((1 + self.async_ratio) * self.groups_per_step) + self.extra_groups

    @property
    def max_age(self) -> int:
        """Maximum number of versions published between the start of a trajectory and its step: ceil(alpha)."""
        return _ceil(self.async_ratio)

    @property
    def max_oldest(self) -> int:
        """Maximum number of groups of one step with the greatest age: frac(alpha) B, rounded up; all for an integer alpha."""
        fraction = self.async_ratio - math.floor(self.async_ratio)
        return _ceil(fraction * self.groups_per_step) if fraction else self.groups_per_step


def _ceil(number: float) -> int:
    """Return the number rounded up, after removing the rounding error of products such as 1.1 * 10."""
    return math.ceil(number - 1e-9)
