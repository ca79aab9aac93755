"""Configuration of tasks. Importing it imports no torch."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from antiphon.core.config import Bound, Config, unit
from antiphon.core.errors import ValidatorError
from antiphon.core.types import Sampling
from antiphon.sandbox.base import Level


class PromptsConfig(Config):
    """A source of prompts."""

    source: str
    """`jsonl`, `parquet`, `csv`, `arrow`, `text`, `huggingface`, `modelscope`, `reasoning_gym`, `mini_swe`, `task_images`,
    `numbered`, or package.module:function that yields prompts."""
    path: str = ""
    """File, id of a hub, or reasoning-gym dataset name."""
    split: str = "train"
    """Split of the source, such as train, validation or test."""
    prompt_column: str = "prompt"
    """Column with the question: a string, or a list of chat messages."""
    image_column: str = "images"
    """Column with the images of the question, if there is one: a list of files as bytes, of mappings with `bytes` or `path` (as
    `datasets` has them), of data URLs, or of paths beside the file `path`. Each stands for one `<image>` in the question."""
    limit: Annotated[int, unit("prompts")] = Field(0, ge=0)
    """Use only the first prompts; 0 uses all."""
    shuffle: bool = True
    """Reshuffle each epoch with the run's seed."""
    options: dict[str, Any] = {}
    """Passed to the source."""


class PairsConfig(PromptsConfig):
    """Prompts with two responses each."""

    chosen_column: str = "chosen"
    """Column with the better response: a string, or a list of chat messages that ends with it."""
    rejected_column: str = "rejected"
    """Column with the worse response, in the form of `chosen_column`."""

    @property
    def responses(self) -> dict[str, str]:
        """Column of each response, by the key that names it."""
        return {"chosen_column": self.chosen_column, "rejected_column": self.rejected_column}


class ResponsesConfig(PromptsConfig):
    """Prompts with a response each."""

    response_column: str = "response"
    """Column with the response: a string, or a list of chat messages that ends with it."""

    @property
    def responses(self) -> dict[str, str]:
        """Column of each response, by the key that names it."""
        return {"response_column": self.response_column}


class GradingConfig(Config):
    """Worker processes that run rewards; rewards that are `async def` run in the controller."""

    workers: Annotated[int, unit("processes")] = Field(1, gt=0)
    """Processes that always run, on each node that `placement.reward` names."""
    max_workers: Annotated[int, unit("processes")] = Field(0, ge=0)
    """Maximum number of processes on a node. One more starts after each second in which gradings queue; 0 is `workers`."""
    idle_seconds: Annotated[float, unit("seconds")] = Field(30.0, gt=0.0)
    """Idle time after which a process beyond `workers` ends."""
    concurrency: Annotated[int, unit("gradings")] = Field(64, gt=0)
    """Concurrent gradings of a reward that is `async def`."""
    deadline: Annotated[float, unit("seconds")] = Field(10.0, gt=0.0)
    """Seconds after which a grading is killed and its trajectory is left without a score."""
    judge_budget: Annotated[float, unit("currency of the prices")] = Field(0.0, ge=0.0)
    """Cost at which the run ends, of all judges behind an address together, in the currency of their `input_price` and
    `output_price`; 0 for no bound. Only in the run's own `grading`."""
    confine: Literal["built_in", "all", "none"] = "built_in"
    """Processes without network and without files but Python's: those of built-in rewards that only read text (`math`, `sql`,
    `regex` …), those of all rewards, your own included, or none."""
    minimum_level: Level = Level.LIMITS
    """Least sandbox level of confined processes; they get the highest level that this machine allows."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_workers and self.max_workers < self.workers:
            raise ValueError(f"max_workers is {self.max_workers}, less than the {self.workers} that always run")
        return self


class EnvironmentPoolConfig(Config):
    """Processes for environments whose methods block.

    Environments with `async` methods, and those that declare `inline = True`, run in the controller.
    """

    workers: Annotated[int, unit("processes")] = Field(1, gt=0)
    """Processes that always run, divided among the nodes that `placement.environment` names."""
    max_workers: Annotated[int, unit("processes")] = Field(0, ge=0)
    """Maximum number of processes. Another one starts when all are full; 0 is `workers`."""
    environments: Annotated[int, unit("environments")] = Field(32, gt=0)
    """Environments in one process before another starts; with all processes started they share them."""
    idle_seconds: Annotated[float, unit("seconds")] = Field(30.0, gt=0.0)
    """Time without an environment after which a process beyond `workers` ends."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_workers and self.max_workers < self.workers:
            raise ValueError(f"max_workers is {self.max_workers}, less than the {self.workers} that always run")
        return self


class AgentConfig(Config):
    """An agent program that runs the attempts of a task.

    It gets an address, a key and the prompt, and asks the policy there as any model with OpenAI's or Anthropic's protocol.
    """

    function: str = ""
    """package.module:function, called with (base_url, api_key, prompt), plain or `async`; `base_url` serves clients of both
    protocols."""
    atropos: str = ""
    """Or package.module:Class, an environment of Atropos, which runs and scores the attempts of a group together. Its prompts
    are those of the source `numbered`, its reward is `agent_result`."""
    options: dict[str, Any] = {}
    """Fields of the configuration of the environment of Atropos."""
    command: str = ""
    """Or a shell command in a sandbox, with the address, the key and the task in its environment variables."""
    image: str = ""
    """Docker image of the sandbox; without, the sandbox has the commands of this machine, or those that a `service` chooses."""
    network: tuple[str, ...] = ()
    """Addresses that the sandbox can reach besides the policy, each as `host:port`."""
    unconfined: bool = False
    """Run the command without a sandbox, with all rights of its user."""
    log_file: bool = False
    """The command reaches the policy through a log file in its sandbox, which then needs no network."""
    service: str = ""
    """Address of a sandbox service, such as `http://127.0.0.1:8080`, whose sandboxes run the command; needs `log_file`. The
    token is read from the environment variable `ANTIPHON_SANDBOX_TOKEN`."""
    seconds: Annotated[float, unit("seconds")] = Field(600.0, gt=0.0)
    """Time limit of an attempt; one that exceeds it has failed and is tried again."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if [bool(self.function), bool(self.command), bool(self.atropos)].count(True) != 1:
            raise ValueError("an agent is either a function, a command or an environment of Atropos")
        if self.options and not self.atropos:
            raise ValueError("options are for an environment of Atropos")
        boxed = [name for name in ("image", "network", "log_file", "service") if getattr(self, name)]
        if (boxed or self.unconfined) and not self.command:
            raise ValueError("image, network, unconfined, log_file and service are for an agent that is a command")
        if boxed and self.unconfined:
            raise ValueError(f"a command that runs unconfined has no sandbox: leave out {' and '.join(boxed)}")
        if self.service and not self.log_file:
            raise ValidatorError(
                [("log_file", "a sandbox of a service cannot reach the policy otherwise: must be true")]
            )
        if self.service and self.network:
            raise ValidatorError([("network", "has no effect with service, which has a list of its own: leave it out")])
        return self


class CheckConfig(Config):
    """Checks of rewards before a run starts, described in docs/integrity.md."""

    prompts: Annotated[int, unit("prompts")] = Field(2, ge=0)
    """Prompts of each task that rewards are checked on; 0 checks none."""
    seconds: Annotated[float, unit("seconds")] = Field(30.0, gt=0.0)
    """Time limit; checks that have not finished when it ends are skipped."""


class JudgeConfig(Config):
    """A judge model for a reward, on engines of its own."""

    path: str
    """A directory or Hugging Face id."""
    replicas: Annotated[int, unit("engines")] = Field(1, gt=0)
    """Maximum number of engines that run it; `engine` configures them."""
    minimum: Annotated[int, unit("engines")] = Field(0, ge=0)
    """Engines that always run; more, up to `replicas`, start while there are more requests than slots. 0 is all."""
    idle_seconds: Annotated[float, unit("seconds")] = Field(300.0, gt=0.0)
    """Idle time after which an engine beyond `minimum` ends."""
    max_tokens: Annotated[int, unit("tokens")] = Field(1024, gt=0)
    """Maximum number of tokens of a reply."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.minimum > self.replicas:
            message = f"{self.minimum} is more than there may be: give 1 to {self.replicas} (replicas), or 0 for all"
            raise ValidatorError([("minimum", message)])
        return self


class TaskSamplingConfig(Config):
    """Sampling of tokens in one task; what is null is as in `rollout.sampling`."""

    max_tokens: Annotated[int, unit("tokens")] | None = Field(None, gt=0)
    """Maximum number of tokens of one completion."""
    temperature: Annotated[float, unit("factor")] | None = Field(None, ge=0.0)
    """0 is greedy."""
    top_p: Annotated[float, unit("probability")] | None = Field(None, gt=0.0, le=1.0)
    """Sample from the most probable tokens whose probabilities add up to this."""
    top_k: Annotated[int, unit("tokens")] | None = Field(None, ge=0)
    """Sample from this many most probable tokens; 0 means no limit."""
    min_p: Annotated[float, unit("probability")] | None = Field(None, ge=0.0, lt=1.0)
    """Sample from tokens of at least this probability, relative to that of the most probable token."""
    stop: tuple[str, ...] | None = None
    """Strings that end a completion; they remain part of it."""

    @property
    def changes(self) -> dict[str, Any]:
        """The parameters of sampling that differ from those of the run."""
        return self.model_dump(exclude_none=True)

    def apply(self, sampling: Sampling) -> Sampling:
        """Return the parameters of sampling with the changes of this task."""
        return replace(sampling, **self.changes)


class EvaluationSamplingConfig(TaskSamplingConfig):
    """Sampling of tokens in evaluations and in `antiphon generate`.

    Penalties and beams are for these alone: what is sampled with them does not come from the distribution that is trained.
    """

    repetition_penalty: Annotated[float, unit("factor")] | None = Field(None, gt=0.0)
    """Penalty of tokens that are in the prompt or the completion already: positive logits are divided by it, negative ones
    multiplied; null and 1 change nothing."""
    presence_penalty: Annotated[float, unit("logit")] | None = Field(None, ge=-2.0, le=2.0)
    """Subtracted from the logits of tokens that are in the completion already."""
    frequency_penalty: Annotated[float, unit("logit")] | None = Field(None, ge=-2.0, le=2.0)
    """Subtracted from the logits of tokens as often as they are in the completion already."""
    num_beams: Annotated[int, unit("beams")] | None = Field(None, gt=0)
    """Number of beams of a beam search, which is deterministic: it needs one sample a prompt, at temperature 0. null and 1
    search none. Needs engines of kind native."""
    length_penalty: Annotated[float, unit("exponent")] | None = None
    """Beams that have ended are compared by their log-prob divided by their length to this power; null is 1."""
    early_stopping: bool | Literal["never"] | None = None
    """When a beam search with `num_beams` ended beams stops: `true`, at once; `false` and null, when no running beam is better
    at its present length; `never`, when none could become better."""


class TaskEvaluationConfig(Config):
    """Evaluation on the `test` prompts of one task."""

    samples: Annotated[int, unit("completions")] | None = Field(None, gt=0)
    """Completions a prompt; null is `evaluation.samples`."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Sampling settings that differ from the task's `sampling` and from `evaluation.temperature`."""
    success_at: Annotated[float, unit("score")] = 1.0
    """Least score of a success. Accuracy is the share of completions that are a success; one without a score is none."""
    success_part: str = ""
    """Part of the score that is compared with `success_at`, such as `success` of an environment; empty is the score itself."""


class CurriculumConfig(Config):
    """Draws of prompts by their own solve rates, described in docs/guides/curriculum.md."""

    sweep: Annotated[int, unit("draws")] = Field(5, gt=0)
    """Every draw of this number takes the next prompt of the usual order, so that no prompt is forgotten; with 1, every draw
    does."""
    decay: Annotated[float, unit("factor")] = Field(0.5, ge=0.0, le=1.0)
    """Weight of the earlier attempts at a prompt whenever a group of new ones is counted."""


class TaskConfig(Config):
    """One task of the mixture."""

    name: str
    """Name of the task, in metrics, records and errors; unique in the run."""
    prompts: PromptsConfig | None = None
    """Prompts that are trained on. Without, the task gets its prompts from tasks with a `route`."""
    route: str = ""
    """Column of the task's data that names, for each row, the task that has its environment, sampling and reward. A task with a
    route has prompts and a weight, and nothing else."""
    validation: PromptsConfig | None = None
    """Prompts for tuning and early stopping; never trained on."""
    test: PromptsConfig | None = None
    """Prompts for the reported accuracy only."""
    evaluation: TaskEvaluationConfig = TaskEvaluationConfig()
    """Number and sampling of the completions of `test` prompts, and what a success is."""
    weight: Annotated[float, unit("share of the sum of all weights")] = Field(1.0, ge=0.0)
    """Share of the mixture, relative to the other tasks. 0 trains on nothing of the task: it is only evaluated, on its `test`
    prompts."""
    curriculum: CurriculumConfig | None = None
    """Draw prompts that are solved sometimes more often than others. Without, each prompt is drawn once an epoch."""
    mean_range: tuple[float, float] | None = None
    """Lowest and highest mean score of a group that is trained on. Other groups are filtered out and replaced, like those that
    `rollout.filter` rejects."""
    system: str | None = None
    """System message before each prompt."""
    sampling: TaskSamplingConfig = TaskSamplingConfig()
    """Sampling settings that differ from `rollout.sampling`."""
    environment: str | None = None
    """A name from docs/environments.md, or package.module:attribute; without one, an episode is a single turn."""
    environment_options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    environment_pool: EnvironmentPoolConfig = EnvironmentPoolConfig()
    """Processes of an environment that blocks."""
    agent: AgentConfig | None = None
    """An agent program that runs the attempts, instead of a single turn or an environment."""
    reward: str = "math"
    """`math`, `numeric`, `multiple_choice`, `short_answer`, `exact_match`, `regex`, `code`, `sql`, `instruction_following`,
    `judge`, `reasoning_gym`, `environment_return`, `agent_result`, `reward_model`, `length`, `repetition`, `composed`, or
    package.module:attribute: docs/rewards.md."""
    reward_options: dict[str, Any] = {}
    """Keyword arguments of the reward."""
    reward_range: tuple[Bound, Bound] | None = None
    """Lowest and highest score of the reward; others raise an alarm."""
    group_reward: str | None = None
    """Reward of the siblings of a group together, after each has its score: `duplicates`, or package.module:attribute."""
    group_reward_options: dict[str, Any] = {}
    """Keyword arguments of the group reward."""
    prefers: str = ""
    """Class of devices, such as h20, whose engines get its requests while they have room, where `placement.engine` has several
    classes."""
    judge: JudgeConfig | None = None
    """A judge model; the reward gets an additional option `generate`, which asks it."""
    grading: GradingConfig | None = None
    """Grading workers and deadline of its own; without, it shares those of the run's `grading`."""
