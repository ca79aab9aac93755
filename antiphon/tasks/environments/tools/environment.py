"""An environment of tools: the policy calls them, reads their results, and ends with an answer.

Tools are Python functions or those of an MCP server. The policy reads what a tool says about a wrong call; a tool or a server
that breaks raises, and never counts as a reward of 0.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from antiphon.core.errors import DataError
from antiphon.core.registry import Registry
from antiphon.core.types import Prompt, ToolCall
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig
from antiphon.tasks.environments.tools.mcp import get_server
from antiphon.tasks.environments.tools.toolbox import Tool, Toolbox, render_tool_responses
from antiphon.tasks.tool_calls import TOOL_FORMATS, strip_thinking

TOOLS = Registry(
    "tool",
    {
        "calculator": "antiphon.tasks.environments.tools.calculator:calculator",
        "search": "antiphon.tasks.environments.tools.search:search_tool",
    },
)

TASK = (
    "{tools}\n\nYou are told what they return. When you know the answer, call nothing and write <answer>...</answer>."
)


class ToolUse(BaseEnvironment):
    """Answer the question of a prompt with tools.

    A response without a call is the answer and ends the episode. It earns 1 if it equals the payload's `answer` up to case and
    spaces, else 0.
    """

    class Config(EnvironmentConfig):
        """Options of `tools`."""

        tools: Sequence[str] = ("calculator", "search")
        """`calculator`, `search`, or package.module:attribute: an annotated function, or one that makes a tool of `prompt`."""
        mcp: Sequence[str] = ()
        """Command of an MCP server, with its arguments, whose tools are added."""
        format: str = "hermes"
        """Format of tool calls."""
        turns: int = Field(8, ge=1)
        """Turns after which the episode is truncated."""
        answer: str | None = "answer"
        """Key of the right answer in the payload; None leaves the judgement to the task's reward."""
        seconds: float = Field(30.0, gt=0)
        """Time limit of a call of an MCP tool."""
        output: int = Field(2000, ge=1)
        """Characters of a result that the policy sees."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of a response with a call that cannot be parsed."""

    config: Config
    name: ClassVar[str] = "tools"

    def __init__(self, prompt: Prompt, **options: Any) -> None:
        super().__init__(**options)
        payload = prompt.payload if isinstance(prompt.payload, Mapping) else {}
        key = self.config.answer
        if key is not None and key not in payload:
            message = f"prompt {prompt.id} has no {key!r} to judge by; with answer: null the task's reward judges"
            raise DataError(message, column=key)
        self._answer = None if key is None else str(payload[key])
        self._plan = [ToolCall(call["name"], call["arguments"]) for call in payload.get("plan", ())]
        self._tools = [_resolve_tool(name, prompt) for name in self.config.tools]
        self._format = TOOL_FORMATS.resolve(self.config.format)
        self._question = " ".join(message.content for message in prompt.messages)
        self._toolbox = Toolbox([], self._format)
        self._calls: list[ToolCall] = []
        self._last_results: list[str] = []

    async def reset(self, seed: int) -> Reset:
        """Begin an episode; the seed changes nothing."""
        command = self.config.mcp
        remote = await get_server(command).tools(self.config.seconds) if command else []
        self._toolbox = Toolbox([*self._tools, *remote], self._format)
        self._turns_left = self.config.turns
        return TASK.format(tools=self._toolbox.describe()), self._info(valid=True, effective=True)

    async def step(self, action: str) -> Step:
        """Call tools, or answer."""
        self._check_running()
        self._turns_left -= 1
        content, calls, problems = self._toolbox.format.parse(action)
        if problems:  # then no tool is called: the policy must know which calls were made
            return self._end_turn(" ".join(problems), -self.config.format_penalty, valid=False, effective=False)
        if not calls:
            return self._end_episode(content)
        results = []
        for call in calls:
            self._calls.append(call)
            results.append(await self._toolbox.answer(call, self.config.output))
        self._last_results = [text for text, _ in results]
        succeeded = [success for _, success in results]
        observation = render_tool_responses(self._last_results)
        return self._end_turn(observation, 0.0, valid=all(succeeded), effective=any(succeeded))

    def actions(self) -> Sequence[str]:
        """Return each word of the question and of the last results, as the answer and as an argument of a tool."""
        self._check_running()
        words = sorted(set(re.findall(r"\w+", " ".join([self._question, *self._last_results]))))
        tools = [tool for tool in self._toolbox.tools.values() if _takes_one_string(tool)]
        calls = [
            ToolCall(tool.name, dict.fromkeys(tool.parameters["properties"], word)) for tool in tools for word in words
        ]
        answers = (f"<answer>{word}</answer>" for word in words)
        return [*(self._toolbox.format.render("", [call]) for call in calls), *answers]

    def expert(self) -> str:
        """Return the next call of the payload's `plan`; the right answer after all of them."""
        self._check_running()
        following = next((call for call in self._plan if call not in self._calls), None)
        return self._toolbox.format.render("", [following]) if following else f"<answer>{self._answer}</answer>"

    def _end_turn(self, observation: str, reward: float, *, valid: bool, effective: bool) -> Step:
        over = not self._turns_left
        info = self._info(valid=valid, effective=effective) | ({"success": False} if over else {})
        return observation, reward, False, over, info

    def _end_episode(self, content: str) -> Step:
        self._turns_left = 0
        info = self._info(valid=True, effective=True)
        if self._answer is None:
            return "", 0.0, True, False, info
        correct = _normalize(extract_answer(strip_thinking(content))) == _normalize(self._answer)
        return "", float(correct), True, False, info | {"success": correct}

    def _info(self, *, valid: bool, effective: bool) -> dict[str, Any]:
        """Return info whose state key digests the calls so far: the same calls have the same results."""
        calls = json.dumps([(call.name, call.arguments) for call in self._calls], sort_keys=True)
        key = hashlib.blake2b(calls.encode(), digest_size=8).hexdigest()
        return {"state_key": key, "valid": valid, "effective": effective}


def _resolve_tool(name: str, prompt: Prompt) -> Tool:
    found: Callable[..., Any] = TOOLS.resolve(name)
    made = found(prompt) if "prompt" in inspect.signature(found).parameters else found
    return made if isinstance(made, Tool) else Tool.of(made)


def _takes_one_string(tool: Tool) -> bool:
    return [schema.get("type") for schema in tool.parameters.get("properties", {}).values()] == ["string"]


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split())
