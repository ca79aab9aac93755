"""Adapter to servers of OpenReward, by the Open Reward Standard: an episode is a session whose tools give rewards."""

import asyncio
import functools
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import httpx
from pydantic import Field, field_validator

from antiphon.core.errors import StallError, UnsupportedError
from antiphon.core.types import Prompt
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.adapters.base import Adapter, AdapterConfig
from antiphon.tasks.environments.base import OptionError, require
from antiphon.tasks.environments.tools.toolbox import Tool, Toolbox, ToolError, render_tool_responses
from antiphon.tasks.tool_calls import TOOL_FORMATS, strip_thinking

_PAUSE = 1.0  # seconds, where a server that is still starting names none


class OpenReward(Adapter):
    """A task of an environment of a running server of OpenReward.

    A response may call several tools, whose rewards are added. One without a call ends the episode; if the environment has a
    terminal tool, that is given the response and decides its reward. An error of the server fails the attempt.
    """

    class Config(AdapterConfig):
        """Options of `openreward`."""

        url: str
        """Address of the server."""
        environment: str | None = None
        """Name of the environment there; None is the server's first."""
        split: str = "train"
        """Split that has the tasks. The payload's `index` chooses one, or else the episode's seed."""
        format: str = "hermes"
        """Format of tool calls."""
        turns: int = Field(16, ge=1)
        """Turns after which the episode is truncated."""
        seconds: float = Field(600.0, gt=0)
        """Time limit of a request, such as a call of a tool."""
        output: int = Field(4000, ge=1)
        """Characters of a result that the policy sees."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of a response with a call that cannot be parsed."""

        @field_validator("url")
        @classmethod
        def _check_url(cls, url: str) -> str:
            require(re.fullmatch(r"https?://.+", url) is not None, "url", url, "of the form http://host:port")
            return url.rstrip("/")

    config: Config
    name: ClassVar[str] = "openreward"

    def __init__(self, prompt: Prompt | None = None, **options: Any) -> None:
        super().__init__(**options)
        payload = prompt.payload if prompt else None
        self._index = payload.get("index") if isinstance(payload, Mapping) else None
        self._format = TOOL_FORMATS.resolve(self.config.format)
        self._toolbox = Toolbox([], self._format)
        self._terminal: Mapping[str, Any] | None = None
        self._client: httpx.AsyncClient | None = None
        self._path = ""
        self._reward, self._finished = 0.0, False

    async def reset(self, seed: int) -> Reset:
        """Begin a session of the task that the prompt names, or of the one that the seed draws."""
        headers = {"X-Session-ID": str(uuid.uuid4())}
        self._client = httpx.AsyncClient(base_url=self.config.url, headers=headers, timeout=None)
        environment = await self._find_environment()
        self._path = f"/{environment}"
        split = {"split": self.config.split}
        count = await self._count_tasks(split)
        index = seed % count if self._index is None else self._index
        await self._ask("POST", "/create", {"env_name": environment, **split, "index": index})
        offered = await self._ask("GET", f"{self._path}/task_tools")
        tools = [
            Tool(
                name=tool["name"],
                description=tool["description"],
                parameters=tool["input_schema"] or {},
                call=functools.partial(self._run, tool["name"]),
            )
            for tool in offered["tools"]
        ]
        self._toolbox, self._terminal = Toolbox(tools, self._format), offered.get("terminal_tool")
        self._turns_left = self.config.turns
        task = _join(await self._ask("GET", f"{self._path}/prompt"))
        text = f"{self._toolbox.describe()}\n\n{task}" if tools else task
        return text, self._reset_info(text)

    async def step(self, action: str) -> Step:
        """Call tools, or end the episode with a response."""
        self._check_running()
        self._turns_left -= 1
        self._reward, observation = 0.0, ""
        content, calls, problems = self._toolbox.format.parse(action)
        valid = [not problems]
        if problems:  # then no tool is called: the policy must know which calls were made
            observation, self._reward = " ".join(problems), 0.0 - self.config.format_penalty
        elif calls:
            texts = []
            for call in calls:
                text, success = await self._toolbox.answer(call, self.config.output)
                texts.append(text)
                valid.append(success)
                if self._finished:
                    break
            observation = render_tool_responses(texts)
        else:
            await self._end(content)
        truncated = not self._turns_left and not self._finished
        info = self._step_info(action, observation, self._reward, self._finished or truncated, valid=all(valid))
        return observation, self._reward, self._finished, truncated, info

    async def close(self) -> None:
        """End the session."""
        if self._client is not None:
            with suppress(httpx.HTTPError, TimeoutError):  # a server ends sessions that nobody uses
                async with asyncio.timeout(self.config.seconds):
                    await self._client.post("/delete")
            await self._client.aclose()

    async def _end(self, content: str) -> None:
        if self._terminal is not None:
            argument = self._terminal.get("arg")
            with suppress(ToolError):  # that refuses a response is no reward
                await self._run(self._terminal["name"], **({argument: strip_thinking(content)} if argument else {}))
        self._finished = True

    async def _run(self, name: str, /, **arguments: Any) -> str:
        """Call a tool of the server, and count its reward."""
        result = await self._ask("POST", f"{self._path}/call", {"name": name, "input": arguments})
        if not result["ok"]:
            raise ToolError(result["error"])
        output = result["output"]
        self._reward += output.get("reward") or 0.0
        self._finished |= bool(output.get("finished"))
        return _join(output["blocks"])

    async def _find_environment(self) -> str:
        known, name = await self._ask("GET", "/list_environments"), self.config.environment
        if name is not None and name not in known:
            raise self._option_error("environment", name, known)
        return str(known[0] if name is None else name)

    async def _count_tasks(self, split: Mapping[str, str]) -> int:
        splits = [each["name"] for each in await self._ask("GET", f"{self._path}/splits")]
        if self.config.split not in splits:
            raise self._option_error("split", self.config.split, splits)
        count = int((await self._ask("POST", f"{self._path}/num_tasks", split))["num_tasks"])
        if not count:
            message = f"environment {self.name!r}: {self.config.url} has no tasks in split {self.config.split!r}"
            raise OptionError(message, environment=self.name, key="split", value=self.config.split)
        return count

    def _option_error(self, key: str, value: str, valid: list[str]) -> OptionError:
        message = f"environment {self.name!r}: {self.config.url} has no {key} {value!r}, only {', '.join(valid)}"
        return OptionError(message, environment=self.name, key=key, value=value, valid=valid)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request; return the answer, whether it comes at once or as a stream of events."""
        assert self._client is not None
        where, seconds = f"the OpenReward server at {self.config.url}", self.config.seconds
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.request(method, path, json=body)
                while response.headers.get("X-Backend-State") == "starting":
                    await asyncio.sleep(float(response.headers.get("Retry-After", _PAUSE)))
                    response = await self._client.request(method, path, json=body)
        except TimeoutError:
            message = f"{where} did not answer {path} in {seconds:g} s; the option seconds allows more"
            raise StallError(message, "seconds") from None
        except httpx.HTTPError as error:
            raise RuntimeError(f"{where} does not answer {path}: {type(error).__name__} {error}") from error
        if response.is_error:
            raise RuntimeError(f"{where} answers {path} with {response.status_code}: {response.text[:1000]}")
        if not response.headers["Content-Type"].startswith("text/event-stream"):
            return response.json()
        events = list(_parse_events(response.text))
        if errors := [data for event, data in events if event == "error"]:
            raise RuntimeError(f"{where} says of {path}: {errors[0]}")
        return json.loads("".join(data for event, data in events if event in ("chunk", "end")))


def _parse_events(stream: str) -> Iterator[tuple[str, str]]:
    """Yield name and data of each event of a stream of server-sent events."""
    for block in re.sub(r"\r\n?", "\n", stream).split("\n\n"):
        fields = [line.partition(":")[::2] for line in block.split("\n")]
        data = [value.removeprefix(" ") for name, value in fields if name == "data"]
        if data:
            event = next((value.strip() for name, value in fields if name == "event"), "message")
            yield event, "\n".join(data)


def _join(blocks: list[Mapping[str, Any]]) -> str:
    """Return the text of a prompt or of a result."""
    if others := [block["type"] for block in blocks if block["type"] != "text"]:
        raise UnsupportedError(f"an OpenReward environment returned a block of type {others[0]}; only text can be read")
    return "\n".join(block["text"] for block in blocks)
