"""Evaluation of a model behind an API: what a hosted model scores on the tasks of a run."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from antiphon.core.config import read_secret
from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.types import AttemptId, Message, Prompt, Sampling, Trajectory
from antiphon.engines.chat_client import ChatReply, OpenAIChatClient
from antiphon.rollout.chat_episodes import ChatEpisodes
from antiphon.rollout.evaluation import Evaluation, TaskPlan, evaluate
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext, open_cluster
from antiphon.run.launch.environments import make_environments
from antiphon.run.launch.graders import start_graders
from antiphon.run.supervision import run_supervised


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAPI:
    """An API that speaks OpenAI's chat protocol.

    Attributes:
        url: Such as https://api.example.com/v1.
        key: Name of the environment variable with the API key; empty for none.
        settings: Further fields of each request, which replace ours: `temperature`, `max_tokens`, and `top_p` below 1. A field
            that is None is not sent.
        concurrency: Most attempts at once.
        attempts: How often a request is tried.
        timeout: Seconds of one try.
    """

    url: str
    key: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 32
    attempts: int = 5
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError("must begin with http:// or https://", key="api.url", value=self.url)
        for name, number in (("concurrency", self.concurrency), ("attempts", self.attempts), ("timeout", self.timeout)):
            if number <= 0:
                raise ConfigError(f"must be above 0, not {number}", key=f"api.{name}", value=number)
        if reserved := {"model", "messages", "stream", "n"} & self.settings.keys():
            name = min(reserved)
            raise ConfigError(
                "is not a setting: Antiphon sends it", key=f"api.settings.{name}", value=self.settings[name]
            )


async def evaluate_api(
    model: str, api: ChatAPI, config: RunConfig, prompts: Sequence[Prompt], plans: Mapping[str, TaskPlan]
) -> tuple[Evaluation, dict[str, int]]:
    """Evaluate a model behind an API.

    Args:
        model: Its name there.
        api: The API.
        config: The tasks, their graders, and the limits of episodes.
        prompts: Test prompts.
        plans: How each task is evaluated.

    Returns:
        The evaluation, and counts of requests and of tokens as the server counts them.

    Raises:
        ConfigError: A task has an agent.
        UnsupportedError: Sampling that the protocol does not know, or no request was answered.
    """
    _check(config, prompts, plans)
    key = read_secret(api.key) if api.key else ""
    async with AsyncExitStack() as stack:
        cluster, placement = await stack.enter_async_context(open_cluster(config, None))
        context = LaunchContext(cluster=cluster, config=config, placement=placement)
        graders = await stack.enter_async_context(start_graders(context))
        client = OpenAIChatClient(api.url, model, key, attempts=api.attempts, timeout=api.timeout)
        await stack.enter_async_context(client)
        running, failures = asyncio.Semaphore(api.concurrency), list[str]()

        async def ask(messages: Sequence[Message], sampling: Sampling) -> ChatReply:
            sent = [{"role": message.role, "content": message.content} for message in messages]
            return await client.ask(sent, **_settings(sampling, api.settings))

        episodes = ChatEpisodes(ask, config.rollout, graders.router.score, make_environments(context))

        async def run(prompt: Prompt, attempt: AttemptId, sampling: Sampling) -> Trajectory:
            async with running:
                trajectory = await episodes.run(prompt, attempt, sampling)
            if (failure := trajectory.meta.failure) and failure.source == "engine":
                failures.append(failure.message)
            return trajectory

        result = await run_supervised([], lambda _: evaluate(prompts, plans, run))
        if len(failures) == sum(map(len, result.correct)):
            raise UnsupportedError(
                f"no attempt was answered; the last failure: {failures[-1]}", key="api.url", value=api.url
            )
        return result, asdict(client.usage)


def _check(config: RunConfig, prompts: Sequence[Prompt], plans: Mapping[str, TaskPlan]) -> None:
    """Refuse what an API cannot be asked, before the first request."""
    used = {prompt.task for prompt in prompts}
    if agents := sorted(task.name for task in config.tasks if task.agent and task.name in used):
        raise ConfigError("a task with an agent is not evaluated by an API", key=f"tasks: {', '.join(agents)}")
    for task in sorted(used):
        sampling = plans[task].sampling
        for name in ("top_k", "min_p"):
            if value := getattr(sampling, name):
                message = (
                    f"OpenAI's chat protocol has no such field (task {task!r}); give it in the settings of the API"
                )
                raise UnsupportedError(message, key=f"sampling.{name}", value=value)


def _settings(sampling: Sampling, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that say how tokens are sampled."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    fields |= {"top_p": sampling.top_p} if sampling.top_p < 1.0 else {}
    fields |= {"stop": list(sampling.stop)} if sampling.stop else {}
    return {name: value for name, value in {**fields, **own}.items() if value is not None}
