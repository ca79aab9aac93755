"""A model behind an API in the place of engines: what a hosted model scores on the tasks of a run, and data sampled from it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from antiphon.core.config import read_secret
from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.types import AttemptId, Message, PolicyVersion, Prompt, Sampling, Trajectory
from antiphon.engines.chat_client import ChatReply, ChatRequestError, OpenAIChatClient
from antiphon.rollout.attempt import UnscoredAttempt
from antiphon.rollout.chat_episodes import ChatEpisodes
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import ScoreTranscript
from antiphon.rollout.episode_loop import EnvironmentFactory
from antiphon.rollout.evaluation import TaskPlan
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext, open_cluster
from antiphon.run.launch.environments import make_environments
from antiphon.run.launch.graders import start_graders

NOT_OF_OPENAI = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "num_beams": 1}  # with values that change nothing
OURS = frozenset({"model", "messages", "stream", "n"})  # fields of a request that are no settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAPI:
    """An API that speaks OpenAI's chat protocol.

    Attributes:
        url: Such as https://api.example.com/v1.
        key: Name of the environment variable with the API key; empty for none.
        settings: Further fields of each request, which replace ours: `temperature`, `max_tokens`, `stop`, `top_p` below 1, and
            `presence_penalty` and `frequency_penalty` other than 0. A field that is None is not sent.
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
        for name in sorted(OURS & self.settings.keys()):
            raise ConfigError(
                "is not a setting: Antiphon sends it", key=f"api.settings.{name}", value=self.settings[name]
            )


class APIRollouts:
    """Runs attempts by a model behind an API, with the methods that evaluation and sampling need of `LocalRollouts`."""

    def __init__(
        self,
        client: OpenAIChatClient,
        api: ChatAPI,
        config: RolloutConfig,
        grade: ScoreTranscript,
        environments: Mapping[str, EnvironmentFactory],
    ) -> None:
        """Create the rollouts; for `config`, `grade` and `environments` see `ChatEpisodes`."""
        self._client = client
        self._api = api
        self._running = asyncio.Semaphore(api.concurrency)
        self._replies = 0
        self._failure: ChatRequestError | None = None  # the last
        self._episodes = ChatEpisodes(self._ask, config, grade, environments)

    @property
    def usage(self) -> dict[str, int]:
        """Counts of requests, and of tokens as the server counts them."""
        return asdict(self._client.usage)

    async def _ask(self, messages: Sequence[Message], sampling: Sampling) -> ChatReply:
        fields: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
        fields |= {"top_p": sampling.top_p} if sampling.top_p < 1.0 else {}
        fields |= {"stop": list(sampling.stop)} if sampling.stop else {}
        for name in ("presence_penalty", "frequency_penalty"):
            fields |= {name: value} if (value := getattr(sampling, name)) else {}
        settings = {name: value for name, value in {**fields, **self._api.settings}.items() if value is not None}
        sent = [message.to_openai() for message in messages]
        try:
            reply = await self._client.ask(sent, **settings)
        except ChatRequestError as error:
            self._failure = error
            raise
        self._replies += 1
        return reply

    async def generate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling
    ) -> UnscoredAttempt:
        """Run one attempt without scoring it."""
        async with self._running:
            return await self._episodes.generate(prompt, attempt, started, sampling)

    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score an attempt, unless it has failed."""
        return await self._episodes.score(unscored)

    async def evaluate(
        self, prompt: Prompt, attempt: AttemptId, started: PolicyVersion, sampling: Sampling
    ) -> Trajectory:
        """Run one attempt and score it."""
        return await self.score(await self.generate(prompt, attempt, started, sampling))

    async def watch(self) -> None:
        """Wait for ever: there is no engine that could end."""
        await asyncio.get_running_loop().create_future()

    def require_replies(self) -> None:
        """Raise `UnsupportedError` if no request was answered: nothing is known about the model then."""
        if self._failure is not None and not self._replies:
            raise UnsupportedError(f"no request was answered: {self._failure}", key="api.url", value=self._api.url)


@asynccontextmanager
async def open_api_rollouts(
    model: str, api: ChatAPI, config: RunConfig, plans: Mapping[str, TaskPlan]
) -> AsyncIterator[APIRollouts]:
    """Start the graders and environments of a configuration for a model behind an API.

    Args:
        model: Its name there.
        api: The API.
        config: The tasks, and the limits of episodes.
        plans: How the tasks in use are sampled.

    Raises:
        ConfigError: A task has an agent, or the key is not set.
        UnsupportedError: Sampling that the protocol does not know; at the end, if no request was answered.
    """
    _check(config, plans)
    key = read_secret(api.key) if api.key else ""
    async with (
        open_cluster(config, None) as (cluster, placement),
        OpenAIChatClient(api.url, model, key, attempts=api.attempts, timeout=api.timeout) as client,
    ):
        context = LaunchContext(cluster=cluster, config=config, placement=placement)
        async with start_graders(context) as graders:
            rollouts = APIRollouts(client, api, config.rollout, graders.router.score, make_environments(context))
            yield rollouts
    rollouts.require_replies()


def _check(config: RunConfig, plans: Mapping[str, TaskPlan]) -> None:
    """Refuse what an API cannot be asked, before the first request."""
    if agents := [task.name for task in config.tasks if task.agent and task.name in plans]:
        raise ConfigError("an API is not asked by agents", key=f"tasks: {', '.join(agents)}")
    for task, plan in plans.items():
        for name, neutral in NOT_OF_OPENAI.items():
            if (value := getattr(plan.sampling, name)) != neutral:
                message = (
                    f"OpenAI's chat protocol has no such field (task {task!r}); give it in the settings of the API"
                )
                raise UnsupportedError(message, key=f"sampling.{name}", value=value)
