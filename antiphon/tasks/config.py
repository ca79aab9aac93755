"""Configuration of what to solve. Importing it imports no torch."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from antiphon.core.config import Config
from antiphon.core.errors import Problems
from antiphon.sandbox.base import Level


class PromptsConfig(Config):
    """Where prompts come from."""

    source: str
    """`jsonl`, `parquet`, `huggingface`, `reasoning_gym`, `mini_swe`, or package.module:function that yields prompts."""
    path: str = ""
    """File, Hugging Face id, or reasoning-gym dataset name."""
    split: str = "train"
    prompt_column: str = "prompt"
    """Column with the question: a string, or a list of chat messages."""
    limit: int = Field(0, ge=0)
    """Use only the first so many prompts; 0 uses all."""
    shuffle: bool = True
    """Reshuffle each epoch with the run's seed."""
    options: dict[str, Any] = {}
    """Passed to the source."""


class PairsConfig(PromptsConfig):
    """Prompts, each with two responses."""

    chosen_column: str = "chosen"
    """Column with the better one: a string, or a list of chat messages that ends with it."""
    rejected_column: str = "rejected"

    @property
    def responses(self) -> dict[str, str]:
        """Each key that names a column with a response, and the name."""
        return {"chosen_column": self.chosen_column, "rejected_column": self.rejected_column}


class ResponsesConfig(PromptsConfig):
    """Prompts, each with a response."""

    response_column: str = "response"
    """A string, or a list of chat messages that ends with it."""

    @property
    def responses(self) -> dict[str, str]:
        """Each key that names a column with a response, and the name."""
        return {"response_column": self.response_column}


class GradingConfig(Config):
    """What runs rewards: worker processes, or for a reward that is `async def` the controller itself."""

    workers: int = Field(1, gt=0)
    """Processes that are always there."""
    max_workers: int = Field(0, ge=0)
    """Processes when gradings queue for longer than a second, one more each second; 0 means never more than `workers`."""
    idle_seconds: float = Field(30.0, gt=0.0)
    """A process beyond `workers` ends when it has had nothing to do for so long."""
    concurrency: int = Field(64, gt=0)
    """Gradings under way at once of a reward that is `async def`."""
    deadline: float = Field(10.0, gt=0.0)
    """Seconds after which one grading is killed and the trajectory is left ungraded."""
    confine: Literal["built_in", "all", "none"] = "built_in"
    """Whose processes open no file but Python's and have no network: those of built-in rewards that only read text (`math`,
    `sql`, `regex` …); those of your own rewards too, which then see what lies on Python's path; or none."""
    minimum_level: Level = Level.LIMITS
    """Sandbox level that confined processes must have. Where this machine gives more, they have more."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_workers and self.max_workers < self.workers:
            raise ValueError(f"max_workers is {self.max_workers}, less than the {self.workers} that are always there")
        return self


class EnvironmentPoolConfig(Config):
    """Processes for environments whose methods block. Those with `async` methods, and those that say `inline = True` of
    themselves because they only compute for a moment, run in the controller."""

    workers: int = Field(1, gt=0)
    """Processes that are always there."""
    max_workers: int = Field(0, ge=0)
    """Processes when all others are full; 0 means never more than `workers`."""
    environments: int = Field(32, gt=0)
    """In one process before another is started, as far as there may be one; then they share those that there are."""
    idle_seconds: float = Field(30.0, gt=0.0)
    """A process beyond `workers` ends when it has held no environment for so long."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_workers and self.max_workers < self.workers:
            raise ValueError(f"max_workers is {self.max_workers}, less than the {self.workers} that are always there")
        return self


class AgentConfig(Config):
    """A program that plays the attempts of a task: it is given an address, a key and the prompt, and asks the policy there as
    it would ask any model, in the way of OpenAI or of Anthropic."""

    function: str = ""
    """package.module:function, called with (base_url, api_key, prompt), plain or `async`; `base_url` is for
    clients of OpenAI's and of Anthropic's protocol."""
    command: str = ""
    """Or a command for the shell, in a box; it finds the address, the key and the task in its environment."""
    image: str = ""
    """A docker image whose commands the box has; without, it has those of this machine."""
    network: tuple[str, ...] = ()
    """What the box can reach besides the policy, each as `host:port`."""
    unconfined: bool = False
    """Run the command on this machine as it is, with all that its user may do."""
    seconds: float = Field(600.0, gt=0.0)
    """That an attempt may take; then it has failed, and is tried again."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if bool(self.function) == bool(self.command):
            raise ValueError("an agent is either a function or a command")
        if (self.image or self.network or self.unconfined) and not self.command:
            raise ValueError("image, network and unconfined are for an agent that is a command")
        if (self.image or self.network) and self.unconfined:
            raise ValueError("a command that runs unconfined has no box: image and network mean nothing to it")
        return self


class CheckConfig(Config):
    """Rewards are tried before a run starts, see docs/integrity.md."""

    prompts: int = Field(2, ge=0)
    """Prompts of each task that they are tried on; 0 leaves it be."""
    seconds: float = Field(30.0, gt=0.0)
    """The start waits no longer; what has not been tried by then is passed over."""


class JudgeConfig(Config):
    """A model that a reward asks, on engines of its own."""

    path: str
    """A directory or Hugging Face id."""
    replicas: int = Field(1, gt=0)
    """Engines that run it, which otherwise are as `engine` says."""
    minimum: int = Field(0, ge=0)
    """Engines that are always there; others, up to `replicas`, start while more questions are asked than those there have slots
    for. 0 is all."""
    idle_seconds: float = Field(300.0, gt=0.0)
    """An engine beyond `minimum` ends when it has been asked nothing for so long."""
    max_tokens: int = Field(1024, gt=0)
    """Most tokens of one reply."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.minimum > self.replicas:
            message = f"{self.minimum} is more than there may be: give 1 to {self.replicas} (replicas), or 0 for all"
            raise Problems([("minimum", message)])
        return self


class TaskConfig(Config):
    """One task of the mixture."""

    name: str
    prompts: PromptsConfig
    validation: PromptsConfig | None = None
    """Prompts that may stop or tune something; never trained on."""
    test: PromptsConfig | None = None
    """Prompts for the reported accuracy only."""
    weight: float = Field(1.0, gt=0.0)
    """Share of the mixture, relative to the other tasks."""
    system: str | None = None
    """System message put before each prompt."""
    environment: str | None = None
    """A name from docs/environments.md, or package.module:attribute; none means one turn without an environment."""
    environment_options: dict[str, Any] = {}
    environment_pool: EnvironmentPoolConfig = EnvironmentPoolConfig()
    agent: AgentConfig | None = None
    """A program that plays the attempts, instead of one turn or an environment."""
    reward: str = "math"
    """`math`, `numeric`, `multiple_choice`, `exact_match`, `regex`, `code`, `sql`, `instruction_following`, `judge`,
    `reasoning_gym`, `environment_return`, `reward_model`, `length`, `repetition`, `composed`, or package.module:attribute:
    docs/rewards.md."""
    reward_options: dict[str, Any] = {}
    reward_range: tuple[float, float] | None = None
    """Least and greatest score that the reward may give; others raise an alarm."""
    group_reward: str | None = None
    """Judges the siblings of a group together, when each has its score: `duplicates`, or package.module:attribute."""
    group_reward_options: dict[str, Any] = {}
    prefers: str = ""
    """Class of devices, such as h20, whose engines its requests go to while they have room: for what reads much, or writes
    much, where `placement.engine` has several classes."""
    judge: JudgeConfig | None = None
    """A model for the reward to ask; the reward is built with `generate` as one more option."""
    grading: GradingConfig | None = None
    """Workers and a deadline of its own; without, it shares those of the run's `grading`."""
