"""The process of an environment of Atropos. It needs the package atroposlib, and none of its servers."""

import asyncio
import copy
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError
from typing_extensions import override

from antiphon.core.errors import AntiphonError, ConfigError, SandboxError, UserCodeError
from antiphon.core.optional_packages import import_optional
from antiphon.core.registry import import_path
from antiphon.core.rpc import AsyncWorker, handlers_of
from antiphon.core.types import Score
from antiphon.core.user_errors import describe_error
from antiphon.rollout.atropos.policy import ENVIRONMENT_KEY, GROUP, TRAJECTORY, Ask, PolicyGroup, PolicyServer, Reply
from antiphon.rollout.atropos.scores import read_scores
from antiphon.rollout.gateway.server import Answer

OPTIONS_KEY = "tasks.agent.options"
_SEEDS = 2**32  # numpy takes seeds below


class AtroposHost(AsyncWorker):
    """Serves the calls of a `GroupCollector`."""

    def __init__(self, name: str, options: Mapping[str, Any], tokenizer: str, group_size: int, seed: int) -> None:
        """Prepare to make an environment.

        Args:
            name: Import path of its class, `package.module:attribute`.
            options: Fields of its configuration that differ from its `config_init`.
            tokenizer: Directory of the run's model.
            group_size: Attempts of a group.
            seed: Seed of the global random generators, from which environments draw items.
        """
        self._name, self._options = name, options
        self._own = {"tokenizer_name": tokenizer, "group_size": group_size, "use_wandb": False}
        self._seed = seed
        super().__init__()

    @override
    async def _live(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed % _SEEDS)
        environment = make_environment(self._name, self._options, self._own)
        try:
            await environment.setup()
        except Exception as error:  # named boundary: the environment
            message = f"{ENVIRONMENT_KEY}: {self._name} failed in setup: {describe_error(error, environment)}"
            raise UserCodeError(message, key=ENVIRONMENT_KEY, value=self._name) from error
        async with asyncio.TaskGroup() as owner:
            await self._serve(owner, handlers_of(GroupCollector(environment, self._ask_policy)))

    async def _ask_policy(self, key: str, body: Mapping[str, Any]) -> Answer:
        answer: Answer = await self._ask("policy", key, body)  # `Gateway.answer`
        return answer


class GroupCollector:
    """Has an environment collect and score groups."""

    def __init__(self, environment: Any, ask: Ask) -> None:
        """Create a collector.

        Args:
            environment: An environment of `make_environment` that is set up.
            ask: Answers a request to the policy.
        """
        self._environment = environment
        self._ask = ask
        self._items: list[Any] = []
        self._drawing = asyncio.Lock()

    async def health(self) -> None:
        """Answer that the process's event loop runs."""

    async def collect(self, index: int, keys: Sequence[str]) -> list[Score]:
        """Collect the trajectories of an item, one for each attempt, and return their scores.

        Args:
            index: Number of the item, in the order of `get_next_item`.
            keys: Keys of the attempts.

        Raises:
            UnsupportedError: The environment does what cannot be trained on.
            ConfigError: The environment has fewer items.
            SandboxError: The environment raised an error, or its scores cannot be read.
        """
        environment, group = self._of_size(len(keys)), PolicyGroup(keys, self._ask)
        try:
            item = await self._draw(index)
            GROUP.set(group)  # in this call's own task
            data, backlog = await environment.collect_trajectories(item)
            if backlog:
                raise group.refuse("returns items for later (a backlog)")
            if data:
                data = await environment.postprocess_histories(data)
            await environment.cleanup()
            scores = read_scores(data, group.attempts, self._encode)
        except AntiphonError as error:
            raise group.refusal or error from None
        except Exception as error:  # named boundary: the environment
            raise group.refusal or SandboxError(describe_error(error, environment)) from error
        if group.refusal is not None:  # the environment went on without what it had asked for
            raise group.refusal
        return scores

    def _of_size(self, group_size: int) -> Any:
        """Return the environment; for groups of another size, those of an evaluation, a copy that leaves it unchanged."""
        if group_size == self._environment.config.group_size:
            return self._environment
        other = copy.copy(self._environment)
        other.config = other.config.model_copy(update={"group_size": group_size})
        return follow_trajectories(other)

    async def _draw(self, index: int) -> Any:
        """Return the item of a number. Items are kept: each has its prompt, which may come again."""
        async with self._drawing:
            while len(self._items) <= index:
                item = await self._environment.get_next_item()
                if item is None:
                    message = (
                        f"the environment of Atropos has {len(self._items)} items: give its prompts that size (options)"
                    )
                    raise ConfigError(message, key="tasks.prompts.options", value=index)
                self._items.append(item)
        return self._items[index]

    def _encode(self, reply: Reply) -> Sequence[int]:
        tokenizer = self._environment.tokenizer
        messages = [dict(each) for each in reply.messages]
        tokens: Sequence[int] = tokenizer.apply_chat_template(messages) if messages else tokenizer.encode(reply.text)
        return tokens


def make_environment(name: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """Return an environment whose server is the policy.

    Args:
        name: Import path of its class.
        options: Fields of its configuration, by the user.
        own: Fields of its configuration that the run decides.

    Raises:
        ConfigError: The class or an option is wrong, or atroposlib is not installed.
        UserCodeError: The environment cannot be made.
    """
    base = import_optional("atroposlib.envs.base", ENVIRONMENT_KEY, "atroposlib")
    make: Any = import_path(name, "environment of Atropos", ENVIRONMENT_KEY)
    if not _is_subclass(make, base.BaseEnv):
        message = f"{ENVIRONMENT_KEY}: {name!r} is no subclass of atroposlib's BaseEnv"
        raise ConfigError(message, key=ENVIRONMENT_KEY, value=name)
    server = base.APIServerConfig(model_name="policy", api_key="none", health_check=False)  # asked by nobody
    try:
        defaults, _ = make.config_init()
        config = _apply_options(defaults, options, own)
        environment = make(config, [server], slurm=False, testing=False)
    except AntiphonError:
        raise
    except Exception as error:  # named boundary: the environment
        message = f"{ENVIRONMENT_KEY}: {name} cannot be made: {describe_error(error, make)}"
        raise UserCodeError(message, key=ENVIRONMENT_KEY, value=name) from error
    tokenizer = environment.tokenizer
    environment.server = PolicyServer(environment.server.servers, tokenizer)
    render = tokenizer.apply_chat_template
    # Atropos reads lists of tokens from it, the default of transformers 4.
    tokenizer.apply_chat_template = lambda *args, **options: render(*args, **{"return_dict": False, **options})
    return follow_trajectories(environment)


def _is_subclass(found: object, base: type) -> bool:
    return inspect.isclass(found) and issubclass(found, base)


def follow_trajectories(environment: Any) -> Any:
    """Have each call of an environment's `collect_trajectory` be an attempt of its own; return the environment."""
    collect = type(environment).collect_trajectory.__get__(environment)

    async def collect_one(item: Any) -> Any:
        group = GROUP.get()
        token = TRAJECTORY.set(group.begin(1)[0])
        try:
            return await collect(item)
        finally:
            TRAJECTORY.reset(token)

    environment.collect_trajectory = collect_one
    return environment


def _apply_options(defaults: Any, options: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """Return an environment's configuration with the user's options and those of the run."""
    fields = type(defaults).model_fields
    valid = [name for name in fields if name not in own]
    for name, value in options.items():
        if name not in valid:
            why = "the run sets it" if name in own else "there is no such field"
            message = f"{OPTIONS_KEY}.{name}: {why}; valid are {', '.join(valid)}"
            raise ConfigError(message, key=f"{OPTIONS_KEY}.{name}", value=value, valid=valid)
    try:
        return type(defaults).model_validate({**defaults.model_dump(), **options, **own})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([OPTIONS_KEY, *map(str, first["loc"])])
        raise ConfigError(f"{key}: {first['msg']}", key=key, value=first["input"]) from None
